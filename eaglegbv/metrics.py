"""What is counted about a request, and how the field's figures follow from the counts."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import msgspec


class Phase(StrEnum):
    """Where a step's time goes."""

    PREFILL = "prefill"
    DRAFT = "draft"
    FORWARD = "forward"
    VERIFY = "verify"
    COMMIT = "commit"


class RequestMetrics(msgspec.Struct):
    """Counts of one request, filled while it runs.

    The first token comes from the prompt's own forward (prefill) and counts in neither
    ``target_forwards`` nor ``committed_tokens``. A text cut at a stop counts the tokens kept.

    Attributes:
        prompt_tokens: Length of the prompt.
        target_forwards: Decoding forwards of the target this request took part in.
        committed_tokens: Tokens those forwards committed (accepted, corrections and bonuses).
        accepted_tokens: Drafted tokens among them.
        drafted_nodes: Tree nodes drafted, roots not counted.
        offered_by_depth: Entry d - 1: forwards whose tree reached depth d.
        accepted_by_depth: Entry d - 1: forwards that accepted a node at depth d.
        seconds: Wall time by phase; a batch's time is shared equally among its requests.
    """

    prompt_tokens: int = 0
    target_forwards: int = 0
    committed_tokens: int = 0
    accepted_tokens: int = 0
    drafted_nodes: int = 0
    offered_by_depth: list[int] = msgspec.field(default_factory=list)
    accepted_by_depth: list[int] = msgspec.field(default_factory=list)
    seconds: dict[Phase, float] = msgspec.field(default_factory=dict)

    @property
    def acceptance_length(self) -> float:
        """Accepted tokens per target forward."""
        return self.accepted_tokens / max(1, self.target_forwards)

    @property
    def block_efficiency(self) -> float:
        """Committed tokens per target forward: acceptance length + 1, but for cut texts."""
        return self.committed_tokens / max(1, self.target_forwards)

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of the forwards offering a node at each depth that accepted one there."""
        pairs = zip(self.accepted_by_depth, self.offered_by_depth, strict=True)
        return [accepted / offered for accepted, offered in pairs]

    @property
    def decode_seconds(self) -> float:
        """Seconds in all phases but prefill."""
        return sum(s for phase, s in self.seconds.items() if phase is not Phase.PREFILL)

    def count_forward(self, *, offered: int, accepted: int, committed: int, nodes: int) -> None:
        """Count one decoding forward that offered ``offered`` depths and accepted ``accepted``."""
        self.target_forwards += 1
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


class Stopwatch:
    """Wall time by phase of one step."""

    def __init__(self) -> None:
        self.seconds: dict[Phase, float] = {}

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Time the body as ``phase``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
