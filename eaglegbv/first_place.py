"""Where something stands first: what ends a draw, and finds a token among a law's."""

import torch
from torch import Tensor


def first_place(found: Tensor) -> Tensor:
    """Return where ``found`` ``[..., entries]`` bool is true first, ``[...]`` int64; 0 if nowhere.

    Either way says the same. Generated code takes the least of many numbers at once, but looks for
    the place of a maximum one by one: 0.1 ms for 8 rows of 4,096 entries.
    """
    if not torch.compiler.is_compiling():
        return found.view(torch.uint8).argmax(dim=-1)
    entries = found.shape[-1]
    first = torch.where(found, torch.arange(entries, device=found.device), entries).amin(dim=-1)
    return torch.where(first < entries, first, 0)
