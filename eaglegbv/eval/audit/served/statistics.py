"""Statistics of places: sums of what a token shows minus its expectation under the law there.

A feature f gives a number to every outcome, and depends on nothing but what was known before the
token was drawn. With ``d = f(x) - sum p f`` and ``v = sum p f^2 - (sum p f)^2`` at each place, the
sum of d is a martingale, and z = sum d / sqrt(sum v) is standard normal for long texts. A statistic
has one feature or several, and its p-value is the least of theirs times their number: so each
has a direction and a size that can be told in words, and tails are computed to be right for sums
of rare events too (Barndorff-Nielsen's, by the laws' own cumulant generating functions).

Where the report is rounded, the sum may be off by ``B``: with e the largest error of a listed
log-probability, ``|E' f - E f| <= sum p (exp(e) - 1) |f - c|`` for every constant c over a law
whose rest takes what the others leave, if c = f(rest). Only what exceeds B counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeAlias

import msgspec
import numpy as np
from scipy import optimize, special

from eaglegbv.eval.audit.served.copies import Copies
from eaglegbv.eval.audit.served.places import Floats, Places

POWER = 0.9  # probability with which the printed smallest shift is found
RANKS = (1, 2, 4, 8)  # first rank, from 0, of each group of ranks but the first
PROBS = (0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9)
CHANCES = (0.2, 0.4, 0.6, 0.8, 0.95)
ENTROPIES = (0.5, 1.5)
BINS = 10
MOST_SURPRISE = 10.0  # nats; beyond, one token would weigh as much as hundreds
MOST_WEIGHT = 3.0  # of a place by what was drawn before it
LEAST_VARIANCE = 0.05  # of what was drawn before a place, so that certain tokens weigh nothing
NORMAL = 2.5  # standard deviations up to which the normal law is good enough
FEWEST = 5.0  # rare events that a feature must expect: what its fourth moment says of their number

WEIGHTS = {
    "copies": 0.25,
    "surprise": 0.12,
    "id": 0.10,
    "rank": 0.09,
    "top by its chance": 0.09,
    "seen": 0.07,
    "top": 0.06,
    "prob": 0.06,
    "surprise by chance of the top": 0.05,
    "top by entropy": 0.04,
    "surprise by entropy": 0.04,
    "pit": 0.01,
    "top after the last": 0.01,
    "surprise after the last": 0.01,
}
"""Share of the level that each statistic is given, by the faults that it alone finds."""
UNITS = {
    "surprise": "nats a token",
    "id": "of the list a token",
    "copies": "in total variation after a text",
}
"""What differences are counted in, by how a statistic's name begins; others are rates of tokens."""

Column: TypeAlias = tuple[str, str, Floats]
"""A statistic's name, what one of its features is, and its values ``[places, k + 1]``."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One statistic, as it is reported."""

    name: str
    what: str  # the feature that showed most
    z: float  # standard deviations from the law
    p_value: float  # of all its features together
    level: float  # the finding fails the server below this
    shift: float | None  # difference a token; none where only a size is known
    smallest_shift: float  # that would have been found with probability 0.9
    unit: str
    places: int

    @property
    def fails(self) -> bool:
        """Whether chance alone would go as far less often than the level."""
        return self.p_value < self.level


def findings(places: Places, level: float) -> list[Finding]:
    """Test places at a level that all statistics share; the ones without information are left out.

    The places of one answer follow each other.
    """
    found = []
    for name, group in groupby(columns(places), itemgetter(0)):
        sums = [one for column in group if (one := Sum.of(places, *column[1:])) is not None]
        if sums:
            found.append(_finding(name, sums, WEIGHTS[name] * level))
    copies = Copies.of(places)
    if copies is not None:
        found.append(_finding("copies", [copies], WEIGHTS["copies"] * level))
    return found


def _finding(name: str, sums: Sequence["Sum | Copies"], level: float) -> Finding:
    worst = min(sums, key=lambda one: one.p_value)
    return Finding(
        name=name,
        what=worst.what,
        z=worst.z,
        p_value=min(1.0, worst.p_value * len(sums)),
        level=level,
        shift=worst.shift,
        smallest_shift=worst.smallest_shift(level / len(sums), POWER),
        unit=UNITS.get(name.split()[0], "of tokens"),
        places=worst.places,
    )


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum over places, of one feature."""

    what: str
    difference: float  # sum of d
    variance: float  # sum of v
    bound: float  # B
    places: int
    p_value: float  # two-sided

    @classmethod
    def of(cls, places: Places, what: str, values: Floats) -> "Sum | None":
        """Sum a feature; none where its variance is too small for its sum to have a known law."""
        centred = values - places.mean(values)
        squares = centred**2
        variance = float(places.mean(squares).sum())
        fourth = float(places.mean(squares**2).sum())
        if variance <= 0 or fourth > variance**2 / FEWEST:
            return None
        difference = float(places.at_drawn(centred).sum())
        bound = _bound(places, values)
        beyond = max(abs(difference) - bound, 0.0)
        p_value = 2 * float(special.ndtr(-beyond / variance**0.5))
        if beyond > NORMAL * variance**0.5:
            p_value = min(1.0, 2 * tail(places.probs, np.sign(difference) * centred, beyond))
        tested = int((squares.max(axis=1) > 0).sum())
        return cls(what, difference, variance, bound, tested, p_value)

    @property
    def z(self) -> float:
        """Standard deviations beyond what rounding explains."""
        beyond = max(abs(self.difference) - self.bound, 0.0)
        return float(np.sign(self.difference) * beyond / self.variance**0.5)

    @property
    def shift(self) -> float:
        """Difference a place."""
        return self.difference / self.places

    def smallest_shift(self, level: float, power: float) -> float:
        """Return the difference a place that is found with so much power."""
        needed = special.ndtri(power) - special.ndtri(level / 2)
        return float(needed * self.variance**0.5 + self.bound) / self.places


def _bound(places: Places, values: Floats) -> float:
    """Return B; where a law has no rest, its constant is the mean."""
    if not places.errors.any():
        return 0.0
    has_rest = places.probs[:, -1:] > 0
    constant = np.where(has_rest, values[:, -1:], places.mean(values))
    off = np.abs(values - constant)[:, :-1]
    off *= np.expm1(places.errors)
    off *= np.exp(places.errors.max(axis=1, keepdims=True))
    return float((places.probs[:, :-1] * off).sum())


def tail(probs: Floats, centred: Floats, total: float) -> float:
    """Return P(sum d >= total) by a saddlepoint, for laws and values ``[places, k + 1]``.

    Where no law of the places can reach the total, or hardly, the largest tilt gives Chernoff's
    bound.
    """
    largest = 500 / max(float(np.abs(centred).max()), 1e-12)

    def exponent(tilt: float) -> float:
        masses = (probs * np.exp(tilt * centred)).sum(axis=1)
        return float(np.log(masses).sum()) - tilt * total

    found: Any = optimize.minimize_scalar(exponent, bounds=(0, largest), method="bounded")
    tilted = probs * np.exp(found.x * centred)
    tilted /= tilted.sum(axis=1, keepdims=True)
    means = (tilted * centred).sum(axis=1)
    squares = (tilted * centred**2).sum(axis=1)
    variance = float((squares - means**2).sum())
    root = (2 * max(-found.fun, 1e-12)) ** 0.5
    tilt = max(found.x * variance**0.5, 1e-12)
    p_value = special.ndtr(-root - np.log(tilt / root) / root)
    return float(min(p_value, np.exp(found.fun)))


def surprises(places: Places) -> Floats:
    """Return -log p of every outcome; of the rest at least that of the last one listed."""
    surprise = -np.log(np.maximum(places.probs, np.exp(-MOST_SURPRISE)))
    surprise[:, :-1][places.probs[:, :-1] == 0] = 0.0
    surprise[:, -1] = surprise.max(axis=1)
    return surprise


def columns(places: Places) -> Iterator[Column]:
    """Yield the features of all statistics but `copies`, those of one together."""
    probs = places.probs
    top = np.zeros_like(probs)
    top[:, 0] = 1
    order = np.full_like(probs, 0.5)
    ranked = places.tokens.argsort(axis=1).argsort(axis=1)
    order[:, :-1] = ranked / max(places.rest - 1, 1)
    seen = np.zeros_like(probs)
    seen[:, :-1] = places.counts > 0
    surprise = surprises(places)
    yield "top", "most likely token", top
    yield "surprise", "surprise", surprise
    yield "id", "order by token id", order
    yield "seen", "tokens that occurred before", seen
    ranks = np.broadcast_to(np.arange(places.rest + 1), probs.shape)
    yield from _groups("rank", ranks, RANKS)
    yield from _groups("prob", probs, PROBS)
    for number in range(BINS):
        yield "pit", f"PIT bin {number + 1}", pit_overlap(probs, number)
    yield from _split("top by its chance", top, probs[:, :1], CHANCES)
    yield from _split("surprise by chance of the top", surprise, probs[:, :1], CHANCES)
    for name, values in (("top", top), ("surprise", surprise)):
        yield from _split(f"{name} by entropy", values, places.mean(surprise), ENTROPIES)
    for name, values in (("top", top), ("surprise", surprise)):
        what = f"{name} after that of the last token"
        yield f"{name} after the last", what, values * _shown_before(values, places)


def _groups(name: str, values: Any, limits: tuple[float, ...]) -> Iterator[Column]:  # noqa: ANN401
    """Yield which outcomes are in each group by a value, the rest in one of its own."""
    kind = np.digitize(values, limits)
    kind[:, -1] = len(limits) + 1
    for number in range(len(limits) + 2):
        yield name, f"{name} group {number + 1}", (kind == number).astype(float)


def _split(name: str, values: Floats, by: Floats, limits: tuple[float, ...]) -> Iterator[Column]:
    """Yield a feature apart for groups of places by what was known before."""
    group = np.digitize(by, limits)
    for number in range(len(limits) + 1):
        yield name, f"{name}, {number + 1}", values * (group == number)


def _shown_before(values: Floats, places: Places) -> Floats:
    """Return what the token before showed, in standard deviations, ``[places, 1]``; 0 for none."""
    mean = places.mean(values)
    variance = places.mean(values**2) - mean**2
    shown = (places.at_drawn(values) - mean) / np.sqrt(np.maximum(variance, LEAST_VARIANCE))
    same = np.diff(places.answer) == 0
    next_to = np.diff(places.position) == 1
    last = np.zeros_like(shown)
    last[1:] = shown[:-1] * (same & next_to)[:, None]
    return np.clip(last, -MOST_WEIGHT, MOST_WEIGHT)


def pit_overlap(probs: Floats, number: int) -> Floats:
    """Return how much of each outcome's interval of the CDF lies in a bin, ``[places, k + 1]``.

    It is what a randomised PIT's bin has for expectation, given the outcome: no number is drawn.
    """
    high = probs.cumsum(axis=1)
    edges = (number / BINS, (number + 1) / BINS)
    low = high - probs
    inside = np.clip(high, *edges) - np.clip(low, *edges)
    overlap: Floats = inside / np.maximum(probs, 1e-300)
    return overlap
