"""Stand-ins for FlashInfer's wrappers, which read plans as its kernels do.

``plan`` does on the host what FlashInfer's does: it checks sizes and copies, into the wrapper's
static buffers or into new ones, and leaves bit offsets where the kernel reads byte offsets. Bits
lie at ``q * keys + k`` behind them, little-endian. ``run`` is made of tensor operations over these
buffers alone, so that it can be recorded.
"""

from typing import Any

import torch
from torch import Tensor

from eaglegbv.attention.flashinfer import FlashInferKernels, FlashInferPagedAttention, TreeBuffers
from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.attention.torch import TorchPagedAttention

MOST_KEYS = 272  # of a request in static buffers


class Stand:
    """A wrapper; of masked requests of fixed sizes if it is given buffers."""

    def __init__(self, buffers: TreeBuffers | None) -> None:
        self.fixed, self.plans = buffers, 0
        self._mask_indptr_buf: Tensor | None = None

    def plan(self, *arguments: Any, **named: Any) -> None:
        queries, keys, slots, last, *self.sizes, page = arguments
        assert {part.dtype for part in (queries, keys, slots, last)} == {torch.int32}
        assert (page, named["window_left"]) == (1, -1)
        assert (last == 1).all()
        self.plans += 1
        self.scale, self.softcap = named["sm_scale"], named["logits_soft_cap"]
        bits, counts = named["packed_custom_mask"], keys[1:] - keys[:-1]
        self.most_keys = MOST_KEYS if self.fixed else int(counts.max())
        room = len(last), int(queries[-1]), self.most_keys, torch.zeros_like(slots)
        into = self.buffers = self.fixed or TreeBuffers.of(*room)
        assert len(queries) == len(into.query_offsets), "the batch size is fixed"
        assert len(slots) <= len(into.key_slots)
        into.query_offsets.copy_(queries)
        into.key_offsets.copy_(keys)
        into.key_slots[: len(slots)].copy_(slots)
        into.last_pages.copy_(last)
        self.masked = bits is not None
        assert named["causal"] != self.masked
        if bits is not None:
            assert len(bits) <= len(into.mask)
            into.mask[: len(bits)].copy_(bits)
            sizes = (queries[1:] - queries[:-1]) * counts
            # The fault of FlashInfer's plan: bits, where the kernel counts bytes.
            into.mask_offsets.copy_(torch.cat((torch.zeros(1), sizes.cumsum(0))))
            self._mask_indptr_buf = into.mask_offsets

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        assert q.is_contiguous()  # kernels look at no strides of these
        assert out.is_contiguous()
        own, (heads, kv_heads, dim) = self.buffers, self.sizes
        assert (q.shape[1:], kv[0].shape[1:]) == ((heads, dim), (1, kv_heads, dim))
        rows = torch.arange(len(q), dtype=torch.int32)
        request = (own.query_offsets[1:] <= rows.unsqueeze(1)).sum(1)
        row = (rows - own.query_offsets[request]).unsqueeze(1)
        first = own.key_offsets[request].unsqueeze(1)
        count = own.key_offsets[request + 1].unsqueeze(1) - first
        key = torch.arange(self.most_keys, dtype=torch.int32)
        if self.masked:
            bit = row * count + key
            octet = own.mask_offsets[request].unsqueeze(1) + bit // 8
            octets = own.mask[octet.long().clamp(max=len(own.mask) - 1)]
            seen = (octets >> (bit % 8).to(torch.uint8) & 1) > 0
        else:
            queries = own.query_offsets[request + 1] - own.query_offsets[request]
            seen = key <= count - queries.unsqueeze(1) + row
        seen = (seen & (key < count)).unsqueeze(1)
        slots = own.key_slots[(first + key).long().clamp(max=len(own.key_slots) - 1)].long()
        keys, values = (
            part.squeeze(1).float()[slots].repeat_interleave(heads // kv_heads, dim=2)
            for part in kv
        )  # [rows, keys, heads, dim]
        scores = torch.einsum("rhd,rkhd->rhk", q.float(), keys) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return out.copy_(torch.einsum("rhk,rkhd->rhd", weights, values))


class StandKernels(FlashInferKernels):
    """Makes stand-ins, and keeps them."""

    def __init__(self) -> None:
        self.made: list[Stand] = []

    def processors(self, device: torch.device) -> int:
        return 1

    def prefill(self, workspace: Tensor, buffers: TreeBuffers | None = None) -> Stand:
        self.made.append(Stand(buffers))
        return self.made[-1]


class StandAttention(FlashInferPagedAttention):
    """Work of fixed sizes goes through the stand-ins, all other through PyTorch."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool, StandKernels())
        self.plain = TorchPagedAttention(pool)

    def attend(self, *arguments: Any, **named: Any) -> Tensor:
        return self.plain.attend(*arguments, **named)
