"""Choice of the plan of each request's next step, where the user leaves it to the engine.

    costs.StepCosts          seconds of a step
    AcceptanceByDepth        tokens that a step commits
    Planner                  the plan of most tokens a second, held for some steps; now and then a
                             probe of another

All automatic requests of a step follow one plan; at temperature 0 some look drafts up instead.

Losslessness: a plan is settled before anything of its step is drawn, by what is past: committed
tokens, acceptances and measured times. Given any past, a step of any plan follows the target.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from eaglegbv.config import PLAIN, AutoPlan, Plan, Source, plan_name
from eaglegbv.request import PlanReason, Request
from eaglegbv.scheduler.acceptance import FIRST_CHANCE, AcceptanceByDepth
from eaglegbv.scheduler.costs import REST, Array, Cell, KnownCosts, StepCosts, StepShape, size_class

Fitted: TypeAlias = Callable[[Request, Plan], Plan]

_BETTER = 0.03  # gain that a change must promise, and drafting for every fourfold batch
_HOLD = 8  # steps for which a choice is held: a choice takes as long as a tenth of a small step
_TRIAL = 2  # steps that time a plan: the first takes up to a third longer, and does not count
_PAUSE = 32  # least steps between two probes
_MOST_TO_COME = 256  # tokens that are expected of an answer: most end before their limit
_KEEP = 1000  # timed steps after which what was learned is kept, beside the end of a run


@dataclass(frozen=True, slots=True)
class PlanGroup:
    """Requests that choose their plan together."""

    auto: AutoPlan  # the limits of the choice
    requests: Sequence[Request]
    batch: int  # requests of the step: these, and others that will decode like them
    behind: float = 0.0  # positions that the drafter has missed of a request, in the mean

    @property
    def is_whole(self) -> bool:
        """Whether nobody else takes part in the step, so that its time can be told."""
        return len(self.requests) == self.batch

    @property
    def greedy(self) -> bool:
        """Whether all are at temperature 0."""
        return all(request.params.greedy for request in self.requests)

    @property
    def context(self) -> int:
        """KV slots to which a batch of requests like these attends, all together."""
        slots = [request.context for request in self.requests]
        return self.batch * sum(slots) // len(slots)

    @property
    def to_come(self) -> float:
        """Tokens that a request is expected to commit until it ends, in the mean."""
        tokens = [_to_come(request) for request in self.requests]
        return sum(tokens) / len(tokens)


@dataclass(frozen=True, slots=True)
class Scores:
    """What is expected of every plan, plain decoding first, for a group."""

    plans: tuple[Plan, ...]
    batch: int
    each: Array  # [requests, plans] float64, tokens of each request in a step
    tokens: Array  # [plans] float64, tokens of the whole batch in a step
    seconds: Array  # [plans] float64, of a step
    reading: float  # seconds in which a drafter first reads what it missed of a request
    rates: Array  # [plans] float64, tokens a second, with that reading spread over those to come

    def __str__(self) -> str:
        order = np.argsort(-self.rates, kind="stable")
        listed = []
        for place in order[:5].tolist():
            name = plan_name(self.plans[place])
            listed.append(f"{name} {self.rates[place]:.0f}")
        best = ", ".join(listed)
        return f"tokens/s expected at batch {self.batch}: {best}"


@dataclass(frozen=True, slots=True)
class _Choice:
    """A plan and why it was chosen; with its place in ``scores`` if it promises most of these."""

    plan: Plan
    reason: PlanReason
    why: str
    scores: Scores | None = None
    place: int = 0


class Planner:
    """Chooses plans before steps, and learns from the steps."""

    def __init__(
        self,
        known: KnownCosts | None = None,
        keep: Callable[[KnownCosts], None] | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        """Start with what an earlier run learned; ``keep`` is called with what this one did.

        ``at_once`` says that one forward of the drafter gives all levels.
        """
        self._at_once = at_once
        known = known or KnownCosts()
        self._costs = {True: StepCosts(known.greedy), False: StepCosts(known.sampled)}
        self._keep = keep
        self._acceptance: dict[tuple[Source, int, float], AcceptanceByDepth] = {}
        self._best = PLAIN  # the latest choice but for probes
        self._held: deque[_Choice] = deque()  # steps that are left of it
        self._held_for: tuple[AutoPlan, int, list[int]] | None = None
        self._matched: dict[int, int] = {}  # of requests by number: see :meth:`assign`
        self._steps = 0
        self._observed = 0
        self._probed = 0  # the step of the latest probe
        self._ran: dict[tuple[int, Plan], int] = {}  # the latest step of a plan, by size class
        self._latest: tuple[StepCosts, Cell] | None = None  # what the latest step did
        self._timed: tuple[StepCosts, StepShape] | None = None  # the latest step, if it is timed
        self._prices: deque[float] = deque(maxlen=5)
        self.why = ""  # why the latest plans were chosen, in words; empty if all were fixed

    @property
    def known(self) -> KnownCosts:
        """What was learned of costs."""
        greedy = self._costs[True]
        sampled = self._costs[False]
        return KnownCosts(greedy.known, sampled.known)

    def keep(self) -> None:
        """Have what was learned kept, if anything was."""
        if self._keep is not None and self._observed:
            self._keep(self.known)

    def assign(
        self,
        requests: Sequence[Request],
        *,
        others: int = 0,
        behind: Callable[[Request], int] = lambda _: 0,
        matched: Callable[[Request], int] = lambda _: 0,
        fitted: Fitted = lambda _, plan: plan,
    ) -> None:
        """Give every automatic request among ``requests``, which decode next, its step's plan.

        ``others`` more will soon decode too. Functions tell how many positions a drafter is
        ``behind``, how many last tokens a lookup has ``matched``, and a plan ``fitted`` to the room
        that there is; such steps are not timed.
        """
        self._steps += 1
        self.why = ""
        before = self._latest
        self._latest = None
        self._timed = None
        self._matched.clear()
        by_limits: defaultdict[AutoPlan, list[Request]] = defaultdict(list)
        for request in requests:
            if request.auto is not None:
                by_limits[request.auto].append(request)
            if request.looks_up:
                self._matched[request.number] = matched(request)
        batch = len(requests) + others
        for auto, members in by_limits.items():
            missed = [behind(request) for request in members]
            mean = sum(missed) / len(missed)
            group = PlanGroup(auto, members, batch, mean)
            self._assign(group, fitted)
        if self._latest != before:
            self._timed = None

    def _assign(self, group: PlanGroup, fitted: Fitted) -> None:
        """Give requests of the same limits their plans, and note what is timed."""
        choice = self._next(group)
        self.why = choice.why
        wanted = self._look_up(choice, group)
        plans = []
        for request, plan in zip(group.requests, wanted, strict=True):
            request.plan = fitted(request, plan)
            request.plan_reason = choice.reason
            plans.append(request.plan)
        if group.is_whole and plans == wanted:
            size = size_class(group.batch)
            self._ran[size, choice.plan] = self._steps
            costs = self._costs[group.greedy]
            shape = StepShape.of(plans, group.batch, group.context, at_once=self._at_once)
            self._latest = costs, shape.cell
            self._timed = costs, shape

    def observe_request(self, request: Request, *, offered: int, accepted: int) -> None:
        """Learn from a request's decided step, whose tree was ``offered`` levels deep."""
        if request.auto is not None and offered:
            acceptance = self._acceptance_of(request, request.plan)
            acceptance.observe(paths=request.plan.paths, offered=offered, accepted=accepted)

    def observe_step(self, seconds: float) -> None:
        """Learn the time of the step whose plans were assigned last."""
        if self._timed is None:
            return
        costs, shape = self._timed
        if costs.observe(shape, seconds):
            self._held.clear()  # what was chosen no longer holds
        self._observed += 1
        if self._observed % _KEEP == 0:
            self.keep()

    def observe_reading(self, rows: int, seconds: float) -> None:
        """Learn the time drafters took to read ``rows`` positions that they had missed."""
        if rows:
            self._prices.append(seconds / rows)

    @property
    def reading_seconds(self) -> float:
        """Seconds in which a drafter reads a missed position; 0 while too little is known."""
        # The least: what seems too expensive is not read, so an estimate once raised would stay.
        if len(self._prices) < 2:
            return 0.0
        return min(self._prices)

    def worth_reading(self, request: Request, *, rows: int, batch: int) -> bool:
        """Return whether a drafter should soon read ``rows`` positions of a request in a batch."""
        if request.auto is None:
            return request.drafted
        group = PlanGroup(request.auto, [request], batch, rows)
        scores = self.scores(group)
        if scores is None:
            return True
        return self._best_of(scores) > 0

    def explain(self, requests: Sequence[Request]) -> str:
        """Return in words what is expected of the best plans for the automatic ``requests``."""
        members = [request for request in requests if request.auto is not None]
        if not members or members[0].auto is None:
            return "no request leaves its plan to the engine"
        group = PlanGroup(members[0].auto, members, len(requests))
        scores = self.scores(group)
        if scores is None:
            return "nothing is known yet about the cost of steps"
        return str(scores)

    def scores(self, group: PlanGroup) -> Scores | None:
        """Return what is expected of every plan; None until both kinds of steps were timed."""
        costs = self._costs[group.greedy]
        if len(costs.timed) < 2:
            return None
        plans = (PLAIN, *group.auto.candidates)
        each = np.ones((len(group.requests), len(plans)))
        for n, request in enumerate(group.requests):
            tokens = self._tokens(request, plans[1:])
            each[n, 1:] = tokens
        tokens = group.batch * each.mean(axis=0)
        context = group.context
        shapes = []
        for plan in plans:
            shape = StepShape.of([plan], group.batch, context, at_once=self._at_once)
            shapes.append(shape)
        seconds = costs.seconds(shapes)
        reading = self.reading_seconds * group.behind
        token_seconds = seconds / tokens
        token_seconds[1:] += reading / group.to_come
        return Scores(plans, group.batch, each, tokens, seconds, reading, 1 / token_seconds)

    def _next(self, group: PlanGroup) -> _Choice:
        """Return the held choice if it still applies to these requests, or choose anew."""
        numbers = [request.number for request in group.requests]
        key = group.auto, group.batch, numbers
        if key != self._held_for or not self._held:
            self._held_for = key
            self._held = deque(self._choose(group))
        return self._held.popleft()

    def _choose(self, group: PlanGroup) -> list[_Choice]:
        """Return steps that teach what has to be known, or some of the best plan, maybe a probe."""
        scores = self.scores(group)
        if scores is None:
            plan = PLAIN
            drafts_timed = True in self._costs[group.greedy].timed
            if group.is_whole and not drafts_timed:
                plan, *longer = group.auto.candidates
                plan = longer[0] if longer else plan
            why = f"{plan_name(plan)} has to be timed"
            return [_Choice(plan, PlanReason.LEARNING, why)] * _TRIAL
        place = self._best_of(scores)
        plan = scores.plans[place]
        self._best = plan
        why = f"{plan_name(plan)}; {scores}"
        best = _Choice(plan, PlanReason.BEST, why, scores, place)
        steps = [best] * _HOLD
        if group.is_whole:
            steps = self._probe(best, scores) + steps
        return steps

    def _best_of(self, scores: Scores) -> int:
        """Return the place of the best: a change has to gain, and drafting in large batches."""
        worth = scores.rates.copy()
        fourfold = size_class(scores.batch) / 2
        worth[1:] /= 1 + _BETTER * fourfold
        if self._best in scores.plans:
            worth[scores.plans.index(self._best)] *= 1 + _BETTER
        return int(worth.argmax())

    def _probe(self, best: _Choice, scores: Scores) -> list[_Choice]:
        """Return steps of another plan, if any has rested for so long that it is worth a try.

        After ``REST`` steps it is as if it were twice as fast.
        """
        pause = self._steps - self._probed
        if pause < _PAUSE:
            return []
        size = size_class(scores.batch)
        latest = []
        for plan in scores.plans:
            ran = self._ran.get((size, plan), 0)
            latest.append(ran)
        rested = self._steps - np.array(latest)
        seconds = scores.seconds.copy()
        seconds[1:] += scores.batch * scores.reading / _TRIAL
        rates = scores.tokens / seconds
        worth = rates * (1 + rested / REST)
        worth[best.place] = 0
        place = int(worth.argmax())
        hoped = rates[place] * (1 + pause / REST)
        if hoped < scores.rates[best.place]:
            return []
        self._probed = self._steps
        plan = scores.plans[place]
        why = f"{plan_name(plan)} has not run for {rested[place]} steps; {scores}"
        return [_Choice(plan, PlanReason.PROBE, why)] * _TRIAL

    def _look_up(self, choice: _Choice, group: PlanGroup) -> list[Plan]:
        """Return the requests' plans, with lookups where they promise more.

        If steps as chosen commit r tokens a second, a lookup of d nodes is worth its tokens less
        r d node, and going on as chosen those of that less r times the request's share of drafting.
        """
        plans = [choice.plan] * len(group.requests)
        scores = choice.scores
        if scores is None:
            return plans
        seconds = scores.seconds[choice.place]
        rate = scores.tokens[choice.place] / seconds
        drafting = seconds - scores.seconds[0]
        usual = scores.each[:, choice.place] - rate * drafting / scores.batch
        lookups = group.auto.lookups
        nodes = np.array([plan.depth for plan in lookups])
        context = group.context / group.batch
        price = rate * self._costs[group.greedy].node_seconds(context)
        for n, request in enumerate(group.requests):
            if self._matched.get(request.number):
                worth = self._tokens(request, lookups) - price * nodes
                best = int(worth.argmax())
                if worth[best] > usual[n]:
                    plans[n] = lookups[best]
        return plans

    def _tokens(self, request: Request, plans: Sequence[Plan]) -> Array:
        """Return ``[plans]`` float64: tokens that a request should commit by each plan."""
        acceptance = self._acceptance_of(request, plans[0])
        tokens = acceptance.tokens(self._steps)
        paths = [plan.paths - 1 for plan in plans]
        depths = [plan.depth - 1 for plan in plans]
        return np.minimum(tokens[paths, depths], _to_come(request))

    def _acceptance_of(self, request: Request, plan: Plan) -> AcceptanceByDepth:
        """Return what is known of drafts by a class of temperatures (0, then steps of a half), or
        of lookups by one of matches (1, 2-3, 4-7, ... tokens)."""
        first = FIRST_CHANCE
        temperature = min(2.5, request.params.temperature)
        key = plan.source, math.ceil(2 * temperature), plan.draft_temperature
        if plan.source is Source.LOOKUP:
            matched = self._matched.get(request.number, 0)
            key = plan.source, matched.bit_length(), 0.0
            # After m repeated tokens, the prior chance that the next repeats too is m / (m + 1).
            first = 1 / (1 + 2.0 ** (1 - matched.bit_length()))
        if key not in self._acceptance:
            self._acceptance[key] = AcceptanceByDepth(first)
        return self._acceptance[key]


def _to_come(request: Request) -> int:
    """Return how many tokens a request is expected to commit until it ends."""
    left = request.max_tokens - len(request.token_ids)
    return max(1, min(left, _MOST_TO_COME))
