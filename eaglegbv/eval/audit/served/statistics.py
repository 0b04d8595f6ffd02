"""Statistics of places: sums of what a token shows minus its expectation under the law there.

A feature f gives a number to every outcome, and depends on nothing but what was known before the
token was drawn. With ``d = f(x) - sum p f`` and ``v = sum p f^2 - (sum p f)^2`` at each place, the
sum of d is a martingale, and z = sum d / sqrt(sum v) is standard normal for long texts. A statistic
has one column or several, and its p-value is the least of its columns' times their number: so each
has a direction and a size that can be told in words, and tails are computed to be right for sums
of rare events too (Lugannani and Rice, by the laws' own cumulant generating functions).

Where the report is rounded, the sum may be off by ``B``: with e the largest error of a listed
log-probability, ``|E' f - E f| <= sum p (exp(e) - 1) |f - c|`` for every constant c over a law
whose rest takes what the others leave, if c = f(rest). Only what exceeds B counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
from scipy import special

from eaglegbv.eval.audit.served.places import Floats, Ints, Places, log_probs

POWER = 0.9  # probability with which the printed smallest shift is found
RANKS = (1, 2, 4, 8)  # first rank, from 0, of each group of ranks but the first
PROBS = (0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9)
CHANCES = (0.2, 0.4, 0.6, 0.8, 0.95)
ENTROPIES = (0.5, 1.5)
BINS = 10
MOST_SURPRISE = 10.0  # nats; beyond, one token would weigh as much as hundreds
MOST_WEIGHT = 3.0  # of a place by what was drawn before it
NORMAL = 2.5  # standard deviations up to which the normal law is good enough
FEWEST = 5.0  # rare events that a column must expect: what its fourth moment says of their number

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


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """A sum over places, of one feature."""

    name: str
    difference: float  # sum of d
    variance: float  # sum of v
    bound: float  # B
    places: int
    p_value: float  # two-sided

    @property
    def z(self) -> float:
        """Standard deviations beyond what rounding explains."""
        beyond = max(abs(self.difference) - self.bound, 0.0)
        return float(np.sign(self.difference) * beyond / self.variance**0.5)

    @property
    def shift(self) -> float:
        """Difference a place."""
        return self.difference / self.places

    def smallest_shift(self, level: float) -> float:
        """Return the difference a place that is found at ``level`` with probability 0.9."""
        needed = special.ndtri(POWER) - special.ndtri(level / 2)
        return float(needed * self.variance**0.5 + self.bound) / self.places


class Statistic(msgspec.Struct, frozen=True, kw_only=True):
    """What a kind of feature showed."""

    name: str
    columns: tuple[Column, ...]

    @property
    def worst(self) -> Column:
        """The column with the least p-value."""
        return min(self.columns, key=lambda column: column.p_value)

    @property
    def p_value(self) -> float:
        """Probability of something as unlikely, if the server draws from its laws."""
        return min(1.0, self.worst.p_value * len(self.columns))


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature at every place, and groups of places that are summed apart."""

    name: str
    values: Floats  # [places, k + 1]
    weight: Floats | None = None  # [places], by what was known before
    group: Ints | None = None  # [places], by what was known before

    def columns(self, places: Places) -> Iterator[Column]:
        """Yield the sums that have enough variance to have a known law."""
        values = self.values if self.weight is None else self.values * self.weight[:, None]
        parts = {self.name: (places, values)}
        if self.group is not None:
            numbers = [np.flatnonzero(self.group == number) for number in np.unique(self.group)]
            parts = {
                f"{self.name}, {self.group[inside[0]] + 1}": (places.take(inside), values[inside])
                for inside in numbers
            }
        for name, part in parts.items():
            column = _column(name, *part)
            if column is not None:
                yield column


def _column(name: str, places: Places, values: Floats) -> Column | None:
    probs = places.probs
    mean = np.einsum("nk,nk->n", probs, values)[:, None]
    centred = values - mean
    difference = float(centred[np.arange(len(places)), places.drawn].sum())
    squares = centred**2
    variance = float(np.einsum("nk,nk->", probs, squares))
    fourth = float(np.einsum("nk,nk->", probs, squares**2))
    if variance <= 0 or fourth > variance**2 / FEWEST:
        return None
    constant = np.where(probs[:, -1:] > 0, values[:, -1:], mean)
    bound = float(np.einsum("nk,nk->", _uncertain(places), np.abs(values - constant)[:, :-1]))
    beyond = max(abs(difference) - bound, 0.0)
    p_value = 2 * float(special.ndtr(-beyond / variance**0.5))
    if beyond > NORMAL * variance**0.5:
        p_value = min(1.0, 2 * _tail(probs, np.sign(difference) * centred, beyond))
    return Column(
        name=name,
        difference=difference,
        variance=variance,
        bound=bound,
        places=len(places),
        p_value=p_value,
    )


def _uncertain(places: Places) -> Floats:
    """Return how much of each listed probability may be rounding, ``[places, k]``."""
    if not places.errors.any():
        return np.zeros_like(places.errors)
    most = np.exp(places.errors.max(axis=1, keepdims=True, initial=0))
    uncertain: Floats = places.probs[:, :-1] * np.expm1(places.errors) * most
    return uncertain


def _tail(probs: Floats, centred: Floats, total: float) -> float:
    """Return P(sum d >= total) by a saddlepoint, for places ``[places, k + 1]``.

    Where no law of the places can reach the total, or hardly, the largest tilt gives a bound.
    """
    theta, tilted = 0.0, probs
    largest = 500 / max(float(np.abs(centred).max()), 1e-12)
    for _ in range(60):
        mean = (tilted * centred).sum(axis=1)
        variance = float((tilted * centred**2).sum() - (mean**2).sum())
        step = (total - float(mean.sum())) / max(variance, 1e-12)
        theta = min(max(theta + float(np.clip(step, -0.5, 0.5)), 0.0), largest)
        tilted = probs * np.exp(theta * centred)
        mass = tilted.sum(axis=1, keepdims=True)
        tilted /= mass
        if abs(step) < 1e-9 or theta == largest:
            break
    exponent = float(np.log(mass).sum()) - theta * total  # Chernoff's, at most 0
    root = (-2 * min(exponent, 0.0)) ** 0.5
    u = theta * variance**0.5
    if root < 1e-4 or u < 1e-4:
        return float(special.ndtr(-root))
    log_tail = special.log_ndtr(-root) + np.log1p(
        np.exp(-(root**2) / 2 - special.log_ndtr(-root)) * (1 / u - 1 / root) / (2 * np.pi) ** 0.5
    )
    return float(np.exp(min(log_tail, exponent)))


def surprises(places: Places) -> Floats:
    """Return -log p of every outcome; of the rest at least that of the last one listed."""
    listed = np.minimum(-log_probs(places), MOST_SURPRISE)
    listed = np.where(places.probs[:, :-1] > 0, listed, 0.0)
    with np.errstate(divide="ignore"):
        rest = np.minimum(-np.log(places.probs[:, -1]), MOST_SURPRISE)
    return np.append(listed, np.maximum(rest, listed.max(axis=1, initial=0))[:, None], axis=1)


def before(values: Floats, places: Places) -> Floats:
    """Return the values at the place before in the same answer, 0 where it has no law."""
    last = np.zeros_like(values)
    follows = (np.diff(places.answer) == 0) & (np.diff(places.position) == 1)
    last[1:][follows] = values[:-1][follows]
    return last


def features(places: Places) -> Iterator[tuple[str, Iterator[Feature]]]:
    """Yield the features of each statistic by its name; `copies` is apart."""
    probs, outcomes = places.probs, np.arange(places.rest + 1)
    top, surprise = np.zeros_like(probs), surprises(places)
    top[:, 0] = 1
    chance = np.digitize(probs[:, 0], CHANCES)
    entropy = np.digitize((probs * surprise).sum(axis=1), ENTROPIES)
    yield "top", iter([Feature("most likely token", top)])
    yield "surprise", iter([Feature("surprise", surprise)])
    yield "rank", _indicators("rank group", _ranks(outcomes, places), RANKS)
    kind = np.digitize(probs, PROBS)
    kind[:, -1] = len(PROBS) + 1
    yield "prob", _indicators("probability group", kind, PROBS)
    yield "pit", (Feature(f"PIT bin {b + 1}", pit_overlap(probs, b)) for b in range(BINS))
    order = np.full(probs.shape, 0.5)
    order[:, :-1] = places.tokens.argsort(axis=1).argsort(axis=1) / max(places.rest - 1, 1)
    yield "id", iter([Feature("order by token id", order)])
    seen = np.append((places.counts > 0).astype(float), np.zeros((len(places), 1)), axis=1)
    yield "seen", iter([Feature("tokens that occurred before", seen)])
    yield "top by its chance", iter([Feature("most likely token by its chance", top, None, chance)])
    yield "top by entropy", iter([Feature("most likely token by entropy", top, None, entropy)])
    yield (
        "surprise by chance of the top",
        iter([Feature("surprise by chance", surprise, None, chance)]),
    )
    yield "surprise by entropy", iter([Feature("surprise by entropy", surprise, None, entropy)])
    for name, values in (("top", top), ("surprise", surprise)):
        mean = (probs * values).sum(axis=1)
        spread = np.sqrt(np.maximum((probs * values**2).sum(axis=1) - mean**2, 0.05))
        shown = (values[np.arange(len(places)), places.drawn] - mean) / spread
        weight = np.clip(before(shown, places), -MOST_WEIGHT, MOST_WEIGHT)
        yield (
            f"{name} after the last",
            iter([Feature(f"{name} after that of the last token", values, weight)]),
        )


def _ranks(outcomes: Ints, places: Places) -> Ints:
    rank = np.digitize(outcomes, RANKS)
    rank[-1] = len(RANKS) + 1
    return np.broadcast_to(rank, places.probs.shape)


def _indicators(name: str, kind: Ints, limits: tuple[float, ...]) -> Iterator[Feature]:
    for number in range(len(limits) + 2):
        yield Feature(f"{name} {number + 1}", (kind == number).astype(float))


def pit_overlap(probs: Floats, number: int) -> Floats:
    """Return how much of each outcome's interval of the CDF lies in a bin, ``[places, k + 1]``.

    It is what a randomised PIT's bin has for expectation, given the outcome: no number is drawn.
    """
    high = probs.cumsum(axis=1)
    low = high - probs
    inside = np.minimum(high, (number + 1) / BINS) - np.maximum(low, number / BINS)
    overlap: Floats = np.maximum(inside, 0) / np.maximum(probs, 1e-300)
    return overlap


def statistics_of(places: Places) -> list[Statistic]:
    """Return all statistics of single places; one without information has no columns."""
    return [
        Statistic(name=name, columns=tuple(c for f in parts for c in f.columns(places)))
        for name, parts in features(places)
    ]
