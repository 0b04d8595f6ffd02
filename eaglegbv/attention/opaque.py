"""Attention within a compiled graph, as one opaque operation.

It plans a batch on the host, which a graph cannot contain. Operations take only tensors and
numbers, so the call's attention is set in a context variable around the call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from eaglegbv.attention.base import PackedBatch, PagedAttention
from eaglegbv.fused_linears import define


@dataclass(frozen=True, slots=True)
class PagedCall:
    """The attention and the batch that a model's forward passes to every layer."""

    attention: PagedAttention
    batch: PackedBatch

    @property
    def attend(self) -> Callable[..., Tensor]:
        """:meth:`PagedAttention.attend` over the forward's batch."""
        return partial(self.attention.attend, batch=self.batch)


_ATTEND: ContextVar[Callable[..., Tensor]] = ContextVar("eaglegbv_attend")


@contextmanager
def attending(attend: Callable[..., Tensor]) -> Iterator[None]:
    """Let compiled code attend with ``attend``, which is called as :func:`attend_opaque` is."""
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)


def attend_opaque(
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend within compiled code; see :meth:`PagedAttention.attend`."""
    out: Tensor = torch.ops.eaglegbv.attend(q, k, v, layer, scale, window, softcap, sinks)
    return out


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    attend = _ATTEND.get()
    found = attend(layer, q, k, v, scale=scale, window=window, softcap=softcap, sinks=sinks)
    return found.contiguous()  # as the graph expects it


def _shape(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


define(
    "attend",
    "(Tensor q, Tensor k, Tensor v, int layer, float scale,"
    " int? window, float? softcap, Tensor? sinks) -> Tensor",
    _run,
    _shape,
)
