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

`copies` are what follows the same text, counted over many short answers to few prompts. Who comes
to a text depends on earlier tokens alone, and the law after it is known: so the counts of what
follows are multinomial under the reported laws. Their chi-square sees what averages out over
different texts, and answers that share random numbers or are too even; but nothing beyond the
texts that many answers have in common.
"""

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeAlias

import msgspec
import numpy as np
from scipy import optimize, special, stats

from eaglegbv.eval.audit.served.laws import TINY, TO_REST, Array, Places

POWER = 0.9  # probability with which the printed smallest shift is found
RANKS = (1, 2, 4, 8, np.inf)  # first rank, from 0, of each group but the first: the rest is last
PROBS = (0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9, np.inf)
CHANCES = (0.2, 0.4, 0.6, 0.8, 0.95)
ENTROPIES = (0.5, 1.5)
BINS = 10
MOST_SURPRISE = 10.0  # nats; beyond, one token would weigh as much as hundreds
MOST_WEIGHT = 3.0  # of a place by what was drawn before it
LEAST_VARIANCE = 0.05  # of what was drawn before a place, so that certain tokens weigh nothing
NORMAL = 2.5  # standard deviations up to which the normal law is good enough
FEWEST = 5.0  # rare events that a feature must expect: what its fourth moment says of their number
EXPECTED = 5.0  # least expected count of a token after a text
LEAST = 0.5  # least expected count of all others after it

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

Column: TypeAlias = tuple[str, str, Array]
"""A statistic's name, what one of its features is, and its values ``[places, k + 1]``."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One statistic, as it is reported."""

    name: str
    what: str  # the feature that showed most
    z: float  # standard deviations from the law, beyond what rounding explains
    p_value: float  # two-sided, of all its features together
    level: float  # the finding fails the server below this
    shift: float | None = None  # difference a token; none where only a size is known
    smallest_shift: float  # that would have been found with probability 0.9
    places: int

    @property
    def fails(self) -> bool:
        """Whether chance alone would go as far less often than the level."""
        return self.p_value < self.level

    @property
    def unit(self) -> str:
        """What its differences are counted in."""
        return UNITS.get(self.name.split()[0], "of tokens")


def findings(places: Places, level: float) -> list[Finding]:
    """Test places at a level that all statistics share; the ones without information are left out.

    The places of one answer follow each other.
    """
    found = [copies(places, WEIGHTS["copies"] * level)]
    for name, group in groupby(columns(places), itemgetter(0)):
        features, share = list(group), WEIGHTS[name] * level
        tested = [of_feature(places, column, share, len(features)) for column in features]
        known = [finding for finding in tested if finding is not None]
        found.append(min(known, key=lambda finding: finding.p_value, default=None))
    return [finding for finding in found if finding is not None]


def of_feature(places: Places, column: Column, level: float, features: int) -> Finding | None:
    """Test the sum of one of the ``features`` of a statistic, which share its level.

    None where its variance is too small for the sum to have a known law.
    """
    name, what, values = column
    centred = values - places.mean(values)
    squares = centred**2
    variance = places.mean(squares).sum()
    if variance <= 0 or places.mean(squares**2).sum() > variance**2 / FEWEST:
        return None
    deviation = variance**0.5
    difference = places.at_drawn(centred).sum()
    sign, bound = np.sign(difference), _bound(places, values)
    beyond = max(abs(difference) - bound, 0.0)
    p_value = special.ndtr(-beyond / deviation)
    if beyond > NORMAL * deviation:
        p_value = tail(places.probs, sign * centred, beyond)
    count = int(squares.any(axis=1).sum())
    needed = special.ndtri(POWER) - special.ndtri(level / features / 2)
    return Finding(
        name=name,
        what=what,
        z=sign * beyond / deviation,
        p_value=min(1.0, 2 * p_value * features),
        level=level,
        shift=difference / count,
        smallest_shift=(needed * deviation + bound) / count,
        places=count,
    )


def _bound(places: Places, values: Array) -> Any:  # noqa: ANN401
    """Return B; where a law has no rest, its constant is the mean."""
    constant = np.where(places.probs[:, -1:] > 0, values[:, -1:], places.mean(values))
    errors = np.expm1(places.errors) * np.exp(places.errors.max(axis=1, keepdims=True))
    return (places.probs * np.abs(values - constant))[:, :-1].ravel() @ errors.ravel()


def tail(probs: Array, centred: Array, total: float) -> float:
    """Return P(sum d >= total) by a saddlepoint, for laws and values ``[places, k + 1]``.

    Where no law of the places can reach the total, or hardly, the largest tilt gives Chernoff's
    bound.
    """

    def exponent(tilt: float) -> float:
        masses = (probs * np.exp(tilt * centred)).sum(axis=1)
        return float(np.log(masses).sum()) - tilt * total

    most = 500 / np.abs(centred).max()
    found: Any = optimize.minimize_scalar(exponent, bounds=(0, most), method="bounded")
    tilt, step = found.x, found.x / 1000
    curvature = exponent(tilt + step) + exponent(tilt - step) - 2 * found.fun
    root = max(-2 * found.fun, 1e-12) ** 0.5
    wald = max(curvature, 1e-20) ** 0.5 * 1000  # tilt times the tilted law's deviation
    p_value = special.ndtr(-root - np.log(wald / root) / root)
    return float(min(p_value, np.exp(found.fun)))


def copies(places: Places, level: float) -> Finding | None:
    """Compare what followed each repeated text with its law; None where no text is repeated.

    Pearson's statistic has its exact mean and variance under multinomial counts (Haldane 1937), and
    their gamma law's two-sided p-value: too far from the laws, or too near. The smallest shift is a
    total variation that is taken to be the same, in chi-square, after all texts.
    """
    total = variance = 0.0
    free = texts = used = 0
    for text in np.flatnonzero(np.bincount(places.context) >= 2 * EXPECTED):
        counts, means = _following(places.only(places.context == text))
        size, cells = counts.sum(), len(means)
        if cells > 1 and size > 0:
            total += (counts**2 / means).sum() - size
            variance += 2 * (cells - 1) + (1 / means).sum() - (cells**2 + 2 * cells - 2) / size
            free += cells - 1
            texts += 1
            used += size
    if not texts:
        return None
    law = stats.gamma(free**2 / variance, scale=variance / free)
    noncentrality = special.chndtrinc(special.chdtri(free, level / 2), free, 1 - POWER)
    return Finding(
        name="copies",
        what=f"what follows {texts} texts, {free + texts} tokens in all",
        z=(total - free) / variance**0.5,
        p_value=2 * min(law.sf(total), law.cdf(total)),
        level=level,
        smallest_shift=float(noncentrality / used) ** 0.5 / 2,
        places=used,
    )


def _following(places: Places) -> tuple[Array, Array]:
    """Return the counts of what followed one text, and their means, both ``[outcomes]``.

    Near ties may change places from one batch of a server to another: outcomes go by token, and a
    token that only some of the places list belongs to the rest everywhere. A rest that is hardly
    expected is left out: given that one of the others is drawn, their law is known too.
    """
    _, index, listed = np.unique(places.tokens, return_inverse=True, return_counts=True)
    drawn = np.arange(places.rest) == places.drawn[:, None]
    sums = (np.bincount(index.ravel(), values.ravel()) for values in (drawn, places.probs[:, :-1]))
    table = np.stack([*sums])
    table = table[:, (listed == len(places)) & (table[1] >= EXPECTED)]
    table = np.append(table, len(places) - table.sum(axis=1, keepdims=True), axis=1)
    counts, means = table[:, table[1] >= LEAST]
    return counts, means * counts.sum() / means.sum()


def surprises(places: Places) -> Array:
    """Return -log p of every outcome; of the rest at least that of the last one listed."""
    surprise: Array = -np.log(places.probs.clip(np.exp(-MOST_SURPRISE)))
    surprise[:, :-1] *= places.probs[:, :-1] > 0
    surprise[:, -1] = surprise.max(axis=1)
    return surprise


def columns(places: Places) -> Iterator[Column]:
    """Yield the features of all statistics but `copies`, those of one together."""
    probs, surprise = places.probs, surprises(places)
    ranks = np.broadcast_to([*range(places.rest), np.inf], probs.shape)
    by_prob = np.pad(probs[:, :-1], TO_REST, constant_values=np.inf)
    top = (ranks == 0).astype(float)
    order = places.tokens.argsort(axis=1).argsort(axis=1) / max(places.rest - 1, 1)
    entropy, chance, every = places.mean(surprise), probs[:, :1], np.ones_like(probs)
    yield "top", "most likely token", top
    yield "surprise", "surprise", surprise
    yield "id", "order by token id", np.pad(order, TO_REST, constant_values=0.5)
    yield "seen", "tokens that occurred before", np.pad(places.counts > 0, TO_REST)
    yield from _split("rank", every, ranks, RANKS)
    yield from _split("prob", every, by_prob, PROBS)
    for number in range(BINS):
        yield "pit", f"PIT bin {number + 1}", pit_overlap(probs, number)
    yield from _split("top by its chance", top, chance, CHANCES)
    yield from _split("surprise by chance of the top", surprise, chance, CHANCES)
    for name, values in (("top", top), ("surprise", surprise)):
        yield from _split(f"{name} by entropy", values, entropy, ENTROPIES)
        what = f"{name} after that of the last token"
        yield f"{name} after the last", what, values * _shown_before(values, places)


def _split(name: str, values: Array, by: Array, limits: tuple[float, ...]) -> Iterator[Column]:
    """Yield a feature apart for groups of outcomes, or of places, by what was known before."""
    group = np.digitize(by, limits)
    for number in range(len(limits) + 1):
        yield name, f"{name}, {number + 1}", values * (group == number)


def _shown_before(values: Array, places: Places) -> Array:
    """Return what the token before showed, in standard deviations, ``[places, 1]``; 0 for none."""
    centred = values - places.mean(values)
    deviation = places.mean(centred**2).clip(LEAST_VARIANCE) ** 0.5
    shown = places.at_drawn(centred) / deviation
    follows = (np.diff(places.answer) == 0) & (np.diff(places.position) == 1)
    shown[1:] = shown[:-1] * follows[:, None]
    shown[:1] = 0
    weight: Array = shown.clip(-MOST_WEIGHT, MOST_WEIGHT)
    return weight


def pit_overlap(probs: Array, number: int) -> Array:
    """Return how much of each outcome's interval of the CDF lies in a bin, ``[places, k + 1]``.

    It is what a randomised PIT's bin has for expectation, given the outcome: no number is drawn.
    """
    high = probs.cumsum(axis=1)
    edges = (number / BINS, (number + 1) / BINS)
    inside = high.clip(*edges) - (high - probs).clip(*edges)
    overlap: Array = inside / probs.clip(TINY)
    return overlap
