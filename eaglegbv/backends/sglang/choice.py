"""Choice of each round's plan: the tokens that it promises, over the seconds that it takes.

Seconds come from a table that is made once, when the server starts, and is the same on all ranks;
tokens from how many drafts were accepted, which all ranks see alike. Nothing measured later enters,
so all ranks choose alike. A round's plan is settled before anything of the round is drawn.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from eaglegbv.backends.sglang.rounds import shape_of
from eaglegbv.config import Plan
from eaglegbv.scheduler.acceptance import AcceptanceByDepth
from eaglegbv.scheduler.costs import Array

HOLD = 8  # rounds for which a choice is held
BETTER = 0.03  # gain that a change must promise
PAUSE = 64  # rounds between two trials of a neighbouring plan
MOST_ROWS = 320
"""Rows of a verification up to which larger plans are offered a batch: an H100 reads an 8B model's
weights in bfloat16 in the time in which it computes 295 rows."""


def most_requests(plans: Sequence[Plan], plan: Plan, running: int) -> int:
    """Return the largest batch of one of a server's plans; the last two take any."""
    paths, length = shape_of(plan)
    return running if plan in plans[-2:] else min(running, MOST_ROWS // (1 + paths * length))


class Why(StrEnum):
    """Why a round's plan was taken."""

    BEST = "best"  # most tokens a second
    HELD = "held"  # chosen a few rounds ago
    TRIAL = "trial"  # to see how far a neighbour's drafts get
    SEED = "seed"  # a request has a seed, so load must not decide
    FIXED = "fixed"  # there is no other


class Costs(NamedTuple):
    """Seconds of rounds, a step function of the batch."""

    batches: tuple[int, ...]  # in rising order; a round is padded to the next
    seconds: Array  # [plans, batches]; infinite where a plan does not run

    def of(self, batch: int) -> Array:
        """Return ``[plans]``, of a round of a batch."""
        column = min(bisect_left(self.batches, batch), len(self.batches) - 1)
        return np.asarray(self.seconds[:, column])


class Choice:
    """Chooses among a server's plans, of which the last decodes plainly or is the smallest."""

    def __init__(self, plans: Sequence[Plan], costs: Costs) -> None:
        """Start with the table ``[plan, batch]`` of the plans' rounds."""
        self._plans, self._costs = plans, costs
        self._acceptance = AcceptanceByDepth()
        self._rounds = 0
        self._now: int | None = None
        self._held_until = 0
        self._best, self._ahead = 0, 0  # the best plan at the last choice, and for how many before
        self._batch = 0  # of the round for which the choice was made
        self._underway: deque[Plan] = deque()  # rounds whose results have not been seen
        singles = [i for i, plan in enumerate(plans) if plan.speculative]
        self._seeded = min(singles, key=lambda i: plans[i].paths * plans[i].depth, default=0)

    def choose(self, batch: int, *, seeded: bool) -> tuple[int, Why]:
        """Return which plan the next round of a batch follows, and why.

        A ``seeded`` batch, one that holds a request with a seed, always follows the same plan.
        """
        self._rounds += 1
        index, why = self._chosen(batch, seeded=seeded)
        self._underway.append(self._plans[index])
        return index, why

    def observe(self, accepted: Sequence[int]) -> None:
        """Learn how many drafts of each request the oldest round under way has accepted."""
        plan = self._underway.popleft()
        if plan.speculative:
            for count in accepted:
                self._acceptance.observe(paths=plan.paths, offered=plan.depth, accepted=count)

    def _chosen(self, batch: int, *, seeded: bool) -> tuple[int, Why]:
        if len(self._plans) == 1:
            return 0, Why.FIXED
        if seeded:
            return self._seeded, Why.SEED
        if self._now is not None and self._rounds < self._held_until and batch <= self._batch:
            if self._rounds % PAUSE == 0:
                return self._neighbour(batch), Why.TRIAL
            return self._now, Why.HELD
        rates = self._tokens() / self._costs.of(batch)
        best = int(rates.argmax())
        self._ahead = self._ahead + 1 if best == self._best else 0
        self._best = best
        # A plan that is the best time and again need not be as much better.
        needed = 1 + BETTER / (1 + self._ahead)
        if self._now is None or rates[best] > needed * rates[self._now]:
            self._now = best
        self._held_until, self._batch = self._rounds + HOLD, batch
        return self._now, Why.BEST

    def _neighbour(self, batch: int) -> int:
        """Return the plan beside the one in use that drafts more, or less where none does."""
        assert self._now is not None
        runs = np.isfinite(self._costs.of(batch))
        other = self._now - 1 if self._now > 0 and runs[self._now - 1] else self._now + 1
        return other if other < len(self._plans) and runs[other] else self._now

    def _tokens(self) -> Array:
        """Return ``[plans]``, the tokens of a request that a round of each plan commits."""
        tokens = self._acceptance.tokens(self._rounds)
        return np.array(
            [tokens[p.paths - 1, p.depth - 1] if p.speculative else 1.0 for p in self._plans]
        )
