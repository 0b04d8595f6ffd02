"""The G-test of token sequences against their exact joint distribution, as a dense array."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eaglegbv.eval.audit import g_test as tests
from eaglegbv.eval.audit.g_test import LEVEL, SMALLEST_EXPECTED, power

SHIFT = 0.04
"""Total variation at which power is stated; some thousands of samples in fifty cells notice it."""


@dataclass(frozen=True, slots=True)
class GTest(tests.GTest):
    """Outcome of a G-test, and its power: a wrong distribution's chance to be rejected."""

    power: float


def g_test(
    observed: Sequence[int],
    expected: NDArray[np.float64],
    *,
    shift: float = SHIFT,
    level: float = LEVEL,
) -> GTest:
    """Compare samples (cell indices) with the exact ``[cells]``; all rare cells are one.

    The power is that of a test at ``level`` against a total variation of ``shift``.
    """
    means = expected / expected.sum() * len(observed)
    rare = (means > 0) & (means < SMALLEST_EXPECTED)
    cell = np.where(rare, len(expected), np.arange(len(expected)))
    merged = np.append(np.where(rare, 0.0, expected), expected[rare].sum())
    cells = cell[np.asarray(observed, dtype=np.int64)]
    found = tests.g_test(cells, merged)
    seen = power(found.samples, found.cells, shift=shift, level=level)
    return GTest(found.statistic, found.samples, found.cells, found.p_value, seen)


def joint_probs(
    next_probs: Callable[[list[list[int]]], NDArray[np.float64]], prompt: list[int], tokens: int
) -> NDArray[np.float64]:
    """Return the exact joint of the ``tokens`` tokens after ``prompt``, ``[vocab ** tokens]``.

    Args:
        next_probs: From sequences of one length to their next token's, ``[batch, vocab]``.
        prompt: The prompt.
        tokens: Number of tokens.
    """
    prefixes, dist = [prompt], np.ones(1)
    for _ in range(tokens):
        dists = next_probs(prefixes)
        dist = (dist[:, None] * dists).reshape(-1)
        prefixes = [[*prefix, token] for prefix in prefixes for token in range(dists.shape[1])]
    return dist
