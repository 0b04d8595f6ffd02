"""Acceptance, said in the field's terms and counted exactly."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

TITLES = ("EAGLEGBV", "EAGLEGBV3")
"""Names of our algorithms."""


def acceptance_length(histogram: Sequence[int]) -> float:
    """Return the drafted tokens accepted per target forward.

    Args:
        histogram: Entry i: verifications that accepted i drafted tokens.
    """
    forwards = sum(histogram)
    return sum(i * count for i, count in enumerate(histogram)) / forwards if forwards else 0.0


def corrected(meta_info: Mapping[str, Any], *, length: int) -> dict[str, Any]:
    """Return SGLang's ``meta_info`` of a finished request with what it gets wrong put right.

    SGLang counts the token of the prompt's own forward among those that verifications committed,
    and divides what was accepted by the nodes of the tree, of which at most ``length`` can be.

    Args:
        meta_info: As SGLang says it.
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


def install() -> None:
    """Have SGLang's tokenizer manager say it so, for our algorithms alone."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
        _correct,
        HookType.AROUND,
    )


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
