"""Plans of FlashInfer's wrappers. The page size is 1, so slots are pages.

Lengths are known on the host, so no plan waits for the device.

The kernels read ``mask_indptr`` in bytes. ``plan(packed_custom_mask=...)`` of 0.6.18 and 0.7.2
leaves it in bits, which is wrong for every request but the first, so it is overwritten afterwards.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eaglegbv.attention.base import PackedBatch, offsets_of
from eaglegbv.attention.branches import BranchShape
from eaglegbv.attention.flashinfer_kernels import Wrapper
from eaglegbv.attention.kv_pool import KVPool
from eaglegbv.attention.packed_masks import PackedMasks
from eaglegbv.transfer import send


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that share a plan.

    Attributes:
        window: Sliding window, or None.
        scale: Factor on the scores.
        softcap: Cap of the scores, or None.
        heads: Query heads.
    """

    window: int | None
    scale: float
    softcap: float | None
    heads: int


class FlashInferPlans:
    """Plans batches over a pool for given wrappers."""

    def __init__(self, pool: KVPool) -> None:
        """Plan for ``pool``."""
        self._pool = pool

    def plan_decode(self, wrapper: Wrapper, batch: PackedBatch, kind: LayerKind) -> None:
        """Plan a batch with one new token per request, which sees all its keys."""
        wrapper.plan(*self._pages(batch), kind.heads, *self._sizes, **self._settings(kind))

    def plan_causal(self, wrapper: Wrapper, batch: PackedBatch, kind: LayerKind) -> None:
        """Plan a batch in causal order, without a window."""
        self._plan_prefill(wrapper, batch, kind, None)

    def plan_tree(self, wrapper: Wrapper, batch: PackedBatch, kind: LayerKind) -> None:
        """Plan a batch under its masks."""
        masks = PackedMasks.of(batch.segments, kind.window, self._pool.keys.device)
        self._plan_prefill(wrapper, batch, kind, masks)

    def plan_rows(
        self,
        wrapper: Wrapper,
        pages: tuple[Tensor, Tensor],
        masks: PackedMasks,
        shape: BranchShape,
    ) -> None:
        """Plan drafted rows under masks.

        Args:
            wrapper: The wrapper to plan.
            pages: Offsets and slots of the requests' keys, both int32 on the host.
            masks: Masks of the requests, on the pool's device.
            shape: Sizes of the rows.
        """
        kind = LayerKind(None, shape.scale, None, shape.heads)
        queries = torch.arange(shape.requests + 1, dtype=torch.int32) * shape.branches
        self._plan_queries(wrapper, queries, self._sent(*pages), kind, masks)

    def _plan_prefill(
        self, wrapper: Wrapper, batch: PackedBatch, kind: LayerKind, masks: PackedMasks | None
    ) -> None:
        queries = torch.tensor(batch.offsets, dtype=torch.int32)
        self._plan_queries(wrapper, queries, self._pages(batch), kind, masks)

    def _plan_queries(
        self,
        wrapper: Wrapper,
        queries: Tensor,
        pages: tuple[Tensor, Tensor, Tensor],
        kind: LayerKind,
        masks: PackedMasks | None,
    ) -> None:
        """Plan queries with given offsets (host) and pages, under masks or in causal order."""
        wrapper.plan(
            queries,
            *pages,
            kind.heads,
            *self._sizes,
            packed_custom_mask=None if masks is None else masks.bits,
            causal=masks is None,
            **self._settings(kind),
        )
        if masks is not None:
            self._mend_offsets(wrapper, masks)

    def _mend_offsets(self, wrapper: Wrapper, masks: PackedMasks) -> None:
        """Overwrite the mask offsets that FlashInfer's plan left in bits with those in bytes."""
        planned = wrapper._mask_indptr_buf
        assert planned is not None  # the plan had masks
        planned.copy_(masks.byte_offsets, non_blocking=True)

    def _pages(self, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return offsets (host), slots of all keys (device), and lengths of last pages (host)."""
        counts = (segment.num_keys for segment in batch.segments)
        offsets = torch.tensor(offsets_of(counts), dtype=torch.int32)
        slots = torch.cat([segment.key_slots() for segment in batch.segments]).to(torch.int32)
        return self._sent(offsets, slots)

    def _sent(self, offsets: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return offsets, the slots on the device, and lengths of last pages."""
        last_pages = torch.ones(len(offsets) - 1, dtype=torch.int32)
        return offsets, send(slots, self._pool.keys.device), last_pages

    def _settings(self, kind: LayerKind) -> dict[str, Any]:
        dtype = self._pool.keys.dtype
        return {
            "sm_scale": kind.scale,
            "logits_soft_cap": kind.softcap,
            "window_left": -1,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Key heads, head size, and page size."""
        return self._pool.keys.shape[2], self._pool.keys.shape[3], 1
