"""Uniform numbers for judging trees, spread evenly over several judgements of one tree.

Latin hypercube sampling: McKay, Beckman & Conover, A Comparison of Three Methods for Selecting
Values of Input Variables in the Analysis of Output from a Computer Code, Technometrics 21 (1979).
"""

from collections.abc import Sequence
from math import nextafter

import numpy as np
import torch
from torch import Tensor

from eaglegbv.verifiers.base import VerifyUniforms

_LARGEST = nextafter(1.0, 0.0)


def latin_hypercube(
    draws: Sequence[VerifyUniforms], seeds: Sequence[Sequence[int]]
) -> list[VerifyUniforms]:
    """Return the numbers of J judgements as a Latin hypercube.

    The J numbers that decide one thing in the J judgements fall one each into J equal parts of
    [0, 1), in random order. So the numbers of every single judgement are independent and uniform as
    always, and the mean over the judgements has less noise.

    Args:
        draws: Independent uniform numbers, of the same shapes in all J judgements.
        seeds: For each request, the seed of the order of its parts.

    Returns:
        As many numbers as ``draws``, of the same shapes; rounding never makes one equal 1.
    """
    count = len(draws)
    if count == 1:
        return list(draws)
    numbers = torch.stack([_columns(own) for own in draws])
    parts = torch.stack([_orders(seed, count, numbers.shape[2]) for seed in seeds], dim=1)
    spread = ((parts + numbers) / count).clamp(max=_LARGEST)
    return [_like(own, columns) for own, columns in zip(draws, spread, strict=True)]


def _orders(seed: Sequence[int], count: int, numbers: int) -> Tensor:
    """Return, ``[count, numbers]``, a random order of ``count`` parts for each number."""
    parts = np.tile(np.arange(count), (numbers, 1))
    return torch.from_numpy(np.random.default_rng(seed).permuted(parts, axis=1).T)


def _columns(uniforms: VerifyUniforms) -> Tensor:
    """Return all numbers of each request in a row, ``[batch, numbers]``."""
    return torch.cat([part.flatten(1) for part in _parts(uniforms)], dim=1)


def _like(uniforms: VerifyUniforms, columns: Tensor) -> VerifyUniforms:
    """Return the numbers of ``columns`` in the shapes of ``uniforms``."""
    shapes = [part.shape for part in _parts(uniforms)]
    split = columns.split([shape[1:].numel() for shape in shapes], dim=1)
    selection, acceptance, correction = (
        part.reshape(shape) for part, shape in zip(split, shapes, strict=True)
    )
    return VerifyUniforms(selection, acceptance, correction.squeeze(1))


def _parts(uniforms: VerifyUniforms) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three kinds of numbers, ``[batch, ...]`` each."""
    return uniforms.selection, uniforms.acceptance, uniforms.correction.unsqueeze(1)
