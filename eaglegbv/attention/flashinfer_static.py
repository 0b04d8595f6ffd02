"""Attention of recorded forwards by FlashInfer's kernels, under masks."""

import torch
from torch import Tensor

from eaglegbv.attention.base import PackedBatch, StaticAttention
from eaglegbv.attention.flashinfer_buffers import TreeBuffers
from eaglegbv.attention.flashinfer_plans import FlashInferPlans, LayerKind
from eaglegbv.attention.flashinfer_wrappers import FlashInferWrappers, PlannedWrapper
from eaglegbv.attention.kv_pool import KVPool
from eaglegbv.graphs import Bucket, NotRecordable


class StaticTreeAttention(StaticAttention):
    """Masked attention of batches of fixed sizes, planned into fixed memory.

    Every kind of layer has a separate wrapper, because a wrapper that was once planned with a mask
    always reads one. A window is part of the mask, whether texts have reached it or not.
    """

    def __init__(
        self,
        pool: KVPool,
        wrappers: FlashInferWrappers,
        bucket: Bucket,
        *,
        max_context: int,
    ) -> None:
        """Start without wrappers: the first forward shows what kinds of layers there are.

        Args:
            pool: Keys and values.
            wrappers: Makes wrappers over the pool.
            bucket: Number of requests, including one for padding, and number of rows.
            max_context: Most positions of a text.
        """
        self.pool = pool
        self._wrappers = wrappers
        self._plans = FlashInferPlans(pool)
        self._bucket = bucket
        self._max_context = max_context
        self._batch: PackedBatch | None = None
        self._kinds: dict[LayerKind, PlannedWrapper] = {}
        longest = min(max_context, self.pool.num_slots)
        self._keys = longest + bucket.rows
        with torch.inference_mode(mode=False):
            self._key_slots = torch.zeros(
                bucket.requests * longest + bucket.rows,
                dtype=torch.int32,
                device=self.pool.keys.device,
            )

    def plan(self, batch: PackedBatch) -> None:
        """See :meth:`StaticAttention.plan`."""
        self._batch = batch
        for kind, planned in self._kinds.items():
            self._plan_kind(batch, kind, planned)

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
        """See :meth:`PagedAttention.attend`.

        Raises:
            NotRecordable: The layer has sinks, which the kernels do not support.
        """
        if sinks is not None:
            raise NotRecordable("sinks")
        keys, values = self.pool.write(layer, batch.slots, k, v)
        if window is not None and window >= self._max_context:
            window = None
        planned = self._wrapper(LayerKind(window, scale, softcap, q.shape[1]))
        return planned.attend(q, keys, values)

    def _wrapper(self, kind: LayerKind) -> PlannedWrapper:
        planned = self._kinds.get(kind)
        if planned is None:
            assert self._batch is not None  # a recording begins with a plan
            with torch.inference_mode(mode=False):
                sizes = (self._bucket.requests + 1, self._bucket.rows, self._keys)
                buffers = TreeBuffers.of(*sizes, self._key_slots)
                planned = self._wrappers.static(buffers, self._bucket.rows, kind.heads)
            self._kinds[kind] = planned
            self._plan_kind(self._batch, kind, planned)
        return planned

    def _plan_kind(self, batch: PackedBatch, kind: LayerKind, planned: PlannedWrapper) -> None:
        planned.wait()
        self._plans.plan_tree(planned.wrapper, batch, kind)
        planned.mark()
