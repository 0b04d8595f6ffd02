"""What is counted about a request, a step and an engine, and the figures that follow."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

import msgspec

from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.tree_record import TreeRecord


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
        cached_tokens: Tokens of the text that were not read, an earlier request having read them;
            after a pre-emption tokens of the answer too.
        preemptions: How often the request was pre-empted.
        target_forwards: Decoding forwards of the target this request took part in.
        committed_tokens: Tokens those forwards committed (accepted, corrections and bonuses).
        accepted_tokens: Drafted tokens among them.
        drafted_nodes: Tree nodes drafted, roots not counted.
        offered_by_depth: Entry d - 1: forwards whose tree reached depth d.
        accepted_by_depth: Entry d - 1: forwards that accepted a node at depth d.
        plans: Decoding forwards by plan, such as ``{"otbv 3x4": 20, "none": 2}``.
        seconds: Wall time by phase; a batch's time is shared among its requests: forwards that also
            read prompts by the tokens each read, the rest equally. All time of a step in which a
            request reads its text is prefill.
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


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one phase.

    Attributes:
        phase: Which.
        start: Seconds since the stopwatch started.
        seconds: How long.
    """

    phase: Phase
    start: float
    seconds: float


class Stopwatch:
    """Wall time of one step, by phase."""

    def __init__(self, barrier: Callable[[], None] | None = None) -> None:
        """Start.

        Args:
            barrier: Waits for the device at the end of every phase; None to go on without.
        """
        self._barrier = barrier
        self.started = time.perf_counter()
        self.spans: list[Span] = []

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Time the body as ``phase``."""
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
class StepRecord:
    """What one step of an engine did.

    Attributes:
        number: Running number of the step.
        started: ``time.perf_counter()`` at its start.
        seconds: How long it took.
        spans: Its phases in order.
        requests: Requests that took part.
        prefilling: Those among them that read (a part of) their prompt.
        waiting: Requests that wait for admission.
        nodes: Tree nodes drafted, roots not counted.
        accepted: Drafted tokens accepted.
        committed: Tokens committed by decoding requests.
        plans: Decoding requests by plan.
        reasons: Decoding requests by the reason their plan was chosen for.
        kv_used: KV slots in use after the step.
        kv_slots: KV slots there are.
        trees: What became of each request's draft tree; empty unless an observer asked for trees.
    """

    number: int
    started: float
    seconds: float
    spans: tuple[Span, ...]
    requests: int
    prefilling: int
    waiting: int
    nodes: int
    accepted: int
    committed: int
    plans: Mapping[str, int]
    reasons: Mapping[str, int]
    kv_used: int
    kv_slots: int
    trees: Sequence[TreeRecord] = ()


class StepObserver(Protocol):
    """Is told about every step."""

    def on_step(self, record: StepRecord) -> None:
        """Take note of a step that was done."""


class Kind(StrEnum):
    """How a metric moves."""

    COUNTER = "counter"
    """Only up."""
    GAUGE = "gauge"
    """Up and down."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Something an engine counts or gauges, by the rules of Prometheus.

    Attributes:
        name: Unique; a counter's ends in ``_total``.
        help: One line.
        kind: Counter or gauge.
        label: What values are told apart by, or None.
    """

    name: str
    help: str
    kind: Kind = Kind.COUNTER
    label: str | None = None


STEPS = Metric("eaglegbv_steps_total", "Steps of the engine, one packed forward each.")
STEP_SECONDS = Metric("eaglegbv_step_seconds_total", "Wall time of steps, whole.")
PHASE_SECONDS = Metric(
    "eaglegbv_phase_seconds_total", "Wall time of steps by phase.", label="phase"
)
COMMITTED = Metric("eaglegbv_committed_tokens_total", "Tokens committed by decoding steps.")
ACCEPTED = Metric("eaglegbv_accepted_tokens_total", "Drafted tokens among the committed ones.")
DRAFTED = Metric("eaglegbv_drafted_nodes_total", "Nodes of draft trees, roots not counted.")
FORWARDS = Metric(
    "eaglegbv_request_forwards_total",
    "Decoding forwards times the requests in them, by plan.",
    label="plan",
)
REASONS = Metric(
    "eaglegbv_plan_reasons_total",
    "Decoding forwards times the requests in them, by why their plan was chosen.",
    label="reason",
)
PREEMPTIONS = Metric("eaglegbv_preemptions_total", "Requests that had to give up their slots.")
CACHED = Metric(
    "eaglegbv_cached_tokens_total", "Tokens not read, an earlier request having read them."
)
ATTENTION_FALLBACKS = Metric(
    "eaglegbv_attention_fallbacks_total",
    "Attention calls of the target that PyTorch served in place of FlashInfer, by the reason.",
    label="reason",
)
GRAPH_FORWARDS = Metric(
    "eaglegbv_graph_forwards_total",
    "Forwards of the target by whether a recording was replayed, or why not.",
    label="outcome",
)
GRAPH_DRAFTS = Metric(
    "eaglegbv_graph_drafts_total",
    "Drafts of a group's trees by whether a recording was replayed, or why not.",
    label="outcome",
)
FINISHED = Metric("eaglegbv_finished_requests_total", "Requests that ended.", label="reason")
FAILED_STEPS = Metric("eaglegbv_failed_steps_total", "Steps that broke off.")
FAILED_OBSERVERS = Metric(
    "eaglegbv_failed_observers_total", "Observers that failed, and were told no more."
)
RUNNING = Metric("eaglegbv_running_requests", "Requests admitted that go on.", Kind.GAUGE)
WAITING = Metric("eaglegbv_waiting_requests", "Requests not admitted yet.", Kind.GAUGE)
KV_USED = Metric("eaglegbv_kv_slots_used", "KV slots in use.", Kind.GAUGE)
KV_SLOTS = Metric("eaglegbv_kv_slots", "KV slots there are.", Kind.GAUGE)

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        metric.name: metric
        for metric in (
            *(STEPS, STEP_SECONDS, PHASE_SECONDS, FAILED_STEPS, FAILED_OBSERVERS),
            *(COMMITTED, ACCEPTED, DRAFTED, FORWARDS, REASONS, FINISHED),
            *(PREEMPTIONS, CACHED, ATTENTION_FALLBACKS, GRAPH_FORWARDS, GRAPH_DRAFTS),
            *(RUNNING, WAITING, KV_USED, KV_SLOTS),
        )
    }
)
"""Every metric by its name."""


@dataclass(slots=True)
class EngineMetrics:
    """Counters and gauges of an engine.

    Attributes:
        values: By metric, then by the value of its label (``""`` where it has none).
    """

    values: dict[Metric, dict[str, float]] = field(default_factory=dict)

    def add(self, metric: Metric, amount: float = 1, label: str = "") -> None:
        """Move a counter up."""
        cells = self.values.setdefault(metric, {})
        cells[label] = cells.get(label, 0) + amount

    def set(self, metric: Metric, value: float, label: str = "") -> None:
        """Set a gauge, or a counter that is kept elsewhere."""
        self.values.setdefault(metric, {})[label] = value

    def value(self, metric: Metric | str, label: str = "") -> float:
        """Return the value of a metric, or of the one of that name; 0 while there is none.

        Raises:
            InvalidArgument: No metric has that name.
        """
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

    def __str__(self) -> str:
        return self.exposition()

    def exposition(self) -> str:
        """Return all values in Prometheus' text format (version 0.0.4)."""
        lines = []
        for metric, cells in sorted(self.values.items(), key=lambda item: item[0].name):
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
            for label, value in sorted(cells.items()):
                where = f'{{{metric.label}="{_escaped(label)}"}}' if metric.label else ""
                lines.append(f"{metric.name}{where} {value:.12g}")
        return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
