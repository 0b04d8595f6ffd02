"""How transformers' layers reach the paged attention, and which forward they belong to."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from eaglegbv.attention.base import PackedBatch, PagedAttention
from eaglegbv.errors import ModelNotSupported

PLAIN = "eaglegbv_paged"
"""Name of the attention function of a model that runs as it is."""

COMPILED = "eaglegbv_paged_opaque"
"""Name of that of a model that is compiled."""

_OP = "eaglegbv::attend"


@dataclass(frozen=True, slots=True)
class PagedCall:
    """What one forward of the model carries down to every layer's attention."""

    attention: PagedAttention
    batch: PackedBatch

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend for transformers: ``[1, heads, rows, dim]`` to ``[1, rows, heads, dim]``."""
        q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
        return self.attention.attend(
            layer, q, k, v, self.batch, scale=scale, window=window, softcap=softcap, sinks=sinks
        ).unsqueeze(0)


def _attend_paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  what a token sees comes with the batch
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    eaglegbv_call: PagedCall | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    if eaglegbv_call is None:
        raise ModelNotSupported(
            "model", type(module).__name__, "attention that is handed the forward's keywords"
        )
    out = eaglegbv_call.attend(
        _layer_of(module),
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out, None


def _layer_of(module: nn.Module) -> int:
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise ModelNotSupported("model", type(module).__name__, "attention that knows its layer")
    return layer


# In a compiled graph attention is one opaque operation: it plans a batch on the host, which no
# graph can hold. Operations take tensors and numbers alone, so the forward it belongs to is said
# around the call.

_CALL: ContextVar[PagedCall] = ContextVar("eaglegbv_call")


@contextmanager
def serving(call: PagedCall) -> Iterator[None]:
    """Have compiled code attend by ``call``."""
    token = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(token)


def _attend_compiled(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = _layer_of(module)
    limits = (sliding_window, softcap, s_aux)
    out: Tensor = torch.ops.eaglegbv.attend(query, key, value, layer, scale, *limits)
    return out, None


def _run_opaque(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    found = _CALL.get().attend(
        layer, query, key, value, scale=scale, window=window, softcap=softcap, sinks=sinks
    )
    return found.contiguous()  # as the graph expects it


def _shape_opaque(query: Tensor, *_: object) -> Tensor:
    one, heads, rows, dim = query.shape
    return query.new_empty((one, rows, heads, dim))


torch.library.define(
    _OP,
    "(Tensor query, Tensor key, Tensor value, int layer, float scale,"
    " int? window, float? softcap, Tensor? sinks) -> Tensor",
)
torch.library.impl(_OP, "default", _run_opaque)
torch.library.register_fake(_OP, _shape_opaque)
AttentionInterface.register(PLAIN, _attend_paged)
AttentionInterface.register(COMPILED, _attend_compiled)
