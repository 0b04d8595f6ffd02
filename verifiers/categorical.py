"""Draws from unnormalised laws by inverse CDF, without reading anything on the host.

Large vocabularies are searched in two levels, blocks first, so that a draw costs one pass over the
weights and allocates next to nothing.
"""

import torch
from torch import Tensor

from eaglegbv.first_place import first_place

_BLOCK = 512
_LARGE = 8192
"""Entries from which two levels are faster."""


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
    entries = weights.shape[1]
    if entries < _LARGE:
        cumulative = _cumulative(weights)
        return _first_above(cumulative, uniforms * cumulative.amax(dim=1))
    sums = _block_sums(weights)
    cumulative = sums.cumsum(dim=1)
    threshold = uniforms * cumulative[:, -1]
    block = _first_above(_cumulative(sums), threshold).unsqueeze(1)
    before = (cumulative.gather(1, block) - sums.gather(1, block)).squeeze(1)
    # The last block starts early enough to be whole; what it shares with the one before counts 0.
    start = (block * _BLOCK).clamp(max=entries - _BLOCK)
    columns = start + torch.arange(_BLOCK, device=weights.device)
    part = weights.gather(1, columns) * (columns >= block * _BLOCK)
    return start.squeeze(1) + _first_above(_cumulative(part), (threshold - before).clamp(min=0))


def _block_sums(weights: Tensor) -> Tensor:
    """Return ``[rows, blocks]``: the sums over blocks of ``weights`` ``[rows, entries]``."""
    rows, entries = weights.shape
    blocks, rest = entries // _BLOCK, entries % _BLOCK  # compilable, unlike divmod
    whole = weights[:, : blocks * _BLOCK].view(rows, blocks, _BLOCK).sum(dim=2)
    if rest == 0:
        return whole
    return torch.cat((whole, weights[:, blocks * _BLOCK :].sum(dim=1, keepdim=True)), dim=1)


def _cumulative(weights: Tensor) -> Tensor:
    """Return the cumulative sums of ``weights`` ``[rows, entries]``; 0 at entries of weight zero.

    Parallel scans may round so that a sum changes there.
    """
    return weights.cumsum(dim=1).mul_(weights.sign())


def _first_above(cumulative: Tensor, threshold: Tensor) -> Tensor:
    """Return the first entry of ``cumulative`` ``[rows, entries]`` that exceeds ``threshold``.

    Where rounding has lifted the threshold (at least 0) to the total or above, return the first
    entry that reaches the total.
    """
    total = cumulative.amax(dim=1)
    least = torch.minimum(torch.nextafter(threshold, total), total)
    return first_place(cumulative >= least.unsqueeze(1))
