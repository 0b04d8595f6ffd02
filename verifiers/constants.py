"""Short ranges of numbers that every step needs, made once for each size and device.

They are shared, so nobody may write to them.
"""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=256)
def counting(count: int, device: torch.device) -> Tensor:
    """Return ``0 ... count - 1``, int64."""
    return torch.arange(count, device=device)


@lru_cache(maxsize=256)
def counting_from_one(count: int, device: torch.device) -> Tensor:
    """Return ``1 ... count``, int64."""
    return torch.arange(1, count + 1, device=device)


@lru_cache(maxsize=256)
def counting_down(count: int, device: torch.device) -> Tensor:
    """Return ``count - 1 ... 0``, int64."""
    return torch.arange(count - 1, -1, -1, device=device)


@lru_cache(maxsize=256)
def powers_of_two(count: int, device: torch.device) -> Tensor:
    """Return ``2 ** (count - 1) ... 1``, int64."""
    return torch.bitwise_left_shift(1, counting_down(count, device))


@lru_cache(maxsize=256)
def numbered_rows(count: int, device: torch.device) -> Tensor:
    """Return ``0 ... count - 1`` as a column ``[count, 1]``, int64: the first index of each row."""
    return torch.arange(count, device=device).unsqueeze(1)
