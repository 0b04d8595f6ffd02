"""G-tests of texts against their exact distribution, or against other texts, and their power."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

from eaglegbv.errors import InvalidArgument

SMALLEST_EXPECTED = 5.0
"""Expected count from which G is distributed as chi-square (Cochran's rule of thumb)."""

LEVEL = 1e-4
"""A right distribution is rejected once in ten thousand tests: many seldom fail by chance."""

POWER = 0.9  # probability with which a shift must be noticed to count as detectable
Text = tuple[int, ...]  # the tokens of a text


@dataclass(frozen=True, slots=True)
class GTest:
    """Outcome of a G-test."""

    statistic: float  # G
    # Number of texts observed; of two samples, as many as compared with an exact distribution would
    # show as much, `n m / (n + m)`.
    samples: float
    cells: int  # number of cells compared, after merging
    p_value: float  # probability of a G at least as large if the distribution is right


def g_test(
    observed: ArrayLike, expected: NDArray[np.float64], *, smallest: float = SMALLEST_EXPECTED
) -> GTest:
    """Compare samples with their exact distribution.

    Args:
        observed: Cell indices, ``[samples]``.
        expected: Probabilities ``[cells]``.
        smallest: Cells with a smaller expected count are merged with their neighbours: the
            chi-square distribution of G needs filled cells, and with fewer cells a small shift is
            easier to see.
    """
    counts = np.bincount(np.asarray(observed, dtype=np.int64), minlength=len(expected))
    samples = int(counts.sum())
    if counts[expected == 0].any():
        return GTest(np.inf, samples, len(expected), 0.0)
    means = expected / expected.sum() * samples
    bins = _merge(means, smallest)
    return _outcome(np.bincount(bins, counts), np.bincount(bins, means), samples)


def g_test_two(
    first: Sequence[Text], second: Sequence[Text], *, smallest: float = SMALLEST_EXPECTED
) -> GTest:
    """Compare two samples of texts; rare texts are merged with others that begin alike.

    Args:
        first: Texts.
        second: Other texts, as many or not.
        smallest: Least count that is expected of a cell in the smaller sample.
    """
    cells = {text: i for i, text in enumerate(sorted({*first, *second}))}
    counts = np.array(
        [np.bincount([cells[t] for t in own], minlength=len(cells)) for own in (first, second)]
    )
    sizes = counts.sum(axis=1)
    means = np.outer(sizes / sizes.sum(), counts.sum(axis=0))
    bins = _merge(means.min(axis=0), smallest)
    merged = [np.stack([np.bincount(bins, row) for row in table]) for table in (counts, means)]
    return _outcome(merged[0], merged[1], sizes.prod() / sizes.sum())


def _outcome(counts: NDArray[Any], means: NDArray[Any], samples: float) -> GTest:
    """Return the test of counts ``[..., cells]`` whose expectations are ``means``."""
    seen = counts > 0
    cells = counts.shape[-1]
    statistic = float(2 * (counts[seen] * np.log(counts[seen] / means[seen])).sum())
    p_value = float(stats.chi2.sf(statistic, cells - 1)) if cells > 1 else 1.0
    return GTest(statistic, samples, cells, p_value)


def _merge(means: NDArray[np.float64], smallest: float) -> NDArray[np.int64]:
    """Return the bin of each cell: cells below ``smallest`` share one with the next such cells.

    If the last shared bin stays below ``smallest``, it is merged with the bin before it.
    """
    bins = np.zeros(len(means), dtype=np.int64)
    used = 0
    filled = 0.0
    shared: int | None = None  # the bin to which small cells are being added
    for cell, mean in enumerate(means):
        if mean >= smallest:
            bins[cell], used = used, used + 1
            continue
        if shared is None:
            shared = used
            used = used + 1
            filled = 0.0
        bins[cell] = shared
        filled += mean
        if filled >= smallest:
            shared = None
    if shared is not None and used > 1:
        bins[bins == shared] = shared - 1 if shared else 1
        bins -= (bins > shared).astype(np.int64)
    return bins


def power(samples: float, cells: int, *, shift: float, level: float) -> float:
    """Return the probability of rejecting a distribution ``shift`` away, spread evenly."""
    if cells < 2:
        return 0.0
    # Moving every cell up or down by 2 * shift of its mean is a total variation of shift.
    critical = stats.chi2.isf(level, cells - 1)
    return float(stats.ncx2.sf(critical, cells - 1, samples * (2 * shift) ** 2))


def detectable_shift(samples: float, cells: int, *, level: float) -> float:
    """Return the total variation noticed with probability :data:`POWER`; 1 if there is none."""

    def missing(shift: float) -> float:
        return power(samples, cells, shift=shift, level=level) - POWER

    if missing(0.5) < 0:  # no cell can move by more than its mean
        return 1.0
    return float(optimize.brentq(missing, 0.0, 0.5, xtol=1e-6))


def g_test_texts(
    texts: Sequence[Sequence[int]],
    probs: Mapping[Text, float],
    *,
    smallest: float = SMALLEST_EXPECTED,
) -> GTest:
    """Compare texts with their exact distribution; a text that it lacks has probability 0.

    Rare texts are merged with their neighbours in the order of ``probs``; after
    :func:`joint_probs`, these are texts that begin alike.
    """
    cells = {text: i for i, text in enumerate(probs)}
    impossible = len(probs)
    observed = [cells.get(tuple(text), impossible) for text in texts]
    expected = np.append(np.array(list(probs.values()), dtype=np.float64), 0.0)
    return g_test(observed, expected, smallest=smallest)


def joint_probs(
    next_probs: Callable[[list[list[int]]], NDArray[np.float64]],
    prompt: Sequence[int],
    tokens: int,
    *,
    most: int = 1_000_000,
) -> dict[Text, float]:
    """Return the exact distribution of the first tokens after ``prompt``, of possible texts.

    Args:
        next_probs: Maps sequences of one length to the distributions of their next token, ``[batch,
            vocab]``.
        prompt: The prompt.
        tokens: Number of tokens.
        most: Most texts that are allowed.

    Raises:
        InvalidArgument: More than ``most`` texts have positive probability.
    """
    probs: dict[Text, float] = {(): 1.0}
    for length in range(1, tokens + 1):
        rows = next_probs([[*prompt, *text] for text in probs])
        count = np.count_nonzero(rows)
        if count > most:
            raise InvalidArgument(
                "tokens", tokens, f"at most {most} possible texts, not {count} of {length}"
            )
        probs = {
            (*text, int(token)): mass * float(row[token])
            for (text, mass), row in zip(probs.items(), rows, strict=True)
            for token in np.flatnonzero(row)
        }
    return probs
