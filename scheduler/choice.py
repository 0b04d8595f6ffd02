"""Expected tokens a second of every plan, for every number of requests that draft by it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from eaglegbv.config import PLAIN, Plan
from eaglegbv.request import PlanReason
from eaglegbv.scheduler.costs import Array, Cell, Ints, StepCosts, StepShape, features, size_class


@dataclass(frozen=True, slots=True)
class Options:
    """The plans to choose from, other than plain decoding.

    Attributes:
        plans: The plans.
        paths: ``[plans]`` int64.
        depths: ``[plans]`` int64.
    """

    plans: tuple[Plan, ...]
    paths: Ints
    depths: Ints

    @classmethod
    def of(cls, plans: tuple[Plan, ...]) -> Self:
        """Take these plans."""
        paths = np.array([plan.paths for plan in plans])
        return cls(plans, paths, np.array([plan.depth for plan in plans]))


@dataclass(frozen=True, slots=True)
class Choice:
    """How the requests of a step decode.

    Attributes:
        plan: The plan of those that draft; :data:`PLAIN` where none does.
        drafting: Indices of the requests that draft.
        reason: Why this was chosen.
        each: ``[requests]`` float64, tokens each request is expected to commit.
        weights: ``[requests]`` float64, what a token of each is worth, 1 on average.
        seconds: Expected time of the step.
        others: Further requests in the batch, whose plans are not chosen here.
        lookups: Plans of the requests whose drafts are looked up, by index.
    """

    plan: Plan
    drafting: frozenset[int]
    reason: PlanReason
    each: Array
    weights: Array
    seconds: float
    others: int = 0
    lookups: Mapping[int, Plan] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """Requests of the step."""
        return len(self.each) + self.others

    @property
    def tokens(self) -> float:
        """Tokens that all these requests together are expected to commit."""
        return float(self.each.sum())

    @property
    def worth(self) -> float:
        """Worth of these tokens, plus one token for each of the others, who wait for the step."""
        return float(self.each @ self.weights) + self.others

    @property
    def rate(self) -> float:
        """Expected worth of the tokens committed a second."""
        return self.worth / self.seconds

    @property
    def looked_up(self) -> int:
        """Nodes of all drafts that are looked up."""
        return sum(plan.depth for plan in self.lookups.values())

    def shape(self, *, context: int) -> StepShape:
        """Return the shape of the step, whose requests attend to ``context`` slots together."""
        return StepShape.of(
            self.plan,
            requests=self.batch,
            context=context,
            drafting=len(self.drafting),
            looked_up=self.looked_up,
        )

    def plan_of(self, place: int) -> Plan:
        """Return the plan of the request with index ``place``."""
        return self.lookups.get(place, self.plan if place in self.drafting else PLAIN)


@dataclass(frozen=True, slots=True)
class Outlook:
    """Expected worth and time of every choice.

    Attributes:
        options: The plans, P of them.
        batch: Requests of the step, at least those that choose.
        order: ``[requests, P]`` int64, requests in the order of what they gain from a plan, the
            largest gain first.
        worth: ``[requests, P]`` float64, worth of all tokens of the step when the first 1, 2, ...
            requests in this order draft.
        seconds: ``[requests, P]`` float64, time of that step, more than 0.
        plain_seconds: Time of a step in which no request drafts, more than 0.
        each: ``[requests, P]`` float64, tokens of each request by each plan.
        weights: ``[requests]`` float64, what a token of each is worth, 1 on average.
        usual: ``[requests, P]`` float64, ``seconds`` without the reading of missed positions.
        missed: ``[requests]`` float64, seconds each request's drafter needs to read what it missed
            before it drafts.
    """

    options: Options
    batch: int
    order: Ints
    worth: Array
    seconds: Array
    plain_seconds: float
    each: Array
    weights: Array
    usual: Array
    missed: Array

    @classmethod
    def of(
        cls,
        costs: StepCosts,
        options: Options,
        tokens: Array,
        *,
        batch: int,
        context: int,
        missed: Array | None = None,
        left: Array | None = None,
        weights: Array | None = None,
    ) -> Self:
        """Compare choices.

        Args:
            costs: What steps cost; at least one step was observed.
            options: The plans.
            tokens: ``[requests, P]`` float64, tokens a request is expected to commit by a plan.
            batch: Requests of the step, at least those of ``tokens``.
            context: KV slots they attend to.
            missed: ``[requests]`` float64, seconds each request's drafter needs to read what it
                missed before it drafts; by default 0.
            left: ``[requests]`` float64, tokens each request is expected to commit until it ends;
                the seconds of ``missed`` are spread over them. By default all count in this step.
            weights: ``[requests]`` float64, what a token of each is worth, 1 on average; by
                default 1.
        """
        requests = len(tokens)
        drafting: Ints = np.arange(1, requests + 1)[:, None]
        rows = features(batch, context, drafting, options.paths, options.depths)
        size = size_class(batch)
        factors = [costs.factor(Cell(size, p.paths, p.depth)) for p in options.plans]
        return cls._ranked(
            options,
            tokens,
            batch=batch,
            usual=np.maximum(1e-9, costs.linear(rows)) * np.array(factors),
            plain_seconds=costs.seconds(StepShape(batch, context, 0, 0, 0)),
            missed=np.zeros(requests) if missed is None else missed,
            left=np.ones(requests) if left is None else left,
            weights=np.ones(requests) if weights is None else weights,
        )

    @classmethod
    def _ranked(
        cls,
        options: Options,
        each: Array,
        *,
        batch: int,
        usual: Array,
        plain_seconds: float,
        missed: Array,
        left: Array,
        weights: Array,
    ) -> Self:
        own = missed[:, None] * np.minimum(1.0, each / left[:, None])
        gains = weights[:, None] * (each - 1)
        # Lost seconds count as the tokens that plain decoding would have committed in them.
        net = gains - own * (batch / max(1e-9, plain_seconds))
        order = np.argsort(-net, axis=0, kind="stable")
        gains = np.take_along_axis(gains, order, axis=0)
        reading = np.take_along_axis(own, order, axis=0)
        return cls(
            options=options,
            batch=batch,
            order=order,
            worth=batch + np.cumsum(gains, axis=0),
            seconds=usual + np.cumsum(reading, axis=0),
            plain_seconds=plain_seconds,
            each=each,
            weights=weights,
            usual=usual,
            missed=missed,
        )

    def at_once(self) -> Self:
        """Return the same outlook with the reading of missed positions counted in one step."""
        return self._ranked(
            self.options,
            self.each,
            batch=self.batch,
            usual=self.usual,
            plain_seconds=self.plain_seconds,
            missed=self.missed,
            left=np.ones(self.requests),
            weights=self.weights,
        )

    @property
    def requests(self) -> int:
        """Number of requests that choose."""
        return len(self.each)

    @property
    def others(self) -> int:
        """Number of requests in the batch that do not choose."""
        return self.batch - self.requests

    def plain(self, reason: PlanReason) -> Choice:
        """Return the choice in which no request drafts."""
        return Choice(
            plan=PLAIN,
            drafting=frozenset(),
            reason=reason,
            each=np.ones(self.requests),
            weights=self.weights,
            seconds=self.plain_seconds,
            others=self.others,
        )

    def best_drafting(self) -> Choice:
        """Return the choice with the highest rate among those in which some request drafts."""
        rates = self.worth / self.seconds
        row, column = np.unravel_index(int(rates.argmax()), rates.shape)
        return self._at(int(row), int(column), PlanReason.BEST)

    def by(self, plan: Plan, reason: PlanReason) -> Choice:
        """Return the best choice by one plan."""
        if not plan.speculative:
            return self.plain(reason)
        column = self.options.plans.index(plan)
        rates = self.worth[:, column] / self.seconds[:, column]
        return self._at(int(rates.argmax()), column, reason)

    def first(self, count: int, plan: Plan, reason: PlanReason) -> Choice:
        """Return the choice in which the ``count`` requests that gain most draft by ``plan``.

        ``count`` is at least 1; with a plan that does not draft, all decode plainly.
        """
        if not plan.speculative:
            return self.plain(reason)
        return self._at(count - 1, self.options.plans.index(plan), reason)

    def rates(self) -> Array:
        """Return ``[P]`` float64: each plan's rate when the best number of requests draft by it."""
        result: Array = (self.worth / self.seconds).max(axis=0)
        return result

    def _at(self, row: int, column: int, reason: PlanReason) -> Choice:
        drafting = self.order[: row + 1, column]
        each = np.ones(self.requests)
        each[drafting] = self.each[drafting, column]
        return Choice(
            plan=self.options.plans[column],
            drafting=frozenset(drafting.tolist()),
            reason=reason,
            each=each,
            weights=self.weights,
            seconds=float(self.seconds[row, column]),
            others=self.others,
        )
