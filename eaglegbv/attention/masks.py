"""Masks of one bit per (query, key), as FlashInfer's kernels read them (``variants.cuh``).

A request's bits lie row by row over *all* of its keys, query q and key k at bit ``q * keys + k``,
little-endian. Rows are not aligned, but each request begins on a byte. A window is applied in the
mask, because the kernel's own window counts packed indices, not positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from eaglegbv.attention.base import Segment, joined, offsets_of


@dataclass(frozen=True, slots=True)
class PackedMasks:
    """Consecutive masks of several requests."""

    bits: Tensor  # [bytes] uint8
    byte_offsets: Tensor  # [requests + 1] int32, on the host

    @classmethod
    def of(
        cls, segments: Sequence[Segment], window: int | None, device: torch.device | str = "cpu"
    ) -> Self:
        """Pack what each new token sees, for ``device``, without reading from there."""
        sizes = [segment.num_new * segment.num_keys for segment in segments]
        offsets = offsets_of((size + 7) // 8 for size in sizes)
        packed = [pack_bits(_mask(segment, window, device).flatten()) for segment in segments]
        return cls(joined(packed, device), torch.tensor(offsets, dtype=torch.int32))


def pack_bits(bits: Tensor) -> Tensor:
    """Pack ``[n]`` bool into ``[ceil(n / 8)]`` uint8, with the first bit lowest."""
    padding = -bits.shape[0] % 8
    octets = torch.nn.functional.pad(bits, (0, padding)).view(-1, 8).to(torch.uint8)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (octets * weights).sum(dim=1, dtype=torch.uint8)


def _mask(segment: Segment, window: int | None, device: torch.device | str) -> Tensor:
    # A prompt's mask is large, and quickly made where it is needed; masks of trees are small and
    # many.
    mask = segment.key_mask(window, device if segment.visible is None else None)
    if mask is None:
        shape = (segment.num_new, segment.num_keys)
        return torch.ones(shape, dtype=torch.bool, device=segment.token_ids.device)
    return mask
