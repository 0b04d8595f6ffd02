"""Estimates from a few noisy runs: medians, ratios of sums, and intervals for them."""

from collections.abc import Callable, Sequence
from enum import Enum, auto

import msgspec
import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
COVERAGE = 0.95


class SideOfOne(Enum):
    """Where the interval of a ratio lies relative to 1."""

    ABOVE = auto()
    BELOW = auto()
    OPEN = auto()
    """The interval contains 1: the two figures cannot be told apart."""


class Estimate(msgspec.Struct, frozen=True):
    """A figure with its 95% interval; the ends are equal if only one unit was measured."""

    value: float
    low: float
    high: float

    def side_of_one(self, slack: float = 0.0) -> SideOfOne:
        """Return on which side of 1 the whole interval lies.

        Args:
            slack: How far an end may be from 1 and still count as 1.
        """
        if self.low > 1 + slack:
            return SideOfOne.ABOVE
        return SideOfOne.BELOW if self.high < 1 - slack else SideOfOne.OPEN


def bootstrap_ratio(
    numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0
) -> Estimate:
    """Return sum(numerators) / sum(denominators) with its percentile bootstrap interval.

    Args:
        numerators: One entry for each unit (a question); units are resampled as a whole.
        denominators: One entry for each unit.
        seed: Seed of the resampling.
    """
    return bootstrap_ratio_of_ratios(
        numerators, denominators, [1.0] * len(numerators), [1.0] * len(numerators), seed=seed
    )


def bootstrap_ratio_of_ratios(
    numerators: Sequence[float],
    denominators: Sequence[float],
    base_numerators: Sequence[float],
    base_denominators: Sequence[float],
    *,
    seed: int = 0,
) -> Estimate:
    """Return (sum n / sum d) / (sum base n / sum base d), paired by unit, with its interval."""
    return bootstrap(
        [numerators, denominators, base_numerators, base_denominators], _double_ratio, seed=seed
    )


def bootstrap(
    columns: Sequence[Sequence[float]],
    figure: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    seed: int = 0,
) -> Estimate:
    """Return a figure of column sums with its percentile bootstrap interval.

    Args:
        columns: Columns with one entry for each unit; units are resampled as a whole, in all
            columns alike.
        figure: Maps sums ``[columns, ...]`` to values ``[...]``.
        seed: Seed of the resampling.
    """
    entries = np.array(columns, dtype=np.float64)
    units = entries.shape[1]
    if not units:
        return Estimate(0.0, 0.0, 0.0)
    draws = np.random.default_rng(seed).integers(units, size=(RESAMPLES, units))
    resampled = figure(entries[:, draws].sum(axis=2))
    low, high = np.quantile(resampled, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Estimate(float(figure(entries.sum(axis=1))), float(low), float(high))


def _double_ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    above: NDArray[np.float64] = np.asarray(sums[0] * sums[3])
    below: NDArray[np.float64] = np.asarray(sums[1] * sums[2])
    return np.where(below > 0, above / np.where(below > 0, below, 1.0), 0.0)
