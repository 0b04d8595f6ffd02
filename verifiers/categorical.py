"""Draws from unnormalised laws by inverse CDF, without reading anything on the host."""

import torch
from torch import Tensor


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first index whose cumulative weight exceeds ``uniform * total``.

    An index of weight zero is never returned, whatever the rounding of a parallel cumulative sum,
    unless a row has no positive weight at all: the caller must rule that out.

    Args:
        weights: ``[rows, entries]`` float64, non-negative.
        uniforms: ``[rows]`` float64 in [0, 1).

    Returns:
        ``[rows]`` int64.
    """
    cumulative = weights.cumsum(dim=1)
    # Parallel scans may round so that the sum steps at an entry of weight zero: leave those out.
    cumulative.mul_(weights > 0)
    total = cumulative.amax(dim=1)
    # A uniform next to 1 may round the product up to the total, which nothing exceeds.
    threshold = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    exceeds = cumulative > threshold.unsqueeze(1)
    return exceeds.view(torch.uint8).argmax(dim=1)
