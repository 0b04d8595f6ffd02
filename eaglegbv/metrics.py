"""The metrics of an engine, following the conventions of Prometheus."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class MetricKind(StrEnum):
    """How the value of a metric changes."""

    COUNTER = "counter"
    """It only increases."""
    GAUGE = "gauge"
    """It increases and decreases."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A quantity that an engine counts or measures.

    Attributes:
        name: Unique name; a counter's ends in ``_total``.
        help: Description in one line.
        kind: Counter or gauge.
        label: Label that distinguishes its values, such as ``phase``; None if it has a single one.
    """

    name: str
    help: str
    kind: MetricKind = MetricKind.COUNTER
    label: str | None = None


STEPS = Metric("eaglegbv_steps_total", "Engine steps, each one packed forward of the target.")
STEP_SECONDS = Metric("eaglegbv_step_seconds_total", "Total wall time of steps.")
PHASE_SECONDS = Metric(
    "eaglegbv_phase_seconds_total", "Wall time of steps, by phase.", label="phase"
)
COMMITTED = Metric("eaglegbv_committed_tokens_total", "Tokens committed by decoding steps.")
ACCEPTED = Metric("eaglegbv_accepted_tokens_total", "Drafted tokens that were accepted.")
DRAFTED = Metric("eaglegbv_drafted_nodes_total", "Draft-tree nodes, roots excluded.")
FORWARDS = Metric(
    "eaglegbv_request_forwards_total",
    "Decoding forwards, counted once per request, by plan.",
    label="plan",
)
REASONS = Metric(
    "eaglegbv_plan_reasons_total",
    "Decoding forwards, counted once per request, by the reason for the choice of plan.",
    label="reason",
)
PREEMPTIONS = Metric(
    "eaglegbv_preemptions_total", "Times that a running request gave up its KV slots."
)
CACHED = Metric("eaglegbv_cached_tokens_total", "Tokens served from the prefix cache.")
ATTENTION_FALLBACKS = Metric(
    "eaglegbv_attention_fallbacks_total",
    "Attention calls of the target that fell back from FlashInfer to PyTorch, by reason.",
    label="reason",
)
GRAPH_FORWARDS = Metric(
    "eaglegbv_graph_forwards_total",
    "Forwards of the target, by whether a recorded graph was replayed or why not.",
    label="outcome",
)
GRAPH_DRAFTS = Metric(
    "eaglegbv_graph_drafts_total",
    "Drafts of a group's trees, by whether a recorded graph was replayed or why not.",
    label="outcome",
)
FINISHED = Metric("eaglegbv_finished_requests_total", "Finished requests.", label="reason")
FAILED_STEPS = Metric("eaglegbv_failed_steps_total", "Steps aborted by an error.")
FAILED_OBSERVERS = Metric(
    "eaglegbv_failed_observers_total", "Observers that raised and were dropped."
)
RUNNING = Metric("eaglegbv_running_requests", "Requests admitted and unfinished.", MetricKind.GAUGE)
WAITING = Metric("eaglegbv_waiting_requests", "Requests waiting for admission.", MetricKind.GAUGE)
KV_USED = Metric("eaglegbv_kv_slots_used", "KV slots in use.", MetricKind.GAUGE)
KV_SLOTS = Metric("eaglegbv_kv_slots", "KV slots in the pool.", MetricKind.GAUGE)

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
