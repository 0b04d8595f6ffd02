"""Stand-ins for FlashInfer's wrappers, which attend from what they were planned with.

They read plans as FlashInfer's kernels do: bits at ``q * keys + k`` behind a byte offset,
little-endian; ``plan`` leaving bit offsets there. Those of fixed sizes read nothing but the static
buffers that they were made with. ``run`` is made of tensor operations, so that it can be recorded.
"""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from eaglegbv.attention.flashinfer import FlashInferKernels, FlashInferPagedAttention, TreeBuffers
from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.attention.torch import TorchPagedAttention


class Stand:
    """A wrapper, for masked requests of fixed sizes if it is made with ``buffers``."""

    def __init__(self, buffers: TreeBuffers | None, most_keys: int) -> None:
        self.plans = 0
        self.buffers, self.fixed, self.most_keys = buffers, buffers is not None, most_keys
        self._mask_indptr_buf = None if buffers is None else buffers.mask_offsets

    def plan(self, *arguments: Any, **named: Any) -> None:
        self.plans += 1
        queries, keys, slots, last, *self.sizes, page = arguments
        for offsets in (queries, keys, slots, last):
            assert offsets.dtype == torch.int32
        assert page == 1
        assert (last == 1).all()
        assert named["window_left"] == -1
        self.scale, self.softcap = named["sm_scale"], named["logits_soft_cap"]
        mask, self.causal = named["packed_custom_mask"], named["causal"]
        assert (mask is None) == self.causal
        mask = torch.zeros(1, dtype=torch.uint8) if mask is None else mask
        # The fault of FlashInfer's plan: bits, where the kernel counts bytes.
        bits = torch.nn.functional.pad((queries.diff() * keys.diff()).cumsum(0), (1, 0)).int()
        planned = TreeBuffers(queries, keys, slots, last, mask, bits)
        if not self.fixed:
            self.buffers, self._mask_indptr_buf = planned, bits
            self.most_keys = int(keys.diff().max())
            return
        assert len(queries) == len(self.buffers.query_offsets), "the batch size is fixed"
        for field in fields(planned):
            value, room = getattr(planned, field.name), getattr(self.buffers, field.name)
            assert len(value) <= len(room), field.name
            room[: len(value)].copy_(value)

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        assert q.is_contiguous()  # kernels look at no strides of these
        assert out.is_contiguous()
        assert self.sizes == [q.shape[1], *kv[0].shape[2:]]
        own = self.buffers
        rows = torch.arange(len(q), dtype=torch.int32)
        request = (own.query_offsets[1:] <= rows.unsqueeze(1)).sum(1)
        row = (rows - own.query_offsets[request]).unsqueeze(1)
        first = own.key_offsets[request].unsqueeze(1)
        count = own.key_offsets[request + 1].unsqueeze(1) - first
        key = torch.arange(self.most_keys, dtype=torch.int32)
        if self.causal:
            seen = key <= count - own.query_offsets.diff()[request].unsqueeze(1) + row
        else:
            bit = row * count + key
            octet = own.mask_offsets[request].unsqueeze(1) + bit // 8
            octet = own.mask[octet.long().clamp(max=len(own.mask) - 1)]
            seen = (octet >> (bit % 8).to(torch.uint8) & 1) > 0
        seen = seen & (key < count)
        slots = own.key_slots[(first + key).long().clamp(max=len(own.key_slots) - 1)].long()
        out.copy_(attend(q, kv, slots, seen, self.scale, self.softcap))
        return out


def attend(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    slots: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attend from each row to its own list of slots, as far as they are seen."""
    keys, values = (part.squeeze(1).float()[slots] for part in kv)  # [rows, keys, heads, dim]
    group = q.shape[1] // keys.shape[2]
    keys, values = (part.repeat_interleave(group, dim=2) for part in (keys, values))
    scores = torch.einsum("rhd,rkhd->rhk", q.float(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    return torch.einsum("rhk,rkhd->rhd", scores.softmax(-1), values)


class StandKernels(FlashInferKernels):
    """Makes stand-ins, and keeps them; those of fixed sizes take ``most_keys`` of a request."""

    def __init__(self, most_keys: int = 0) -> None:
        self.most_keys = most_keys
        self.made: list[Stand] = []

    def processors(self, device: torch.device) -> int:
        return 1

    def prefill(self, workspace: Tensor, buffers: TreeBuffers | None = None) -> Stand:
        self.made.append(Stand(buffers, self.most_keys))
        return self.made[-1]


class StandAttention(FlashInferPagedAttention):
    """Work of fixed sizes goes through the stand-ins, all other through PyTorch."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool, StandKernels(most_keys=272))
        self.plain = TorchPagedAttention(pool)

    def attend(self, *arguments: Any, **named: Any) -> Tensor:
        return self.plain.attend(*arguments, **named)
