"""Top-k, top-p and min-p on probabilities, in PyTorch, which SGLang's verification lacks.

SGLang has compiled kernels for the first two only on a GPU, and does not apply min-p to trees.
"""

import torch
from torch import Tensor


def keep_top_k(probs: Tensor, top_k: Tensor) -> Tensor:
    """Keep the ``top_k`` ``[rows]`` most likely tokens of each row, including ties at the edge."""
    values = probs.sort(dim=1, descending=True).values
    limits = top_k.to(torch.int64).clamp(max=probs.shape[1]).view(-1, 1)
    return _normalised(probs.where(probs >= values.gather(1, limits - 1), 0))


def keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches ``top_p`` ``[rows]``."""
    values, order = probs.sort(dim=1, descending=True, stable=True)
    mass_before = values.double().cumsum(dim=1) - values
    kept = values.where(mass_before < top_p.view(-1, 1), 0)
    kept[:, :1] = values[:, :1]
    return _normalised(torch.zeros_like(probs).scatter_(1, order, kept))


def keep_min_p(probs: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens less likely than ``min_p`` ``[rows]`` times the most likely one."""
    edge = probs.amax(dim=1, keepdim=True) * min_p.view(-1, 1)
    return _normalised(probs.where(probs >= edge, 0))


def _normalised(probs: Tensor) -> Tensor:
    return probs / probs.sum(dim=1, keepdim=True)
