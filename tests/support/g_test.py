"""The G-test of observed token sequences against their exact joint law."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

SMALLEST_EXPECTED = 5.0
SHIFT = 0.04


@dataclass(frozen=True, slots=True)
class GTest:
    """Outcome of a G-test.

    Attributes:
        statistic: G.
        cells: Cells compared, rare ones merged into one.
        p_value: Probability of a G at least as large if the law is right.
        power: Probability to reject, at level 1e-4, a law at total variation ``SHIFT`` from the
            expected one, spread over all cells alike: the spread hardest to see.
    """

    statistic: float
    cells: int
    p_value: float
    power: float


def g_test(observed: Sequence[int], expected: NDArray[np.float64]) -> GTest:
    """Compare samples (cell indices) with the exact law ``[cells]``.

    Cells expected fewer than five times are merged: the chi-square law of G needs filled cells.
    """
    counts = np.bincount(observed, minlength=len(expected)).astype(float)
    if counts[expected == 0].any():
        return GTest(np.inf, len(expected), 0.0, 1.0)
    means = expected / expected.sum() * len(observed)
    rare = means < SMALLEST_EXPECTED
    counts = np.append(counts[~rare], counts[rare].sum())
    means = np.append(means[~rare], means[rare].sum())
    counts, means = counts[means > 0], means[means > 0]
    seen = counts > 0
    statistic = float(2 * (counts[seen] * np.log(counts[seen] / means[seen])).sum())
    freedom = len(means) - 1
    # Every cell moved by 2 * SHIFT of its mean, up or down, is a total variation of SHIFT.
    noncentrality = len(observed) * (2 * SHIFT) ** 2
    critical = stats.chi2.isf(1e-4, freedom)
    return GTest(
        statistic,
        len(means),
        float(stats.chi2.sf(statistic, freedom)),
        float(stats.ncx2.sf(critical, freedom, noncentrality)),
    )


def joint_law(
    next_laws: Callable[[list[list[int]]], NDArray[np.float64]], prompt: list[int], tokens: int
) -> NDArray[np.float64]:
    """Return the exact law of the first ``tokens`` tokens after ``prompt``, ``[vocab ** tokens]``.

    Args:
        next_laws: From sequences of one length to the laws of their next token, ``[batch, vocab]``.
        prompt: The prompt.
        tokens: Number of tokens.
    """
    prefixes, law = [prompt], np.ones(1)
    for _ in range(tokens):
        laws = next_laws(prefixes)
        law = (law[:, None] * laws).reshape(-1)
        prefixes = [[*prefix, token] for prefix in prefixes for token in range(laws.shape[1])]
    return law
