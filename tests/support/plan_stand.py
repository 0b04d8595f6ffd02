"""Stand-ins for FlashInfer's wrappers that attend by definition from what they were planned with.

They read plans as FlashInfer's kernels do: bits at ``q * keys + k`` behind a byte offset,
little-endian; ``plan`` leaving bit offsets there.
"""

from typing import Any

import torch
from torch import Tensor

from eaglegbv.attention.flashinfer import FlashInferKernels, TreeBuffers
from support.ragged_batches import SIZES, Sizes


class Stand:
    """A wrapper that attends by definition from what it was planned with."""

    def __init__(self) -> None:
        self.plans = 0
        self._mask_indptr_buf: Tensor | None = None

    def plan(self, *arguments: Any, **named: Any) -> None:
        self.plans += 1
        queries, indptr, indices, last, heads, kv_heads, dim, page = arguments
        for offsets in (queries, indptr, indices, last):
            assert offsets.dtype == torch.int32
        assert Sizes(heads, kv_heads, dim) == SIZES
        assert page == 1
        assert (last == 1).all()
        assert named["window_left"] == -1
        self.queries, self.indptr, self.indices, self.named = queries, indptr, indices, named
        sizes = (queries[1:] - queries[:-1]) * (indptr[1:] - indptr[:-1])
        # The fault of FlashInfer's plan: bits, where the kernel counts bytes.
        self._mask_indptr_buf = torch.cat((torch.zeros(1), sizes.cumsum(0))).to(torch.int32)

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        assert q.is_contiguous()  # kernels look at no strides of these
        assert out.is_contiguous()
        keys, values = (part.squeeze(1).float() for part in kv)
        for b in range(len(self.indptr) - 1):
            own = self.indices[self.indptr[b] : self.indptr[b + 1]].long()
            rows = range(int(self.queries[b]), int(self.queries[b + 1]))
            for i, row in enumerate(rows):
                seen = [k for k in range(len(own)) if self._sees(b, i, k, len(rows), len(own))]
                for head in range(SIZES.heads):
                    kv_head = head // (SIZES.heads // SIZES.kv_heads)
                    scores = keys[own[seen], kv_head] @ q[row, head].float()
                    scores = scores * self.named["sm_scale"]
                    if (cap := self.named["logits_soft_cap"]) is not None:
                        scores = cap * torch.tanh(scores / cap)
                    out[row, head] = scores.softmax(0) @ values[own[seen], kv_head]
        return out

    def _sees(self, b: int, query: int, key: int, queries: int, keys: int) -> bool:
        packed = self.named["packed_custom_mask"]
        if packed is None:
            assert self.named["causal"]
            return key <= keys - queries + query
        assert self._mask_indptr_buf is not None
        bit = query * keys + key
        octet = int(packed[int(self._mask_indptr_buf[b]) + bit // 8])
        return bool(octet >> bit % 8 & 1)


class StandKernels(FlashInferKernels):
    """Makes stand-ins, and keeps them."""

    def __init__(self) -> None:
        self.made: list[Stand] = []

    def processors(self, device: torch.device) -> int:
        return 1

    def prefill(self, workspace: Tensor, buffers: TreeBuffers | None = None) -> Stand:
        assert buffers is None
        self.made.append(Stand())
        return self.made[-1]
