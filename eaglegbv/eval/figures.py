"""Figures, which are ratios of sums over units, and their intervals.

An interval is a jackknife's: with each unit left out in turn, the variance of the figure's
logarithm follows, and Student's t gives the ends. It holds from four units on, where percentiles of
resampled units are too narrow.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, isclose, nan, sqrt
from typing import Self, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy import stats

from eaglegbv.eval.observations import Observation
from eaglegbv.metrics import Phase

Floats: TypeAlias = NDArray[np.float64]
COVERAGE = 0.95
RATIO_DIGITS = 3  # of ratios of two settings
FEWEST = 8
"""Fewest units of a verdict; with fewer, a figure and its interval are all that is said."""


class Estimate(msgspec.Struct, frozen=True):
    """A figure with its 95% interval; the ends are equal if only one unit was measured."""

    value: float
    low: float
    high: float
    units: int = FEWEST  # on which it was measured; 0 where nothing is known
    digits: int = 2  # that are shown

    @classmethod
    def exactly(cls, value: float, digits: int = 2) -> Self:
        """Return a figure without noise."""
        return cls(value, value, value, digits=digits)

    def told(self, above: str, below: str, neither: str, slack: float = 0.0) -> str:
        """Return the word for an interval above 1, below it, or around it: not told apart from it.

        An end may be so far from 1 as ``slack`` and still count as 1. Of fewer than
        :data:`FEWEST` units nothing is told.
        """
        if self.units < FEWEST:
            return neither
        if self.low > 1 + slack:
            return above
        return below if self.high < 1 - slack else neither

    @property
    def text(self) -> str:
        """The figure with its interval, or alone if that is a point; "-" if it is not known."""
        if self.units == 0:
            return "-"
        value, low, high = (f"{end:.{self.digits}f}" for end in (self.value, self.low, self.high))
        alone = isclose(self.low, self.high, rel_tol=1e-12)
        return value if alone else f"{value} [{low}, {high}]"


@dataclass(frozen=True, slots=True)
class Figure:
    """The ratio of two sums; sums of no unit count as 0."""

    name: str
    above: str  # name of a sum
    below: str  # another
    definition: str = ""  # what is divided by what, and whether prefill counts
    median: bool = False  # the median over repeats; else repeats are pooled
    scale: float = 1.0
    digits: int = 3  # in tables


ACCEPTANCE = Figure(
    "acceptance length",
    "tokens",
    "steps",
    "tokens committed per decoding forward of the target, that is accepted ones and the next; "
    "prefill and the token it brings are not counted",
    digits=2,
)
SPEED = Figure(
    "tokens/s",
    "tokens",
    "seconds",
    "tokens committed by decoding forwards per second of wall time less prefill: "
    "prefill is not counted, neither its time nor the token it brings",
    median=True,
    digits=1,
)
WALL_SPEED = Figure(
    "tokens/s with prefill",
    "answer_tokens",
    "wall_seconds",
    "all tokens of the answers per second of all wall time: prefill, chat template and "
    "(de)tokenisation are counted",
    median=True,
    digits=1,
)
STEP_MILLISECONDS = Figure(
    "ms/forward",
    "seconds",
    "steps",
    "milliseconds of wall time less prefill per decoding forward; prefill is not counted",
    scale=1e3,
    digits=2,
)
CONVERSATIONS = (ACCEPTANCE, SPEED, WALL_SPEED, STEP_MILLISECONDS)
"""The figures that a run of conversations has."""

NODE_SPEED = Figure("nodes a second", "steps", "seconds")
NODES = Figure("nodes", "nodes", "steps", "drafted nodes of a tree, without its root", digits=1)
OTHER = "other"
"""Phase of wall time outside the engine's phases: templates, (de)tokenisation, bookkeeping."""


def phase_figures(names: Iterable[str] = (*map(str, Phase), OTHER)) -> list[Figure]:
    """Return the milliseconds per token of the answers of each phase."""
    return [Figure(name, f"seconds.{name}", "answer_tokens", scale=1e3, digits=2) for name in names]


def position_figures(depth: int) -> list[Figure]:
    """Return, by position, the share of the trees as deep that accept a token there."""
    return [Figure(str(d), f"accepted.{d}", f"offered.{d}") for d in range(1, depth + 1)]


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """Who leads with which figure, and the others, highest first.

    Those that are tied cannot be told apart from the leader.
    """

    leader: str
    value: Estimate
    tied: tuple[str, ...]
    behind: tuple[str, ...]


Key: TypeAlias = tuple[int, str]
"""A repeat and a unit."""


class Sums:
    """Sums by setting, repeat and unit, of which figures are ratios."""

    def __init__(self, observations: Iterable[Observation]) -> None:
        self._observations = list(observations)
        self._rows: dict[str, dict[Key, Mapping[str, float]]] = {}
        for one in self._observations:
            rows = self._rows.setdefault(one.setting, {})
            if one.error is None:
                rows[one.repeat, one.unit] = one.sums

    @property
    def settings(self) -> list[str]:
        """Names of the settings that were observed."""
        return list(self._rows)

    @property
    def errors(self) -> Counter[str]:
        """How many observations broke off, by setting."""
        return Counter(one.setting for one in self._observations if one.error is not None)

    @property
    def categories(self) -> list[str]:
        """The categories of units."""
        return list(dict.fromkeys(one.category for one in self._observations))

    def only(self, category: str) -> "Sums":
        """Return those of the units of a category."""
        return Sums(one for one in self._observations if one.category == category)

    def has(self, *settings: str) -> bool:
        """Whether each of these settings was measured on a unit to its end."""
        return all(self._rows.get(name) for name in settings)

    def count(self, setting: str) -> int:
        """Return on how many units, repeats counted each, a setting was measured to its end."""
        return len(self._rows.get(setting, ()))

    def total(self, setting: str, name: str) -> float:
        """Return a sum over all units."""
        return sum(self.column(setting, name))

    def column(self, setting: str, name: str) -> list[float]:
        """Return a sum of every unit that has it."""
        return [row[name] for row in self._rows.get(setting, {}).values() if name in row]

    def names(self, prefix: str, *settings: str) -> list[str]:
        """Return the names of sums that begin so, without that, in order of appearance."""
        rows = (row for setting in settings for row in self._rows.get(setting, {}).values())
        names = dict.fromkeys(name for row in rows for name in row if name.startswith(prefix))
        return [name.removeprefix(prefix) for name in names]

    def estimate(self, figure: Figure, setting: str) -> Estimate:
        """Return a figure of a setting."""
        return self.ratio(figure, [setting])

    def value(self, figure: Figure, setting: str) -> float:
        """Return a figure of a setting without its interval; 0 if nothing was counted."""
        return self.estimate(figure, setting).value if self.has(setting) else 0.0

    def over(self, figure: Figure, setting: str, base: str, digits: int = RATIO_DIGITS) -> Estimate:
        """Return how many times a figure of one setting another's is, on the same units."""
        ratio = self.ratio(figure, [setting], [base])
        return msgspec.structs.replace(ratio, digits=digits)

    def shared(self, *settings: str) -> set[Key]:
        """Return where all of these settings were measured to their end."""
        return set.intersection(*(set(self._rows.get(name, ())) for name in settings))

    def ratio(
        self, figure: Figure, above: Sequence[str], below: Sequence[str] = (), *among: str
    ) -> Estimate:
        """Return the product of a figure over ``above`` by that over ``below``.

        Settings are paired by repeat and unit: those that any of them, or ``among``, lacks count
        for none. One over one compares two settings, two over two their leads.
        """
        keys = self.shared(*above, *below, *among)
        if not keys:
            return Estimate(nan, nan, nan, 0)
        ratios: Floats = np.full((1, 1), figure.scale ** (len(above) - len(below)))
        for name in above:
            ratios = ratios * self._left_out(figure, name, keys)
        for name in below:
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = ratios / self._left_out(figure, name, keys)
        known = ~np.isnan(ratios).all(axis=0)
        pooled = np.zeros(ratios.shape[1])
        pooled[known] = np.nanmedian(ratios[:, known], axis=0)
        digits = RATIO_DIGITS if below else figure.digits
        return msgspec.structs.replace(jackknife(pooled), digits=digits)

    def _left_out(self, figure: Figure, name: str, keys: Collection[Key]) -> Floats:
        """Return a figure by repeat as measured, and with each unit left out ``[repeats, 1 + n]``.

        Repeats are one where they are pooled.
        """
        repeats = sorted({repeat for repeat, _ in keys})
        units = sorted({unit for _, unit in keys})
        sums = np.zeros((2, len(repeats), len(units)))
        for repeat, unit in keys:
            row = self._rows[name][repeat, unit]
            pair = row.get(figure.above, 0.0), row.get(figure.below, 0.0)
            sums[:, repeats.index(repeat), units.index(unit)] = pair
        totals = sums.sum(axis=2, keepdims=True)
        left = np.concatenate((totals, totals - sums), axis=2)
        if not figure.median:
            left = left.sum(axis=1, keepdims=True)
        above, below = left
        ratios: Floats = np.divide(above, below, out=np.full_like(above, nan), where=below > 0)
        return ratios

    def mixture(self, ladder: Sequence[str], nodes: float) -> str:
        """Add a made-up setting of a mean of ``nodes`` nodes, and return its name.

        It takes the next larger tree of ``ladder`` with the probability that makes the means equal.
        Below the smallest tree, the other part is plain decoding: one token a step with no node.

        Raises:
            ValueError: No tree is large enough.
        """
        first = self._rows[ladder[0]]
        plain = {key: {**row, "tokens": row["steps"], "nodes": 0.0} for key, row in first.items()}
        trees = sorted((self.value(NODES, name), name) for name in ladder)
        rows: list[tuple[float, Mapping[Key, Mapping[str, float]]]] = [(0.0, plain)]
        rows += ((size, self._rows[name]) for size, name in trees)
        for (less, low), (more, high) in pairwise(rows):
            if less <= nodes <= more and less < more:
                share = (nodes - less) / (more - less)
                name = f"{nodes:.4f} nodes of {ladder[0]}"
                self._rows[name] = {key: _mixed(share, low[key], high[key]) for key in low}
                return name
        raise ValueError(f"no tree of {ladder} has {nodes} nodes")

    def rank(self, figure: Figure, settings: Iterable[str]) -> Rank:
        """Rank settings: one is behind if the interval of its ratio to the leader is below 1."""
        values = {name: self.estimate(figure, name) for name in settings if self.has(name)}
        leader, *others = sorted(values, key=lambda name: -values[name].value)
        told = {name: self.over(figure, name, leader).told("", "behind", "tied") for name in others}
        tied, behind = (
            tuple(name for name in others if told[name] == word) for word in ("tied", "behind")
        )
        return Rank(leader=leader, value=values[leader], tied=tied, behind=behind)


def _mixed(share: float, low: Mapping[str, float], high: Mapping[str, float]) -> dict[str, float]:
    parts = ("tokens", "nodes", "steps")
    return {part: (1 - share) * low[part] + share * high[part] for part in parts}


def jackknife(values: Floats) -> Estimate:
    """Return the first of ``values`` with its interval from the others, each with a unit left out.

    Where a figure is 0 without some unit, its own variance is taken instead of its logarithm's.
    """
    value = float(values[0])
    units = len(values) - 1
    if units < 2 or not np.isfinite(values).all():
        return Estimate(value, value, value, units)
    positive = bool((values > 0).all())
    left = np.log(values[1:]) if positive else values[1:]
    error = sqrt((units - 1) * float(left.var()))
    half = float(stats.t.ppf((1 + COVERAGE) / 2, units - 1)) * error
    if not positive:
        return Estimate(value, max(0.0, value - half), value + half, units)
    return Estimate(value, value * exp(-half), value * exp(half), units)
