"""Stand-ins for FlashInfer's wrappers of fixed sizes: they read nothing but their static buffers.

``plan`` does on the host what FlashInfer's does: it checks sizes, and copies into the buffers that
the wrapper was made with, bit offsets where the kernel reads byte offsets. ``run`` is made of
tensor operations over those buffers, so that it can be recorded.
"""

from typing import Any

import torch
from torch import Tensor

from eaglegbv.attention.flashinfer import FlashInferPagedAttention, TreeBuffers
from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.attention.torch import TorchPagedAttention


class StaticStand:
    """A wrapper for masked requests of fixed sizes."""

    def __init__(self, buffers: TreeBuffers, most_keys: int) -> None:
        self.buffers = buffers
        self.most_keys = most_keys
        self.plans = 0
        self._mask_indptr_buf: Tensor | None = buffers.mask_offsets

    def plan(self, *arguments: Any, **named: Any) -> None:
        queries, keys, slots, last, *_ = arguments
        into, bits = self.buffers, named["packed_custom_mask"]
        assert len(queries) == len(into.query_offsets), "the batch size is fixed"
        assert len(slots) <= len(into.key_slots)
        assert len(bits) <= len(into.mask)
        assert named["window_left"] == -1
        self.plans += 1
        self.scale, self.softcap = named["sm_scale"], named["logits_soft_cap"]
        sizes = (queries[1:] - queries[:-1]) * (keys[1:] - keys[:-1])
        into.query_offsets.copy_(queries)
        into.key_offsets.copy_(keys)
        into.key_slots[: len(slots)].copy_(slots)
        into.last_pages.copy_(last)
        into.mask[: len(bits)].copy_(bits)
        into.mask_offsets.copy_(torch.cat((torch.zeros(1), sizes.cumsum(0))))

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        own = self.buffers
        rows = torch.arange(len(q), dtype=torch.int32)
        request = (own.query_offsets[1:] <= rows.unsqueeze(1)).sum(1)
        row = (rows - own.query_offsets[request]).unsqueeze(1)
        first = own.key_offsets[request].unsqueeze(1)
        count = own.key_offsets[request + 1].unsqueeze(1) - first
        key = torch.arange(self.most_keys, dtype=torch.int32)
        bit = row * count + key
        octet = own.mask_offsets[request].unsqueeze(1) + bit // 8
        seen = own.mask[octet.long().clamp(max=len(own.mask) - 1)] >> (bit % 8).to(torch.uint8) & 1
        seen = (seen > 0) & (key < count)
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


class StandKernels:
    """FlashInfer's kernels of fixed sizes."""

    def __init__(self, most_keys: int) -> None:
        self.most_keys = most_keys
        self.trees: list[StaticStand] = []

    def processors(self, device: torch.device) -> int:
        return 1

    def prefill(self, workspace: Tensor, buffers: TreeBuffers) -> StaticStand:
        self.trees.append(StaticStand(buffers, self.most_keys))
        return self.trees[-1]


class StandAttention(FlashInferPagedAttention):
    """Work of fixed sizes goes through the stand-ins, all other through PyTorch."""

    most_keys = 272

    def __init__(self, pool: KVPool) -> None:
        self.stands = StandKernels(self.most_keys)
        super().__init__(pool, self.stands)  # type: ignore[arg-type]
        self.plain = TorchPagedAttention(pool)

    def attend(self, *arguments: Any, **named: Any) -> Tensor:
        return self.plain.attend(*arguments, **named)
