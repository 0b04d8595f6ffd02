"""Tokens of a step: how far drafts get, by paths and depth.

The *hazard* at depth d of a tree of K paths is the chance that a path accepted up to depth d - 1 is
accepted at depth d too.
"""

import numpy as np

from eaglegbv.config import MAX_DEPTH, MAX_PATHS
from eaglegbv.scheduler.costs import Array

FIRST_CHANCE = 0.55  # of a first draft before any was tried (the tiny pair: 0.5 to 0.65)
_MEMORY = 1 - 1 / 300  # what trials keep with every step
_PRIOR_TRIALS = 10.0  # weight of every prior: texts differ by about as much as ten trials tell
_STAYING = 0.45  # share of independent drafts, beyond the first, that each depth keeps (measured)
_CERTAIN = 1 - 1e-6
_RECOUNT = 4  # steps between two estimates, which take a tenth of a small model's step
# Of K drafts K**0.35 count as independent (the tiny pair: 0.3 at temperature 1, 0.4 at 0).
_PATHS = np.arange(1, MAX_PATHS + 1)
_KEPT = _STAYING ** np.arange(MAX_DEPTH)
_INDEPENDENT: Array = 1 + np.outer(_PATHS**0.35 - 1, _KEPT)


class AcceptanceByDepth:
    """How far drafts of one kind get; the prior is a ``first`` chance."""

    def __init__(self, first: float = FIRST_CHANCE) -> None:
        self._first = first
        self._step = 0
        self._trials = np.zeros((MAX_PATHS, MAX_DEPTH))
        self._successes = np.zeros((MAX_PATHS, MAX_DEPTH))
        self._estimate()

    def observe(self, *, paths: int, offered: int, accepted: int) -> None:
        """Learn from a step whose tree was ``offered`` levels deep."""
        tried = min(accepted + 1, offered)
        self._trials[paths - 1, :tried] += 1
        self._successes[paths - 1, :accepted] += 1

    def tokens(self, step: int) -> Array:
        """Return ``[MAX_PATHS, MAX_DEPTH]`` float64: tokens that the planner's ``step`` commits.

        What was counted fades up to that step.
        """
        if step - self._step >= _RECOUNT:
            kept = _MEMORY ** (step - self._step)
            self._trials *= kept
            self._successes *= kept
            self._step = step
            self._estimate()
        return self._tokens

    def _estimate(self) -> None:
        """Each depth has the one above as prior, each number of paths what all tell of a depth."""
        trials = self._trials + 1e-9
        rates = self._successes / trials
        singles = _any(rates.clip(max=_CERTAIN), 1 / _INDEPENDENT)
        successes = (singles * trials).sum(axis=0)
        trials = trials.sum(axis=0)
        chance = self._first
        chances = np.empty(MAX_DEPTH)
        for depth in range(MAX_DEPTH):
            chance = successes[depth] + _PRIOR_TRIALS * chance
            chance /= trials[depth] + _PRIOR_TRIALS
            chances[depth] = chance
        hazards = _PRIOR_TRIALS * _any(chances, _INDEPENDENT)
        hazards += self._successes
        hazards /= _PRIOR_TRIALS + self._trials
        survival = hazards.cumprod(axis=1)
        self.hazards: Array = hazards  # [paths, depths]
        self._tokens: Array = 1 + survival.cumsum(axis=1)


def _any(chances: Array, drafts: Array) -> Array:
    """Return the chance that any of so many independent drafts is accepted, given that of one."""
    none = (1 - chances) ** drafts
    return np.asarray(1 - none)
