"""Choice of the plan of each request's next step, where the user leaves it to the engine.

    StepCosts    seconds of a step: a fit by its shape, corrected by its own latest times
    Acceptance   tokens that a step commits: how far drafts got, by paths and depth
    Planner      the plan of most tokens a second, held for some steps; now and then a probe

All automatic requests of a step follow one plan; at temperature 0 some look drafts up instead.

Losslessness: a plan is settled before anything of its step is drawn, by what is past: committed
tokens, acceptances and measured times. Given any past, a step of any plan follows the target.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Self, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from eaglegbv.config import MAX_DEPTH, MAX_PATHS, PLAIN, AutoPlan, Plan, Source, plan_name
from eaglegbv.request import PlanReason, Request

Array: TypeAlias = NDArray[np.float64]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Cell: TypeAlias = tuple[int, ...]
"""Steps timed together: class of batch sizes, levels and nodes of a draft, class of contexts."""

# --- seconds of a step
_GAIN = 1 / 8  # Share of a step's time in what is typical: times vary by 5%, their mean by 1%.
_NEWS = 0.35  # Largest log of a ratio that chance explains: a busy machine takes twice as long.
# Steps of one request, path or length cannot tell some costs apart: on most machines a further
# request costs little, so that counts as a cost of the step, of a level or of a node.
_RIDGE = 1e-3 * np.diag((1.0, 20.0, 20.0, 1.0, 1.0, 20.0, 3.0, 20.0))


class StepShape(msgspec.Struct, frozen=True, array_like=True):
    """What decides the cost of a step.

    Attributes:
        requests: Number of requests.
        context: KV slots that they attend to, all together.
        drafting: Number of those whose drafts the drafter makes.
        levels: Levels of each such draft.
        nodes: Nodes of each such draft.
        looked_up: Nodes of looked-up drafts, all together.
    """

    requests: Annotated[int, msgspec.Meta(ge=1)]
    context: Count
    drafting: Count = 0
    levels: Count = 0
    nodes: Count = 0
    looked_up: Count = 0

    @classmethod
    def of(cls, plans: Sequence[Plan], requests: int, context: int) -> "StepShape":
        """Return the shape of a step by ``plans``; a single one is that of all requests."""
        lookups = [plan for plan in plans if plan.source is Source.LOOKUP]
        looked_up = sum(plan.depth for plan in lookups)
        drafts = [plan for plan in plans if plan.asks_drafter]
        if not drafts:
            return cls(requests, context, looked_up=looked_up)
        drafting = requests if len(drafts) == len(plans) else len(drafts)
        levels = drafts[0].depth
        nodes = drafts[0].tree_nodes - 1
        return cls(requests, context, drafting, levels, nodes, looked_up)

    @property
    def features(self) -> tuple[float, ...]:
        """What the fit multiplies: a step, its requests, their context in units of 1024 tokens; and
        of drafts a step, its levels, requests, nodes, and looks of the nodes at contexts."""
        context = self.context / 1024
        nodes = self.drafting * self.nodes + self.looked_up
        looks = nodes * context / self.requests
        drafts = min(1, self.drafting)
        return 1, self.requests, context, drafts, self.levels, self.drafting, nodes, looks

    @property
    def cell(self) -> Cell:
        """The cell by whose times it is corrected."""
        levels = self.levels or self.looked_up.bit_length()
        length = (self.context // self.requests // 512).bit_length()
        return size_class(self.requests), levels, self.nodes, length


def size_class(requests: int) -> int:
    """Return the class of a batch size: 1, 2, 3-4, 5-8, 9-16, ..."""
    return (requests - 1).bit_length()


class Measured(msgspec.Struct, frozen=True, array_like=True):
    """A step that was timed: its shape and its seconds."""

    shape: StepShape
    seconds: Annotated[float, msgspec.Meta(gt=0, le=3600)]


class KnownCosts(msgspec.Struct, frozen=True):
    """What an earlier run learned of steps at temperature 0, and at others."""

    greedy: tuple[Measured, ...] = ()
    sampled: tuple[Measured, ...] = ()


@dataclass(slots=True)
class _Typical:
    """What is typical of a cell: its latest shape and the seconds of that.

    Attributes:
        times: Own times in it; 0 if an earlier run had them.
        seen: The step of the latest one.
        slow: Whether that one was much slower than expected.
    """

    shape: StepShape
    seconds: float
    times: int = 0
    seen: int = 0
    slow: bool = False


class StepCosts:
    """Learns from steps what steps cost."""

    def __init__(self, recorded: Sequence[Measured] = ()) -> None:
        """Start from what an earlier run learned, maybe on a machine that was slower or faster."""
        self.cells = {step.shape.cell: _Typical(step.shape, step.seconds) for step in recorded}
        self._timed: set[bool] = set()
        self._steps = 0
        self._fit = np.zeros(len(_RIDGE))
        self._fitted = False

    @property
    def known(self) -> tuple[Measured, ...]:
        """What was learned: one step of every cell."""
        cells = self.cells.values()
        return tuple(Measured(cell.shape, cell.seconds) for cell in cells)

    @property
    def untimed(self) -> bool | None:
        """Whether no step that drafts was timed yet, or no plain one (False); None if both were."""
        for drafts in (True, False):
            if drafts not in self._timed:
                return drafts
        return None

    def has(self, drafts: bool) -> bool:
        """Return whether anything is known of steps that draft, or of those that do not."""
        return any((cell.shape.levels > 0) == drafts for cell in self.cells.values())

    def observe(self, shape: StepShape, seconds: float) -> bool:
        """Learn from a step that took ``seconds``, more than 0; return whether that was news.

        A step may be held up, but is neither sped up nor held up twice. So news is one that was
        much faster, or the second in a row that was much slower, and also the first of this run.
        News is believed of all plans of its kind that have rested.
        """
        self._steps += 1
        drafts = shape.levels > 0
        known = self.has(drafts)
        first = drafts not in self._timed
        self._timed.add(drafts)
        expected = self._expected(shape) if known else seconds
        surprise = math.log(seconds / expected)
        new = shape.cell not in self.cells
        cell = self.cells.setdefault(shape.cell, _Typical(shape, expected))
        sudden = surprise < -_NEWS or (surprise > _NEWS and cell.slow)
        news = known and (first or (sudden and not new and cell.times != 1))
        if news:
            self._spread(drafts, surprise)
        believed = surprise
        if not (news or sudden):
            believed = max(-_NEWS, min(_NEWS, surprise))
            believed *= max(_GAIN, 1 / (cell.times + 1))
        cell.shape = shape
        cell.seconds = expected * math.exp(believed)
        cell.slow = surprise > _NEWS and not sudden
        cell.times = 1 if sudden else cell.times + 1
        cell.seen = self._steps
        self._fitted = False
        return news

    def seconds(self, shapes: Sequence[StepShape]) -> Array:
        """Return ``[shapes]`` float64: expected seconds; at least one step is known."""
        if not self._fitted:
            self._refit()
        return np.array([self._expected(shape) for shape in shapes])

    def node_seconds(self, context: float) -> float:
        """Return the seconds of a further node that looks at ``context`` slots."""
        node, look = self._fit[-2:].tolist()
        return float(node + look * context / 1024)

    def _spread(self, drafts: bool, surprise: float) -> None:
        for cell in self.cells.values():
            rested = not cell.seen or self._steps - cell.seen > _HOLD
            if rested and (cell.shape.levels > 0) == drafts:
                cell.seconds *= math.exp(surprise)

    def _linear(self, shape: StepShape) -> float:
        seconds = np.dot(shape.features, self._fit)
        return max(1e-9, float(seconds))

    def _expected(self, shape: StepShape) -> float:
        """Return seconds by the fit, corrected by the cell of like or of shorter contexts."""
        if not self._fit.any():
            self._refit()
        seconds = self._linear(shape)
        *plan, length = shape.cell
        for shorter in range(length, -1, -1):
            cell = self.cells.get((*plan, shorter))
            if cell is not None:
                ratio = cell.seconds / self._linear(cell.shape)
                return float(seconds * ratio ** self._weight(cell))
        return seconds

    def _weight(self, cell: _Typical) -> float:
        """Return how much a cell's times count yet: half after some steps without another."""
        rested = self._steps - cell.seen
        return float(0.5 ** (rested / _REST))

    def _refit(self) -> None:
        """Fit relative errors by least squares, no coefficient below 0."""
        self._fitted = True
        cells = self.cells.values()
        seconds = np.array([cell.seconds for cell in cells])
        rows = np.array([cell.shape.features for cell in cells])
        rows /= seconds[:, None]
        weights = np.array([self._weight(cell) for cell in cells])
        weights = np.maximum(0.01, weights)
        gram = (rows * weights[:, None]).T @ rows
        scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
        gram /= np.outer(scale, scale)
        root = np.linalg.cholesky(gram + _RIDGE).T
        wanted = np.linalg.solve(root.T, weights @ rows / scale)
        self._fit = nnls(root, wanted)[0] / scale


# --- tokens of a step. The hazard at depth d of a tree of K paths is the chance that a path
# accepted up to depth d - 1 is accepted at depth d too.
_MEMORY = 1 - 1 / 300  # What trials keep with every step.
_PRIOR_TRIALS = 10.0  # Weight of every prior: texts differ by about as much as ten trials tell.
_FIRST_CHANCE = 0.55  # Of a first draft before any was tried (the tiny pair: 0.5 to 0.65).
_STAYING = 0.45  # Share of independent drafts, beyond the first, that each depth keeps (measured).
_RECOUNT = 4  # Steps between two estimates, which take a tenth of a small model's step.
# Of K drafts K**0.35 count as independent (the tiny pair: 0.3 at temperature 1, 0.4 at 0).
_PATHS_POWERS = np.arange(1, MAX_PATHS + 1)[:, None] ** 0.35
_INDEPENDENT: Array = 1 + (_PATHS_POWERS - 1) * _STAYING ** np.arange(MAX_DEPTH)


class Acceptance:
    """How far drafts of one kind get, by paths and depth; the prior is a ``first`` chance."""

    def __init__(self, first: float = _FIRST_CHANCE) -> None:
        self._first = first
        self._step = 0
        self._trials = np.zeros((MAX_PATHS, MAX_DEPTH))
        self._successes = np.zeros((MAX_PATHS, MAX_DEPTH))
        self.hazards = self._estimate()  # [paths, depths], as of the latest estimate

    def observe(self, *, paths: int, offered: int, accepted: int) -> None:
        """Learn from a step whose tree was ``offered`` levels deep."""
        tried = min(accepted + 1, offered)
        self._trials[paths - 1, :tried] += 1
        self._successes[paths - 1, :accepted] += 1

    def at(self, step: int) -> Self:
        """Let what was counted fade up to the planner's ``step``, and estimate anew."""
        if step - self._step >= _RECOUNT:
            kept = _MEMORY ** (step - self._step)
            self._trials *= kept
            self._successes *= kept
            self._step = step
            self.hazards = self._estimate()
        return self

    def tokens(self, limit: int = MAX_DEPTH + 1) -> Array:
        """Return ``[MAX_PATHS, MAX_DEPTH]`` float64: tokens of a step that is to commit ``limit``
        at most."""
        survival = self.hazards.cumprod(axis=1)
        survival[:, max(0, limit - 1) :] = 0.0
        return np.asarray(1 + survival.cumsum(axis=1))

    def _estimate(self) -> Array:
        """Each depth has the one above as prior, each number of paths what all tell of a depth."""
        rates = self._successes / np.maximum(self._trials, 1e-9)
        rates = np.minimum(rates, 1 - 1e-6)
        weights = self._trials.sum(axis=0)
        alone = self._trials * _any(rates, 1 / _INDEPENDENT)
        single = alone.sum(axis=0)
        chance = self._first
        chances = np.empty(MAX_DEPTH)
        for depth in range(MAX_DEPTH):
            successes = single[depth] + _PRIOR_TRIALS * chance
            chance = successes / (weights[depth] + _PRIOR_TRIALS)
            chances[depth] = chance
        prior = _any(chances, _INDEPENDENT)
        hazards = self._successes + _PRIOR_TRIALS * prior
        hazards /= self._trials + _PRIOR_TRIALS
        return np.asarray(hazards.clip(1e-6, 1 - 1e-6))


def _any(chances: Array, drafts: Array) -> Array:
    """Return the chance that any of so many independent drafts is accepted, given that of one."""
    none = np.log1p(-chances) * drafts
    return np.asarray(-np.expm1(none))


# --- the choice
_ALIKE = 2  # Like steps in a row until times are typical: the first takes up to a third longer.
_BETTER = 0.03  # Gain that a change must promise, and drafting for every fourfold batch.
_HOLD = 8  # Steps for which a choice is held: a choice takes as long as a tenth of a small step.
_PROBE = 32  # Least steps between two probes.
_REST = 400  # Steps without a plan after which its times count half, and it is worth a probe
# as if it were twice as fast.
_HORIZON = 256  # Most tokens that are expected of an answer: most end before their limit.
_KEEP = 1000  # Steps after which what was learned is kept, beside the end of a run.


@dataclass(frozen=True, slots=True)
class Scores:
    """What is expected of every plan, plain decoding first, for the requests that decode next."""

    plans: tuple[Plan, ...]  # the plans
    batch: int  # requests of the step: those that choose, and others that will decode like them
    each: Array  # [requests, plans] float64, tokens of each request in a step
    tokens: Array  # [plans] float64, tokens of the whole batch in a step
    seconds: Array  # [plans] float64, of a step
    late: Array  # [plans] float64, seconds in which drafters first read what they missed
    rates: Array  # [plans] float64, tokens a second, with that reading spread over those to come

    def __str__(self) -> str:
        order = np.argsort(-self.rates, kind="stable")
        best = order[:5].tolist()
        listed = [f"{plan_name(self.plans[n])} {self.rates[n]:.0f}" for n in best]
        return f"tokens/s expected at batch {self.batch}: {', '.join(listed)}"


class _Choice(NamedTuple):
    """A plan and its place in ``scores``, if anything is known, and why it was chosen."""

    plan: Plan
    reason: PlanReason
    why: str
    scores: Scores | None = None
    place: int = 0


class Planner:
    """Chooses plans before steps, and learns from the steps."""

    def __init__(
        self, known: KnownCosts | None = None, keep: Callable[[KnownCosts], None] | None = None
    ) -> None:
        """Start with what an earlier run learned; ``keep`` is called with what this one did."""
        known = known or KnownCosts()
        self._costs = {True: StepCosts(known.greedy), False: StepCosts(known.sampled)}
        self._keep = keep
        self._acceptance: dict[tuple[object, ...], Acceptance] = {}
        # For what requests a choice was made, the steps that are left, and its plan.
        self._held: dict[AutoPlan, tuple[tuple[int, ...], deque[_Choice]]] = {}
        self._present: dict[AutoPlan, Plan] = {}
        self._matched: dict[int, int] = {}  # of requests by number: see :meth:`assign`
        self._missed: dict[int, int] = {}
        self._steps = self._observed = self._probed = 0
        self._ran: dict[tuple[int, Plan], int] = {}  # the latest step of a plan, by size class
        self._timed: tuple[StepCosts, StepShape] | None = None
        self._latest: object = None  # what the latest step did
        self._alike = 0  # how often in a row
        self._prices: deque[float] = deque(maxlen=5)
        self.reading_seconds = 0.0  # of a missed position; 0 while too little is known
        self.why = ""  # why the latest plans were chosen, in words; empty if all were fixed

    @property
    def known(self) -> KnownCosts:
        """What was learned of costs."""
        greedy, sampled = self._costs[True], self._costs[False]
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
        fitted: Callable[[Request, Plan], Plan] = lambda _, plan: plan,
    ) -> None:
        """Give every automatic request among ``requests``, which decode next, its step's plan.

        ``others`` more will soon decode too. Functions tell how many positions a drafter is
        ``behind``, how many last tokens a lookup has ``matched``, and a plan ``fitted`` to the room
        that there is; such steps are not timed.
        """
        self._steps += 1
        self._timed = None
        self.why = ""
        self._matched = {}
        self._missed = {}
        groups: dict[AutoPlan, list[Request]] = {}
        for request in requests:
            if request.looks_up:
                self._matched[request.number] = matched(request)
            if request.auto is not None:
                self._missed[request.number] = behind(request)
                groups.setdefault(request.auto, []).append(request)
        for auto, members in groups.items():
            self._assign(auto, members, len(requests) + others, fitted)
        if self._timed is None and len(groups) != 1:
            self._latest = None

    def _assign(
        self,
        auto: AutoPlan,
        members: list[Request],
        batch: int,
        fitted: Callable[[Request, Plan], Plan],
    ) -> None:
        """Give requests of the same limits their plans, and note whether the step can be timed."""
        choice = self._next(auto, members, batch)
        self.why = choice.why
        wanted = self._look_up(choice, members)
        plans = [fitted(*pair) for pair in zip(members, wanted, strict=True)]
        for request, plan in zip(members, plans, strict=True):
            request.plan, request.plan_reason = plan, choice.reason
        if plans != wanted or len(members) != batch:
            self._latest = None
            return
        self._ran[size_class(batch), choice.plan] = self._steps
        shape = StepShape.of(plans, batch, _context(members, batch))
        costs = self._costs_of(members)
        if self._latest != (costs, shape.cell):
            self._alike = 0
        self._alike += 1
        self._latest = costs, shape.cell
        if self._alike >= _ALIKE:
            self._timed = costs, shape

    def observe_request(self, request: Request, *, offered: int, accepted: int) -> None:
        """Learn from a request's decided step, whose tree was ``offered`` levels deep."""
        if request.auto is not None and offered:
            kind = self._acceptance_of(request, request.plan)
            kind.observe(paths=request.plan.paths, offered=offered, accepted=accepted)

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
        # The least: what seems too expensive is not read, so an estimate once raised would stay.
        self.reading_seconds = min(self._prices) if len(self._prices) > 1 else 0.0

    def worth_reading(self, request: Request, *, rows: int, batch: int) -> bool:
        """Return whether a drafter should soon read ``rows`` positions of a request in a batch."""
        if request.auto is None:
            return request.drafted
        scores = self.scores([request], request.auto, batch)
        costs = self._costs_of([request])
        if scores is None or costs.untimed is not None:
            return True
        best = self._worth(scores, request.auto).argmax()
        seconds = 1 / scores.rates
        saved = float(seconds[0] - seconds[best])
        return saved > 0 and rows * self.reading_seconds <= saved * _to_come(request)

    def scores(self, members: Sequence[Request], auto: AutoPlan, batch: int) -> Scores | None:
        """Return what is expected of every plan for ``members`` of a batch; None at first."""
        costs = self._costs_of(members)
        if not costs.has(drafts=True):
            return None
        plans = (PLAIN, *auto.candidates)
        each = np.ones((len(members), len(plans)))
        for n, request in enumerate(members):
            each[n, 1:] = self._tokens(request, auto.candidates)
        tokens = each.mean(axis=0) * batch
        context = _context(members, batch)
        shapes = [StepShape.of([plan], batch, context) for plan in plans]
        seconds = costs.seconds(shapes)
        drafts = np.array([plan.speculative for plan in plans])
        missed = [self._missed.get(request.number, 0) for request in members]
        reading = self.reading_seconds * np.array(missed)
        left = np.array([_to_come(request) for request in members])
        shares = np.minimum(1.0, each / left[:, None])
        spread = drafts * (reading @ shares)
        late = drafts * reading.sum()
        rates = tokens / (seconds + spread)
        return Scores(plans, batch, each, tokens, seconds, late, rates)

    def explain(self, requests: Sequence[Request]) -> str:
        """Return in words what is expected of the best plans for the automatic ``requests``."""
        members = [request for request in requests if request.auto is not None]
        if not members or members[0].auto is None:
            return "no request leaves its plan to the engine"
        scores = self.scores(members, members[0].auto, len(requests))
        return "nothing is known yet about the cost of steps" if scores is None else str(scores)

    def _next(self, auto: AutoPlan, members: list[Request], batch: int) -> _Choice:
        """Return the held choice if it still applies to these requests, or choose anew."""
        key = (batch, *(request.number for request in members))
        held, left = self._held.get(auto, ((), deque[_Choice]()))
        if held != key or not left:
            left = deque(self._choose(auto, members, batch))
            self._held[auto] = key, left
        return left.popleft()

    def _choose(self, auto: AutoPlan, members: list[Request], batch: int) -> list[_Choice]:
        """Return steps that teach what has to be known, or some of the best plan, maybe a probe."""
        scores = self.scores(members, auto, batch)
        alone = batch == len(members)  # else the step is not timed
        untimed = self._costs_of(members).untimed
        if scores is None or (untimed is not None and alone):
            plan = PLAIN
            if untimed and alone:
                plan = auto.candidates[:2][-1]
                if scores is not None:
                    place = scores.rates[1:].argmax()
                    plan = scores.plans[1 + int(place)]
            why = f"{plan_name(plan)} has to be timed"
            return [_Choice(plan, PlanReason.LEARNING, why)] * (_ALIKE + 1)
        best = int(self._worth(scores, auto).argmax())
        plan = scores.plans[best]
        self._present[auto] = plan
        why = f"{plan_name(plan)}; {scores}"
        choice = _Choice(plan, PlanReason.BEST, why, scores, best)
        probe = self._probe(choice, scores) if alone else []
        return probe + [choice] * _HOLD

    def _worth(self, scores: Scores, auto: AutoPlan) -> Array:
        """Return rates as they compare: a change has to gain, and drafting in a large batch."""
        worth = scores.rates.copy()
        worth[1:] /= 1 + _BETTER * size_class(scores.batch) / 2
        present = self._present.get(auto, PLAIN)
        worth[scores.plans.index(present)] *= 1 + _BETTER
        return worth

    def _probe(self, best: _Choice, scores: Scores) -> list[_Choice]:
        """Return steps of another plan, if any has rested for so long that it is worth a try."""
        rested = self._steps - self._probed
        if rested < _PROBE:
            return []
        size = size_class(scores.batch)
        ran = [self._ran.get((size, plan), 0) for plan in scores.plans]
        age = self._steps - np.array(ran)
        seconds = _ALIKE * scores.seconds + scores.late
        rates = _ALIKE * scores.tokens / seconds
        worth = rates * (1 + age / _REST)
        worth[best.place] = 0
        n = int(worth.argmax())
        if rates[n] * (1 + rested / _REST) < scores.rates[best.place]:
            return []
        self._probed = self._steps
        plan = scores.plans[n]
        why = f"{plan_name(plan)} has not run for {age[n]} steps; {scores}"
        probe = _Choice(plan, PlanReason.PROBE, why, scores, n)
        return [probe] * _ALIKE

    def _look_up(self, choice: _Choice, members: list[Request]) -> list[Plan]:
        """Return the requests' plans, with lookups where they promise more.

        If steps as chosen commit r tokens a second, a lookup of d nodes is worth its tokens less
        r d node, and going on as chosen those of that less r times the request's share of drafting.
        """
        plans, scores = [choice.plan] * len(members), choice.scores
        if choice.reason is not PlanReason.BEST or scores is None:
            return plans
        seconds = scores.seconds[choice.place]
        rate = scores.tokens[choice.place] / seconds
        share = (seconds - scores.seconds[0]) / scores.batch
        costs = self._costs_of(members)
        node = costs.node_seconds(_context(members, 1))
        for n, request in enumerate(members):
            if request.auto is not None and self._matched.get(request.number):
                lookups = request.auto.lookups
                depths = np.array([plan.depth for plan in lookups])
                worth = self._tokens(request, lookups) - rate * node * depths
                best = int(worth.argmax())
                if worth[best] > scores.each[n, choice.place] - rate * share:
                    plans[n] = lookups[best]
        return plans

    def _costs_of(self, members: Sequence[Request]) -> StepCosts:
        return self._costs[all(request.params.greedy for request in members)]

    def _tokens(self, request: Request, plans: tuple[Plan, ...]) -> Array:
        """Return ``[plans]`` float64: tokens that a request should commit by each plan."""
        acceptance = self._acceptance_of(request, plans[0]).at(self._steps)
        tokens = acceptance.tokens(_to_come(request))
        paths = [plan.paths - 1 for plan in plans]
        depths = [plan.depth - 1 for plan in plans]
        return np.asarray(tokens[paths, depths])

    def _acceptance_of(self, request: Request, plan: Plan) -> Acceptance:
        """Return what is known of drafts by a class of temperatures, or of lookups by one of
        matches: greedy, then steps of a half; 1, 2-3, 4-7, ... tokens."""
        lookup = plan.source is Source.LOOKUP
        matched = self._matched.get(request.number, 0).bit_length()
        kind = matched if lookup else math.ceil(2 * min(2.5, request.params.temperature))
        key = lookup, kind, plan.draft_temperature
        if key not in self._acceptance:
            # After m repeated tokens, the prior chance that the next repeats too is m / (m + 1).
            first = 1 / (1 + 2.0 ** (1 - matched)) if lookup else _FIRST_CHANCE
            self._acceptance[key] = Acceptance(first)
        return self._acceptance[key]


def _context(members: Sequence[Request], batch: int) -> int:
    """Return the KV slots that a batch of requests like these attends to, all together."""
    return sum(request.context for request in members) * batch // len(members)


def _to_come(request: Request) -> int:
    """Return how many tokens a request is expected to commit until it ends."""
    left = request.max_tokens - len(request.token_ids)
    return max(1, min(left, _HORIZON))
