"""Paged attention by FlashInfer's kernels, for GPUs.

A batch is planned once per kind of layer, with lengths that are known on the host, so that nothing
waits for the device. There are three kernels, one for each shape of work:

- decode: one new token per request, which sees all its keys;
- causal prefill: prompts and the rows a drafter catches up on, without a mask;
- tree prefill: anything else, under a packed mask of one bit per (query, key).
"""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from eaglegbv.attention.base import PackedBatch, PagedAttention
from eaglegbv.attention.branches import BranchShape
from eaglegbv.attention.flashinfer_branches import FlashInferBranches
from eaglegbv.attention.flashinfer_kernels import FlashInferKernels, Kernels, check_pool
from eaglegbv.attention.flashinfer_plans import FlashInferPlans, LayerKind
from eaglegbv.attention.flashinfer_static import StaticTreeAttention
from eaglegbv.attention.flashinfer_wrappers import FlashInferWrappers, PlannedWrapper
from eaglegbv.attention.kv_pool import KVPool
from eaglegbv.attention.torch_paged import TorchPagedAttention
from eaglegbv.graphs import Bucket

_log = logging.getLogger(__name__)


class FlashInferPagedAttention(PagedAttention):
    """Attention by FlashInfer over a pool on a GPU."""

    recordable: ClassVar[bool] = True

    def __init__(self, pool: KVPool, kernels: Kernels | None = None) -> None:
        """Attend over ``pool``.

        Args:
            pool: Keys and values, in half precision.
            kernels: Factory of wrappers; by default FlashInfer's.

        Raises:
            InvalidArgument: FlashInfer is not installed, or does not support the pool's head size
                or dtype.
        """
        check_pool(pool)
        self.pool = pool
        self._fallbacks: Counter[str] = Counter()
        self._wrappers = FlashInferWrappers(
            pool, FlashInferKernels() if kernels is None else kernels
        )
        self._plans = FlashInferPlans(pool)
        self._torch = TorchPagedAttention(pool)
        self._branches: dict[BranchShape, FlashInferBranches] = {}
        self._batch: PackedBatch | None = None
        self._planned: dict[LayerKind, PlannedWrapper] = {}

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: PackedBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`PagedAttention.attend`."""
        if sinks is not None:
            return self._fall_back("sinks").attend(
                layer, q, k, v, batch, scale=scale, window=window, softcap=softcap, sinks=sinks
            )
        keys, values = self.pool.write(layer, batch.slots, k, v)
        kind = LayerKind(batch.effective_window(window), scale, softcap, q.shape[1])
        planned = self._plan(batch, kind)
        return planned.attend(q, keys, values)

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """See :meth:`PagedAttention.fallbacks`."""
        return self._fallbacks

    def static(self, bucket: Bucket, *, max_context: int) -> StaticTreeAttention:
        """See :meth:`PagedAttention.static`."""
        return StaticTreeAttention(self.pool, self._wrappers, bucket, max_context=max_context)

    def branches(self, shape: BranchShape) -> FlashInferBranches:
        """See :meth:`PagedAttention.branches`.

        Recordings of one shape share the result: it is planned anew before each replay.
        """
        found = self._branches.get(shape)
        if found is None:
            found = self._branches[shape] = FlashInferBranches(self.pool, self._wrappers, shape)
        return found

    def _fall_back(self, reason: str) -> TorchPagedAttention:
        if not self._fallbacks[reason]:
            _log.warning(
                "FlashInfer's kernels lack %s: PyTorch's attention takes their calls", reason
            )
        self._fallbacks[reason] += 1
        return self._torch

    def _plan(self, batch: PackedBatch, kind: LayerKind) -> PlannedWrapper:
        if batch is not self._batch:
            self._batch, self._planned = batch, {}
        planned = self._planned.get(kind)
        if planned is None:
            planned = self._planned[kind] = self._plan_kind(batch, kind)
        return planned

    def _plan_kind(self, batch: PackedBatch, kind: LayerKind) -> PlannedWrapper:
        causal = kind.window is None and all(s.visible is None for s in batch.segments)
        if causal and batch.rows == len(batch.segments):
            planned = self._wrappers.plain("decode", kind)
            self._plans.plan_decode(planned.wrapper, batch, kind)
        elif causal:
            planned = self._wrappers.plain("causal", kind)
            self._plans.plan_causal(planned.wrapper, batch, kind)
        else:
            planned = self._wrappers.plain("tree", kind)
            self._plans.plan_tree(planned.wrapper, batch, kind)
        planned.mark()
        return planned
