"""Counts of one request, and the figures derived from them."""

import msgspec

from eaglegbv.stopwatch import Phase


class RequestMetrics(msgspec.Struct):
    """Counts of one request, updated while it runs.

    The first token comes from the prompt's own forward (prefill) and counts in neither
    ``target_forwards`` nor ``committed_tokens``. A text cut at a stop counts only the tokens kept.

    Attributes:
        prompt_tokens: Length of the prompt.
        cached_tokens: Tokens of the text served from the prefix cache instead of being read; after
            a pre-emption, also tokens of the answer.
        preemptions: How often the request was pre-empted.
        target_forwards: Decoding forwards of the target this request took part in.
        committed_tokens: Tokens those forwards committed (accepted, corrections and bonuses).
        accepted_tokens: Drafted tokens among them.
        drafted_nodes: Tree nodes drafted, without roots.
        offered_by_depth: Entry d - 1 is the number of forwards whose tree reached depth d.
        accepted_by_depth: Entry d - 1 is the number of forwards that accepted a node at depth d.
        plans: Decoding forwards by plan, such as ``{"otbv 3x4": 20, "none": 2}``.
        seconds: Wall time by phase. A batch's time is shared among its requests: that of forwards
            that also read prompts by the number of tokens each request reads, the rest equally. All
            time of a step in which a request reads its text is prefill.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    target_forwards: int = 0
    committed_tokens: int = 0
    accepted_tokens: int = 0
    drafted_nodes: int = 0
    offered_by_depth: list[int] = msgspec.field(default_factory=list)
    accepted_by_depth: list[int] = msgspec.field(default_factory=list)
    plans: dict[str, int] = msgspec.field(default_factory=dict)
    seconds: dict[Phase, float] = msgspec.field(default_factory=dict)

    @property
    def acceptance_length(self) -> float:
        """Accepted tokens per target forward."""
        return self.accepted_tokens / max(1, self.target_forwards)

    @property
    def block_efficiency(self) -> float:
        """Committed tokens per target forward: acceptance length + 1, except for cut texts."""
        return self.committed_tokens / max(1, self.target_forwards)

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of the forwards offering a node at each depth that accepted one there."""
        pairs = zip(self.accepted_by_depth, self.offered_by_depth, strict=True)
        return [accepted / offered for accepted, offered in pairs]

    @property
    def decode_seconds(self) -> float:
        """Seconds in all phases except prefill."""
        return sum(s for phase, s in self.seconds.items() if phase is not Phase.PREFILL)

    def count_forward(
        self, *, offered: int, accepted: int, committed: int, nodes: int, plan: str
    ) -> None:
        """Count one decoding forward that offered ``offered`` depths and accepted ``accepted``."""
        self.target_forwards += 1
        self.plans[plan] = self.plans.get(plan, 0) + 1
        self.committed_tokens += committed
        self.accepted_tokens += accepted
        self.drafted_nodes += nodes
        grow = offered - len(self.offered_by_depth)
        self.offered_by_depth += [0] * grow
        self.accepted_by_depth += [0] * grow
        for depth in range(offered):
            self.offered_by_depth[depth] += 1
            self.accepted_by_depth[depth] += depth < accepted

    def add_seconds(self, phase: Phase, seconds: float) -> None:
        """Add wall time to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
