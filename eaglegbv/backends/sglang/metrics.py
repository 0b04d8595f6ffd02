"""Acceptance in the usual terms of the field, counted exactly."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eaglegbv.config import Plan
from eaglegbv.metrics import RequestMetrics

TITLES = ("EAGLEGBV", "EAGLEGBV3")
"""Names of our algorithms."""


def acceptance_length(histogram: Sequence[int]) -> float:
    """Return the drafted tokens accepted per target forward.

    Args:
        histogram: Entry i is the number of verifications that accepted i drafted tokens.
    """
    forwards = sum(histogram)
    return sum(i * count for i, count in enumerate(histogram)) / forwards if forwards else 0.0


def corrected(meta_info: Mapping[str, Any], *, length: int) -> dict[str, Any]:
    """Return SGLang's ``meta_info`` of a finished request with its errors corrected.

    SGLang counts the token of the prompt's own forward among those that verifications committed. It
    also divides the number of accepted tokens by the nodes of the tree, though at most ``length``
    of them can be accepted.

    Args:
        meta_info: SGLang's own counts.
        length: Length of the drafted paths.
    """
    histogram = meta_info.get("spec_correct_drafts_histogram")
    if not histogram or not sum(histogram):
        return dict(meta_info)
    accepted = acceptance_length(histogram)
    return {
        **meta_info,
        "acceptance_length": accepted,
        "block_efficiency": accepted + 1,
        "spec_accept_length": accepted + 1,
        "spec_accept_rate": accepted / length,
    }


def request_metrics(meta_info: Mapping[str, Any], plan: Plan) -> RequestMetrics:
    """Return the counts of a finished request; SGLang does not report times of its phases.

    Args:
        meta_info: SGLang's own counts.
        plan: How the server drafts.
    """
    histogram: list[int] = meta_info.get("spec_correct_drafts_histogram") or []
    forwards, committed = sum(histogram), int(meta_info["completion_tokens"]) - 1
    return RequestMetrics(
        prompt_tokens=int(meta_info["prompt_tokens"]),
        target_forwards=forwards if plan.speculative else committed,
        committed_tokens=committed,
        accepted_tokens=sum(i * count for i, count in enumerate(histogram)),
        drafted_nodes=forwards * plan.paths * plan.depth,
        offered_by_depth=[forwards] * plan.depth if forwards else [],
        accepted_by_depth=(
            [sum(histogram[depth + 1 :]) for depth in range(plan.depth)] if forwards else []
        ),
    )


def corrected_rate(block_efficiency: float, *, length: int) -> float:
    """Return the accepted share of the tokens that could be accepted; 0 before any verification.

    Args:
        block_efficiency: Tokens committed per verification.
        length: Length of the drafted paths.
    """
    return max(0.0, block_efficiency - 1) / length


def install() -> None:
    """Correct SGLang's answers and Prometheus gauges, only for our algorithms."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
        _correct,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats",
        _correct_gauges,
        HookType.AROUND,
    )


def _correct_gauges(original: Callable[..., None], collector: Any, stats: Any) -> None:
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    if spec.speculative_algorithm in TITLES:
        # Here too, SGLang divides by the nodes of the tree.
        stats.spec_accept_rate = corrected_rate(
            stats.spec_accept_length, length=spec.speculative_num_steps
        )
    original(collector, stats)


def _correct(
    original: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    received: Any,
    i: int,
) -> None:
    from sglang.srt.runtime_context import get_spec

    original(manager, meta_info, received, i)
    spec = get_spec()
    if spec.speculative_algorithm in TITLES:
        meta_info.update(corrected(meta_info, length=spec.speculative_num_steps))
