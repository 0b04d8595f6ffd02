"""What FlashInfer's wrappers of fixed sizes are planned into: memory that stays where it is."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TreeBuffers:
    """What a wrapper that is recorded is planned into: always the same memory.

    Attributes:
        query_offsets: ``[requests + 1]`` int32.
        key_offsets: ``[requests + 1]`` int32.
        key_slots: ``[keys at most]`` int32; those of all kinds of layers are the same.
        last_pages: ``[requests]`` int32.
        mask: ``[bytes at most]`` uint8.
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
        """Make room for ``requests`` of ``rows`` rows together and ``keys`` keys each at most."""
        device = key_slots.device

        def numbers(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        # The row of a request has a bit for each of its keys, and requests begin on a byte.
        mask = numbers(rows * keys // 8 + requests + 1, torch.uint8)
        offsets = (numbers(requests + 1), numbers(requests + 1))
        return cls(*offsets, key_slots, numbers(requests), mask, numbers(requests + 1))
