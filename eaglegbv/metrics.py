"""Metrics: what is counted and timed of a request, a step and an engine.

An engine's counters and gauges follow the conventions of Prometheus.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

import msgspec

from eaglegbv.errors import InvalidArgument, one_of


@dataclass(frozen=True, slots=True)
class Metric:
    """A quantity that an engine counts or measures."""

    # Unique name. One that ends in `_total` is a counter's, which only increases; others are
    # gauges'.
    name: str
    help: str  # description in one line
    # Label that distinguishes its values, such as `phase`; None if it has a single one.
    label: str | None = None

    @property
    def kind(self) -> str:
        """Prometheus' type: ``counter`` or ``gauge``."""
        return "counter" if self.name.endswith("_total") else "gauge"


STEPS = Metric("eaglegbv_steps_total", "Engine steps, each one packed forward of the target.")
STEP_SECONDS = Metric("eaglegbv_step_seconds_total", "Total wall time of steps.")
PHASE_SECONDS = Metric("eaglegbv_phase_seconds_total", "Wall time of steps, by phase.", "phase")
FAILED_STEPS = Metric("eaglegbv_failed_steps_total", "Steps aborted by an error.")
FAILED_OBSERVERS = Metric(
    "eaglegbv_failed_observers_total", "Observers that raised and were dropped."
)
COMMITTED = Metric("eaglegbv_committed_tokens_total", "Tokens committed by decoding steps.")
ACCEPTED = Metric("eaglegbv_accepted_tokens_total", "Drafted tokens that were accepted.")
DRAFTED = Metric("eaglegbv_drafted_nodes_total", "Draft-tree nodes, roots excluded.")
FORWARDS = Metric(
    "eaglegbv_request_forwards_total",
    "Decoding forwards, counted once per request, by plan.",
    "plan",
)
REASONS = Metric(
    "eaglegbv_plan_reasons_total",
    "Decoding forwards, counted once per request, by the reason for the choice of plan.",
    "reason",
)
FINISHED = Metric("eaglegbv_finished_requests_total", "Finished requests.", "reason")
PREEMPTIONS = Metric(
    "eaglegbv_preemptions_total", "Times that a running request gave up its KV slots."
)
CACHED = Metric("eaglegbv_cached_tokens_total", "Tokens served from the prefix cache.")
TARGET_FORWARDS = Metric(
    "eaglegbv_target_forwards_total",
    "Forwards of the target, by what ran them: the native library or transformers.",
    "by",
)
ATTENTION_FALLBACKS = Metric(
    "eaglegbv_attention_fallbacks_total",
    "Attention calls of the target that fell back from FlashInfer to PyTorch, by reason.",
    "reason",
)
GRAPH_FORWARDS = Metric(
    "eaglegbv_graph_forwards_total",
    "Forwards of the target, by whether a recorded graph was replayed or why not.",
    "outcome",
)
GRAPH_DRAFTS = Metric(
    "eaglegbv_graph_drafts_total",
    "Drafts of a group's trees, by whether a recorded graph was replayed or why not.",
    "outcome",
)
RUNNING = Metric("eaglegbv_running_requests", "Requests admitted and unfinished.")
WAITING = Metric("eaglegbv_waiting_requests", "Requests waiting for admission.")
KV_USED = Metric("eaglegbv_kv_slots_used", "KV slots in use.")
KV_SLOTS = Metric("eaglegbv_kv_slots", "KV slots in the pool.")

METRICS: Mapping[str, Metric] = MappingProxyType(
    {metric.name: metric for metric in tuple(vars().values()) if isinstance(metric, Metric)}
)


class Phase(StrEnum):
    """The phases of a step's time."""

    PREFILL = "prefill"
    DRAFT = "draft"
    FORWARD = "forward"
    VERIFY = "verify"
    COMMIT = "commit"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time spent in one phase."""

    phase: Phase
    start: float  # seconds since the stopwatch started
    seconds: float  # duration


class Stopwatch:
    """Wall time of one step, by phase."""

    def __init__(self, barrier: Callable[[], None] | None = None) -> None:
        """Start; ``barrier`` waits for the device at the end of every phase, or nothing does."""
        self._barrier = barrier
        self.started = time.perf_counter()
        self.spans: list[Span] = []

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Count the time within this context as ``phase``."""
        start = time.perf_counter()
        try:
            yield
            if self._barrier is not None:
                self._barrier()
        finally:
            seconds = time.perf_counter() - start
            self.spans.append(Span(phase, start - self.started, seconds))

    @property
    def seconds(self) -> dict[Phase, float]:
        """Seconds of each phase that occurred."""
        return seconds_by_phase(self.spans)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started


def seconds_by_phase(spans: Iterable[Span]) -> dict[Phase, float]:
    """Return the seconds of each phase that occurs in ``spans``."""
    totals: dict[Phase, float] = {}
    for span in spans:
        totals[span.phase] = totals.get(span.phase, 0.0) + span.seconds
    return totals


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRecord:
    """A draft tree and the verdict on it.

    Sequences with one entry per node begin with the root, the last committed token. A value that a
    node does not have is None.
    """

    request: int  # running number of the request
    start: int  # number of tokens of the answer before the step
    # The prompt, in the record of the step that ended its prefill and drew the first token of the
    # answer; empty in all others.
    prompt_ids: tuple[int, ...]
    plan: str  # the request's plan, such as `otbv 3x4`
    verifier: str  # name of the rule that judged
    draft_sampling: str  # how the children of a node arose
    paths: int  # number of drafted paths
    token_ids: tuple[int, ...]  # tokens of the nodes
    parents: tuple[int, ...]  # parents of the nodes; the root is its own
    multiplicity: tuple[int, ...]  # how many of the paths run through each node
    # P of each node's token after its parent, with the request's settings, as the verifier saw it.
    target_probs: tuple[float | None, ...]
    # Q of each node's token after its parent, from which it was drawn; None where the distribution
    # draws nothing.
    draft_probs: tuple[float | None, ...]
    # Other numbers on which the rule based its verdict, by the symbols of its documentation.
    node_stats: Mapping[str, tuple[float | None, ...]]
    accepted: tuple[int, ...]  # the accepted nodes, from the root's child downwards
    next_token: int  # the token after them: the correction or bonus token
    next_target_prob: float  # p of that token after the last accepted node
    # The tokens that were kept of the accepted ones and the next: all of them, unless one of them
    # ended the text.
    committed: tuple[int, ...]
    finish_reason: str | None  # why the request ended with this step, or None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The record of one step of an engine."""

    number: int  # running number of the step
    started: float  # `time.perf_counter()` at its start
    seconds: float  # duration of the step
    spans: tuple[Span, ...]  # its phases in order
    requests: int  # number of requests that took part
    prefilling: int  # number of those whose prompt, or a part of it, was prefilled
    waiting: int  # number of requests waiting for admission
    nodes: int  # tree nodes drafted, without roots
    accepted: int  # drafted tokens accepted
    committed: int  # tokens committed by decoding requests
    plans: Mapping[str, int]  # decoding requests by plan
    reasons: Mapping[str, int]  # decoding requests by the reason for the choice of their plan
    kv_used: int  # KV slots in use after the step
    kv_slots: int  # KV slots in the pool
    # Each request's draft tree and its verdict; empty unless an observer requested trees.
    trees: Sequence[TreeRecord] = ()
    why: str = ""  # why plans were chosen, in words; empty if the user fixed them


class StepObserver(Protocol):
    """Receives the record of every step."""

    def on_step(self, record: StepRecord) -> None:
        """Receive the record of a step that has just ended."""


class RequestMetrics(msgspec.Struct):
    """Counts of one request, updated while it runs.

    The first token comes from the prompt's own forward (prefill) and counts in neither
    ``target_forwards`` nor ``committed_tokens``. A text cut at a stop counts only the tokens kept.
    """

    prompt_tokens: int = 0  # length of the prompt
    # Tokens served from the prefix cache instead of being prefilled; after a pre-emption, also
    # tokens of the answer.
    cached_tokens: int = 0
    queue_seconds: float = 0.0  # from its arrival to the beginning of its first step
    preemptions: int = 0  # how often the request was pre-empted
    target_forwards: int = 0  # decoding forwards of the target this request took part in
    committed_tokens: int = 0  # tokens those forwards committed (accepted, corrections and bonuses)
    accepted_tokens: int = 0  # drafted tokens among them
    drafted_nodes: int = 0  # tree nodes drafted, without roots
    # Entry d - 1 is the number of forwards whose tree reached depth d.
    offered_by_depth: list[int] = msgspec.field(default_factory=list)
    # Entry d - 1 is the number of forwards that accepted a node at depth d.
    accepted_by_depth: list[int] = msgspec.field(default_factory=list)
    # Of each verification of drafts in turn: accepted tokens, and nodes of the tree.
    accepted_by_step: list[int] = msgspec.field(default_factory=list)
    drafted_by_step: list[int] = msgspec.field(default_factory=list)
    # Decoding forwards by plan, such as `{"otbv 3x4": 20, "none": 2}`.
    plans: dict[str, int] = msgspec.field(default_factory=dict)
    # Wall time by phase. A batch's time is shared among its requests: that of forwards that also
    # read prompts by the number of tokens each request reads, the rest equally. All time of a step
    # in which a request reads its text is prefill.
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
    def mean_acceptance_length(self) -> float:
        """Tokens a verification, as load generators count: 1 + accepted drafts / verifications."""
        return 1 + sum(self.accepted_by_step) / max(1, len(self.accepted_by_step))

    @property
    def acceptance_histogram(self) -> list[int]:
        """Entry n is the number of verifications that accepted n drafts, up to the depth."""
        counts = Counter(self.accepted_by_step)
        return [counts[accepted] for accepted in range(len(self.offered_by_depth) + 1)]

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
        if offered:
            self.accepted_by_step.append(accepted)
            self.drafted_by_step.append(nodes)
        grow = offered - len(self.offered_by_depth)
        self.offered_by_depth += [0] * grow
        self.accepted_by_depth += [0] * grow
        for depth in range(offered):
            self.offered_by_depth[depth] += 1
            self.accepted_by_depth[depth] += depth < accepted

    def add_seconds(self, phase: Phase, seconds: float) -> None:
        """Add wall time to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


@dataclass(slots=True)
class EngineMetrics:
    """Counters and gauges of an engine."""

    # Values by metric, then by the value of its label (`""` if it has none).
    values: dict[Metric, dict[str, float]] = field(default_factory=dict)

    def add(self, metric: Metric, amount: float = 1, label: str = "") -> None:
        """Increase a counter."""
        by_label = self.values.setdefault(metric, {})
        by_label[label] = by_label.get(label, 0) + amount

    def set(self, metric: Metric, value: float, label: str = "") -> None:
        """Set a gauge, or a counter that is counted elsewhere."""
        self.values.setdefault(metric, {})[label] = value

    def value(self, metric: Metric | str, label: str = "") -> float:
        """Return the value of a metric or of its name (InvalidArgument if unknown), at first 0."""
        if isinstance(metric, str):
            if metric not in METRICS:
                raise InvalidArgument("metric", metric, one_of(sorted(METRICS), metric))
            metric = METRICS[metric]
        return self.values.get(metric, {}).get(label, 0)

    def on_step(self, record: StepRecord) -> None:
        """Count a step."""
        self.add(STEPS)
        self.add(STEP_SECONDS, record.seconds)
        for span in record.spans:
            self.add(PHASE_SECONDS, span.seconds, span.phase)
        self.add(COMMITTED, record.committed)
        self.add(ACCEPTED, record.accepted)
        self.add(DRAFTED, record.nodes)
        for plan, requests in record.plans.items():
            self.add(FORWARDS, requests, plan)
        for reason, requests in record.reasons.items():
            self.add(REASONS, requests, reason)

    def exposition(self) -> str:
        """Return all values in Prometheus' text format (version 0.0.4)."""
        lines = []
        for metric, by_label in sorted(self.values.items(), key=lambda item: item[0].name):
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
            for label, value in sorted(by_label.items()):
                where = f'{{{metric.label}="{_escaped(label)}"}}' if metric.label else ""
                lines.append(f"{metric.name}{where} {value:.12g}")
        return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
