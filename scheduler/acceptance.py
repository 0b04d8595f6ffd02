"""How far drafts get: the chance of acceptance at each depth, learned while the engine runs.

For requests of one kind (a temperature class), the hazard at depth d of a tree of K paths is the
chance that a path accepted up to depth d - 1 is accepted at depth d too. It is estimated from
counts that fade, with a prior that carries over what trees with other numbers of paths have shown.
With a_d the chance of a single draft, and n(K, d) the number of drafts that count as independent
there:

    hazard(K, d) ~ 1 - (1 - a_d)^n(K, d),      a_d ~ a_(d-1) where little is known,
    n(K, d) = 1 + (K^e - 1) s^(d-1),           e the most likely one, s a constant.

A confident drafter's drafts are alike, and e is small; those of an uncertain one differ, and e is
near 1.

A request differs from its kind by one shift of the log-odds, the same at all depths. The shift is
the maximum a posteriori under a normal prior, computed in one Newton step from 0; its evidence
fades too. A single text says little about its kind, however long it is. So the more is known about
a request, the less a further trial of it counts for its kind.

Plans are compared by hopes. These are hazards whose prior is raised by part of a standard error:
depths that were seldom tried look worth a try, while those tried often are taken as measured.

The estimates use only decided steps: what was accepted, never what is drafted now.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from eaglegbv.config import MAX_DEPTH, MAX_PATHS
from eaglegbv.scheduler.costs import Array, Ints

_MEMORY = 1 - 1 / 400
"""Weight that a trial of a cell keeps with every further trial."""

_REQUEST_MEMORY = 1 - 1 / 60
"""Weight that a request's trials keep with every further step."""

_SHIFT_VARIANCE = 0.35
"""Prior variance of a request's shift of the log-odds."""

_FIRST_CHANCE = 0.55
"""Prior chance of a drafter's single draft at depth 1."""

_FIRST_TRIALS, _NEXT_TRIALS, _CELL_TRIALS = 4.0, 8.0, 12.0
"""Weights, in trials, of the priors: of a_1, of a_d from a_(d-1), of a cell from a_d."""

_HINT_TRIALS = 10.0
"""Most trials of a cell that count for another kind of requests."""

_INDEPENDENCE = np.array([0.2, 0.35, 0.5, 0.75, 1.0])
"""Of K drafts K^e count as independent; e is the one of these that trials at depth 1 favour."""

_USUAL_INDEPENDENCE, _INDEPENDENCE_VARIANCE = 0.35, 0.1
"""Prior mean and variance of e. The tiny pair has 0.3 at temperature 1 and 0.4 at 0."""

_HOPE = 0.25
"""Standard errors by which the prior of a chance is raised when plans are compared.

The raise applies at every depth, so a small one has a large effect: with a whole standard error, an
engine that knows nothing yet spends its first hundred tokens on trees of eight levels.
"""

_SURE = 0.999
"""The greatest chance of a single draft."""

_RISE = 0.15
"""How much the log-odds of a chance rise from one depth to the next, where little is known.

A path that was accepted this far belongs to a text that is easy to draft. On the tiny pair the
log-odds rise by 0.23, 0.20 and 0.06 from depth 1 to 4 at temperature 1, by 0.17, 0.07 and 0.23 at
0.
"""

_STAYING = 0.45
"""Share of the independent drafts beyond the first that remains with each further depth."""


@dataclass(slots=True)
class Evidence:
    """What a request's own steps say about it.

    Attributes:
        score: Accepted drafts less expected ones, over the request's trials.
        information: Sum of h (1 - h) over these trials, with h the expected chance.
    """

    score: float = 0.0
    information: float = 0.0

    @property
    def shift(self) -> float:
        """Difference between the log-odds of the request and those of its kind."""
        return self.score / (self.information + 1 / _SHIFT_VARIANCE)

    @property
    def doubt(self) -> float:
        """Standard deviation of the shift."""
        return 1 / math.sqrt(self.information + 1 / _SHIFT_VARIANCE)

    def age(self, steps: int = 1) -> None:
        """Let evidence fade, even while nothing is drafted, so that drafting is tried again."""
        kept = _REQUEST_MEMORY**steps
        self.score *= kept
        self.information *= kept


@dataclass(slots=True)
class Acceptance:
    """Chances of one kind of request.

    Attributes:
        trials: ``[MAX_PATHS, MAX_DEPTH]`` float64, steps whose accepted path reached the parent;
            the latest few are not counted yet.
        successes: Those of them in which a draft at this depth was accepted.
        first: Assumed chance of a single draft at depth 1 while little is known.
    """

    trials: Array = field(default_factory=lambda: np.zeros((MAX_PATHS, MAX_DEPTH)))
    successes: Array = field(default_factory=lambda: np.zeros((MAX_PATHS, MAX_DEPTH)))
    first: float = _FIRST_CHANCE
    _known: "_Chances | None" = None
    _uncounted: list[tuple[int, int, int, float]] = field(default_factory=list)

    def hint(self) -> "Acceptance":
        """Return what these chances suggest about another kind of request: a weak prior."""
        self._count()
        weight = np.minimum(1.0, _HINT_TRIALS / np.maximum(self.trials, 1.0))
        return Acceptance(self.trials * weight, self.successes * weight, self.first)

    def observe(self, evidence: Evidence, *, paths: int, offered: int, accepted: int) -> None:
        """Learn from a decided step of one request.

        Args:
            evidence: The request's own evidence, which is updated.
            paths: Drafted paths, K.
            offered: Depth of the tree.
            accepted: Accepted drafts, at most ``offered``.
        """
        tried = min(accepted + 1, offered)
        # The chances of the latest choice are close enough; a new estimate would take longer.
        known = self._known or self._chances()
        expected = known.listed[paths - 1][:tried]
        evidence.age()
        weight = 1 / (1 + _SHIFT_VARIANCE * evidence.information)
        evidence.score += accepted - sum(expected)
        evidence.information += sum(h * (1 - h) for h in expected)
        self._uncounted.append((paths - 1, tried, accepted, weight))

    def fade(self, kept: float) -> None:
        """Forget all but a share ``kept`` of what was learned."""
        self._count()
        self.trials *= kept
        self.successes *= kept
        self._known = None

    @property
    def hazards(self) -> Array:
        """``[MAX_PATHS, MAX_DEPTH]`` float64, the chances of this kind of request."""
        return self._chances().hazards

    def expected_tokens(self, shifts: Array, limits: Ints, paths: Ints, depths: Ints) -> Array:
        """Return ``[requests, plans]`` float64: tokens that a step of each plan should commit.

        The estimate is optimistic at depths that were seldom tried.

        Args:
            shifts: ``[requests]`` float64, each request's shift of the log-odds.
            limits: ``[requests]`` int64, most tokens each may still commit, at least 1.
            paths: ``[plans]`` int64.
            depths: ``[plans]`` int64.
        """
        deepest = int(depths.max())
        numbers, place = np.unique(paths, return_inverse=True)
        chances = _shifted(
            self._chances().hopes[None, numbers - 1, :deepest], shifts[:, None, None]
        )
        survival = np.cumprod(chances, axis=2)
        survival *= np.arange(1, deepest + 1) < limits[:, None, None]
        result: Array = 1 + np.cumsum(survival, axis=2)[:, place, depths - 1]
        return result

    def _chances(self) -> "_Chances":
        self._count()
        if self._known is None:
            self._known = self._estimate()
        return self._known

    def _count(self) -> None:
        """Count the steps observed since the last count; several at once take half as long."""
        if self._uncounted:
            self._known = None
        for row, tried, accepted, weight in self._uncounted:
            kept = _MEMORY**weight
            self.trials[row, :tried] *= kept
            self.successes[row, :tried] *= kept
            self.trials[row, :tried] += weight
            self.successes[row, :accepted] += weight
        self._uncounted.clear()

    def _estimate(self) -> "_Chances":
        """Estimate the chances: each depth has the one above as prior, each cell its depth."""
        independent = _INDEPENDENT_DRAFTS[self._likeliest()]
        singles = _single(self._rates(), independent)
        weights = self.trials.sum(axis=0)
        pooled = (self.trials * singles).sum(axis=0)
        chances, hopes, chance, prior = [], [], self.first, _FIRST_TRIALS
        for weight, total in zip(weights.tolist(), pooled.tolist(), strict=True):
            chance = (total + prior * chance) / (weight + prior)
            chances.append(chance)
            hopes.append(chance + _HOPE * math.sqrt(chance * (1 - chance) / (weight + prior)))
            chance, prior = float(_shifted(np.array(chance), _RISE)), _NEXT_TRIALS
        hazards = self._posterior(_any(np.array(chances), independent))
        return _Chances(
            hazards=hazards,
            hopes=self._posterior(_any(np.minimum(hopes, _SURE), independent)),
            listed=hazards.tolist(),
        )

    def _posterior(self, prior: Array) -> Array:
        result: Array = (self.successes + _CELL_TRIALS * prior) / (self.trials + _CELL_TRIALS)
        return result

    def _likeliest(self) -> int:
        """Return the index of the most likely exponent e, from trials at depth 1 and the prior."""
        trials, successes = self.trials[:, 0], self.successes[:, 0]
        independent = _INDEPENDENT_DRAFTS[:, :, 0]
        singles = (trials * _single(self._rates()[:, 0], independent)).sum(axis=1)
        chances = (singles + _FIRST_TRIALS * self.first) / (trials.sum() + _FIRST_TRIALS)
        expected = _any(chances[:, None], independent)
        likelihood = successes * np.log(expected) + (trials - successes) * np.log1p(-expected)
        prior = -((_INDEPENDENCE - _USUAL_INDEPENDENCE) ** 2) / (2 * _INDEPENDENCE_VARIANCE)
        return int((likelihood.sum(axis=1) + prior).argmax())

    def _rates(self) -> Array:
        """Return ``[MAX_PATHS, MAX_DEPTH]`` float64: shares of successful trials, below 1."""
        rates: Array = np.minimum(self.successes / np.maximum(self.trials, 1e-9), _SURE)
        return rates


@dataclass(frozen=True, slots=True)
class _Chances:
    """Chances estimated from the counts.

    Attributes:
        hazards: ``[MAX_PATHS, MAX_DEPTH]`` float64, estimates.
        hopes: ``[MAX_PATHS, MAX_DEPTH]`` float64, the same but higher where trials are few.
        listed: ``hazards`` as lists, which sum a few of them faster.
    """

    hazards: Array
    hopes: Array
    listed: list[list[float]]


def _single(rates: Array, independent: Array) -> Array:
    """Return the chance of one draft, given ``rates`` at which any of several is accepted."""
    result: Array = -np.expm1(np.log1p(-rates) / independent)
    return result


def _any(chances: Array, independent: Array) -> Array:
    """Return the chance that any of several drafts is accepted, below 1, given that of one."""
    result: Array = np.minimum(-np.expm1(np.log1p(-chances) * independent), 1 - 1e-9)
    return result


def _independent_drafts() -> Array:
    """Return ``[exponents, MAX_PATHS, MAX_DEPTH]`` float64, numbers of independent drafts."""
    paths = np.arange(1, MAX_PATHS + 1) ** _INDEPENDENCE[:, None]
    stay = _STAYING ** np.arange(MAX_DEPTH)
    result: Array = 1 + (paths[:, :, None] - 1) * stay
    return result


def _shifted(chances: Array, shift: Array | float) -> Array:
    """Return chances with their log-odds moved by ``shift``."""
    odds = np.exp(shift)
    result: Array = chances * odds / (1 - chances + chances * odds)
    return result


_INDEPENDENT_DRAFTS = _independent_drafts()


def kind_of(temperature: float) -> int:
    """Return the class of a temperature: 0 for greedy, then steps of a half."""
    return 0 if temperature == 0 else 1 + min(4, math.floor(temperature * 2))
