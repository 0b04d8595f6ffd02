"""Attention functions for transformers' layers: one for uncompiled and one for compiled models."""

from collections.abc import Callable
from typing import TypedDict, Unpack

from torch import Tensor, nn
from transformers import AttentionInterface

from eaglegbv.attention.opaque import PagedCall, attend_opaque
from eaglegbv.errors import ModelNotSupported

PLAIN = "eaglegbv_paged"
"""Name of the attention function of an uncompiled model."""

COMPILED = "eaglegbv_paged_opaque"
"""Name of the attention function of a compiled model."""


class _Settings(TypedDict, total=False):
    """Settings that a layer passes to its attention, by transformers' names; others are ignored."""

    scaling: float | None
    sliding_window: int | None
    softcap: float | None
    s_aux: Tensor | None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  what a token sees comes with the batch
    *,
    eaglegbv_call: PagedCall | None = None,
    **settings: Unpack[_Settings],
) -> tuple[Tensor, None]:
    if eaglegbv_call is None:
        raise ModelNotSupported(
            "model", type(module).__name__, "attention that is handed the forward's keywords"
        )
    return _attend_by(eaglegbv_call.attend, module, query, key, value, **settings)


def _attend_compiled(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    **settings: Unpack[_Settings],
) -> tuple[Tensor, None]:
    return _attend_by(attend_opaque, module, query, key, value, **settings)


def _attend_by(
    attend: Callable[..., Tensor],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend for transformers: ``[1, heads, rows, dim]`` thrice to ``[1, rows, heads, dim]``."""
    out = attend(
        _layer_of(module),
        _by_row(query),
        _by_row(key),
        _by_row(value),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


def _by_row(part: Tensor) -> Tensor:
    return part.squeeze(0).transpose(0, 1)


def _layer_of(module: nn.Module) -> int:
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise ModelNotSupported("model", type(module).__name__, "attention that knows its layer")
    return layer


AttentionInterface.register(PLAIN, _attend)
AttentionInterface.register(COMPILED, _attend_compiled)
