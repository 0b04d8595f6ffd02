"""Fixed memory into which FlashInfer's wrappers for fixed sizes are planned."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TreeBuffers:
    """Buffers into which a recorded wrapper is planned, always the same memory.

    Attributes:
        query_offsets: ``[requests + 1]`` int32.
        key_offsets: ``[requests + 1]`` int32.
        key_slots: ``[most keys]`` int32, shared by all kinds of layers.
        last_pages: ``[requests]`` int32.
        mask: ``[most bytes]`` uint8.
        mask_offsets: ``[requests + 1]`` int32, in bytes.
    """

    query_offsets: Tensor
    key_offsets: Tensor
    key_slots: Tensor
    last_pages: Tensor
    mask: Tensor
    mask_offsets: Tensor

    @classmethod
    def of(cls, requests: int, rows: int, keys: int, key_slots: Tensor) -> Self:
        """Make room for ``requests`` with ``rows`` rows together and at most ``keys`` keys each."""
        device = key_slots.device

        def numbers(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        # Each row has a bit for each key of its request, and each request begins on a byte.
        mask = numbers(rows * keys // 8 + requests + 1, torch.uint8)
        offsets = (numbers(requests + 1), numbers(requests + 1))
        return cls(*offsets, key_slots, numbers(requests), mask, numbers(requests + 1))
