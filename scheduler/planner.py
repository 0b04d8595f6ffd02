"""Choice of the plan of each request's next step, where the user leaves it to the engine.

    estimator   seconds of a step (StepCosts) and tokens that it commits (Acceptance)
    scores      tokens a second of every plan, for the requests that decode next
    selector    the best plan, held for some steps; now and then a probe of another one

All automatic requests of a step draft by one plan, as they would by a fixed one; plain decoding is
one of the plans. At temperature 0 a request whose text repeats itself may look its draft up
instead, which is decided in every step.

Losslessness: a step's plan is settled before anything of that step is drawn. It depends on
committed tokens, on acceptances of earlier steps and on measured times, all of them in the past;
and given any past, a step of any plan follows the target's distribution. The planner never looks
at what is drafted in the step or not yet verified.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, Self, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from eaglegbv.config import MAX_DEPTH, MAX_PATHS, PLAIN, AutoPlan, Plan, Source, plan_name
from eaglegbv.request import PlanReason, PlanState, Request

Array: TypeAlias = NDArray[np.float64]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Cell: TypeAlias = tuple[int, int, int]
"""Steps timed together: class of batch sizes, paths, and depth (or class of looked-up nodes)."""

# Estimator: seconds of a step. A linear fit tells what was never run; what was run is corrected by
# the median of its own latest times, because a machine is not linear.

_SAMPLES = 15  # Latest times of a cell: their median is within 2% where single times vary by 5%.
_STALE = 150  # Steps in its class of sizes after which a time counts half: changes last longer.
_PACE = 0.15  # Share of a surprise that is blamed on the machine, which other programs slow down.
_PACE_KEPT = 0.95  # A slow minute passes; what lasts fifty steps is blamed on the plan.
_SURPRISE = 0.35  # Largest log of a surprise believed at once: a program may be held up a second.
_REFIT = 8  # Times between two fits, which take as long as a tenth of a small model's step.
# Steps of one request, path or length cannot tell some costs apart: on most machines a further
# request or node costs little, so these count as costs of the step, of a level or of a node.
_RIDGE = 1e-3 * np.diag((1.0, 20.0, 20.0, 1.0, 1.0, 20.0, 5.0, 20.0))


class StepShape(msgspec.Struct, frozen=True, array_like=True):
    """What decides the cost of a step: requests, the KV slots they attend to all together, how many
    of them draft, paths and depth of each draft, and nodes of looked-up drafts all together."""

    requests: Annotated[int, msgspec.Meta(ge=1)]
    context: Count
    drafting: Count = 0
    paths: Count = 0
    depth: Count = 0
    looked_up: Count = 0

    @classmethod
    def of(cls, plans: Sequence[Plan], requests: int, context: int) -> "StepShape":
        """Return the shape of a step by ``plans``; a single one is that of all requests."""
        drafts = [plan for plan in plans if plan.asks_drafter]
        looked_up = sum(plan.depth for plan in plans if plan.source is Source.LOOKUP)
        if not drafts:
            return cls(requests, context, looked_up=looked_up)
        drafting = requests if len(drafts) == len(plans) else len(drafts)
        return cls(requests, context, drafting, drafts[0].paths, drafts[0].depth, looked_up)

    @property
    def features(self) -> tuple[float, ...]:
        """What the fit multiplies: a step, its requests, their context in units of 1024 tokens; and
        of drafts a step, its levels, requests, nodes, and looks of the nodes at contexts."""
        nodes = self.drafting * self.paths * self.depth + self.looked_up
        context, drafts = self.context / 1024, min(1, self.drafting)
        looks, levels = nodes * context / self.requests, drafts * self.depth
        return 1, self.requests, context, drafts, levels, self.drafting, nodes, looks

    @property
    def cell(self) -> Cell:
        """The cell by whose times it is corrected."""
        depth = self.depth if self.drafting else self.looked_up.bit_length()
        return size_class(self.requests), self.paths, depth


def size_class(requests: int) -> int:
    """Return the class of a batch size: 1, 2, 3-4, 5-8, 9-16, ..."""
    return (requests - 1).bit_length()


def _key(shape: StepShape) -> tuple[int, int, int, int]:
    """Return a step's cell, and the class of its contexts: below 512 tokens, 1024, 2048, ..."""
    return *shape.cell, (shape.context // shape.requests // 512).bit_length()


class Measured(msgspec.Struct, frozen=True, array_like=True):
    """A step that was timed: its shape and its seconds."""

    shape: StepShape
    seconds: Annotated[float, msgspec.Meta(gt=0, le=3600)]


class KnownCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Steps timed by an earlier run or beforehand: at temperature 0, and at others."""

    greedy: tuple[Measured, ...] = ()
    sampled: tuple[Measured, ...] = ()


@dataclass(slots=True)
class _Times:
    """Times of a cell by step: logarithms of their ratios to the fit, less ``offset``."""

    shape: StepShape
    recorded: bool
    slow: bool = False
    offset: float = 0.0
    samples: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))

    @property
    def typical(self) -> float:
        """The median, of two the smaller: one of the first two steps may be held up."""
        logs = sorted(log for _, log in self.samples)
        return self.offset + logs[(len(logs) - 1) // 2]

    def weight(self, now: int) -> float:
        return float(0.5 ** ((now - self.samples[-1][0]) / _STALE))


class StepCosts:
    """Learns from steps what steps cost."""

    def __init__(self, recorded: Sequence[Measured] = ()) -> None:
        """Start from recorded steps; the first own time of a cell replaces its recorded one."""
        self._cells: dict[tuple[int, ...], _Times] = {}
        self._fit = np.zeros(len(_RIDGE))
        self._pace = 0.0
        self._now: Counter[int] = Counter()  # by class of sizes: others say little about it
        self._unfitted = 0
        for step in recorded:
            self._note(step.shape, step.seconds, recorded=True)
        if recorded:
            self._refit()

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step that took ``seconds``, more than 0."""
        self._now[shape.cell[0]] += 1
        self._unfitted += 1
        times = self._cells.get(_key(shape))
        if times is not None:
            surprise = math.log(seconds / self.seconds([shape]).item())
            self._pace *= _PACE_KEPT
            self._pace += _PACE * max(-_SURPRISE, min(_SURPRISE, surprise))
            # A step may be held up, but not sped up, nor held up twice: then times before are void,
            # and what one plan shows is true of all that draft and have rested.
            slow, times.slow = times.slow, surprise > 2 * _SURPRISE
            news = len(times.samples) > 1 and (surprise < -_SURPRISE or (slow and times.slow))
            if news and shape.paths:
                size, now = shape.cell[0], self._now[shape.cell[0]]
                for key, other in self._cells.items():
                    rested = key[0] != size or now - other.samples[-1][0] > _REFIT
                    other.offset += surprise if key[1] and rested and other is not times else 0.0
            if news or times.recorded:
                times.recorded = False
                times.samples.clear()
            while times.samples and times.samples[0][0] < self._now[shape.cell[0]] - _STALE:
                times.samples.popleft()
        self._note(shape, seconds / math.exp(self._pace), recorded=False)
        if times is None or self._unfitted >= _REFIT:
            self._refit()

    def seconds(self, shapes: Sequence[StepShape]) -> Array:
        """Return ``[shapes]`` float64: expected seconds; at least one step was observed."""
        logs = np.array([self._correction(shape) for shape in shapes])
        return np.asarray(self._linear(shapes) * np.exp(logs + self._pace))

    def node_seconds(self, context: float) -> float:
        """Return the seconds of a further node that looks at ``context`` slots."""
        return float(self._fit[-2] + self._fit[-1] * context / 1024) * math.exp(self._pace)

    def knows(self) -> set[tuple[int, int]]:
        """Return paths and depths of the plans that were timed or recorded, in any batch."""
        return {(paths, depth) for _, paths, depth, _ in self._cells}

    @property
    def known(self) -> tuple[Measured, ...]:
        """What was learned, at the machine's usual pace: one step of every cell."""
        cells = self._cells.values()
        linear = self._linear([times.shape for times in cells])
        seconds = (linear * np.exp([times.typical for times in cells])).tolist()
        return tuple(Measured(t.shape, s) for t, s in zip(cells, seconds, strict=True))

    def _note(self, shape: StepShape, seconds: float, *, recorded: bool) -> None:
        if not self._cells:
            self._fit[0] = seconds
        times = self._cells.setdefault(_key(shape), _Times(shape, recorded))
        times.shape = shape
        log = math.log(seconds / self._linear([shape]).item())
        times.samples.append((self._now[shape.cell[0]], log - times.offset))

    def _correction(self, shape: StepShape) -> float:
        size, paths, depth, length = _key(shape)
        # Shorter contexts tell most about longer ones, plain decoding about lookups.
        shapes = [(paths, depth)] if paths else [(0, depth), (0, 0)]
        keys = [(size, *shape, n) for shape in shapes for n in range(length, -1, -1)]
        times = next((self._cells[key] for key in keys if key in self._cells), None)
        if times is None:
            return 0.0
        count = len(times.samples)
        return times.typical * times.weight(self._now[size]) * count / (count + 1)

    def _linear(self, shapes: Sequence[StepShape]) -> Array:
        rows = np.array([shape.features for shape in shapes]).reshape(-1, len(_RIDGE))
        return np.maximum(1e-9, rows @ self._fit)

    def _refit(self) -> None:
        """Fit relative errors by least squares, no coefficient below 0; cells' estimates stay."""
        self._unfitted = 0
        cells, sized = list(self._cells.values()), [(c[0], t) for c, t in self._cells.items()]
        shapes = [times.shape for times in cells]
        before = self._linear(shapes)
        seconds = before * np.exp([times.typical for times in cells])
        # Old times keep a little weight, where newer ones say nothing about a feature.
        weights = np.array([max(0.01, times.weight(self._now[size])) for size, times in sized])
        rows = np.array([shape.features for shape in shapes]) / seconds[:, None]
        gram = (rows * weights[:, None]).T @ rows
        scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
        root = np.linalg.cholesky(gram / np.outer(scale, scale) + _RIDGE).T
        self._fit = nnls(root, np.linalg.solve(root.T, weights @ rows / scale))[0] / scale
        for times, moved in zip(cells, np.log(before / self._linear(shapes)), strict=True):
            times.offset += float(moved)


# Estimator: tokens of a step. The hazard at depth d of a tree of K paths is the chance that a path
# accepted up to depth d - 1 is accepted at depth d too.

_MEMORY = 1 - 1 / 200  # What trials keep with every step: a few hundred steps decide.
_LONG_MEMORY = 1 - 1 / 1000  # Of the long run, their prior, so that a few probes show a change.
_PRIOR_TRIALS = 10.0  # Weight of every prior: texts differ by about as much as ten trials tell.
_FIRST_CHANCE = 0.55  # Of a first draft before any was tried (the tiny pair: 0.5 to 0.65).
_RISE = 0.15  # Of the log-odds with each depth: an accepted path is one of an easy text (measured).
_STAYING = 0.45  # Share of independent drafts, beyond the first, that each depth keeps (measured).
_REQUEST_MEMORY = 1 - 1 / 60  # What a request's trials keep with every step: a text has parts.
_SHIFT_VARIANCE = 0.35  # Of the log-odds among texts (MT-Bench, the tiny pair).
_RECOUNT = 4  # Steps between two estimates, which take half a millisecond.
# Of K drafts K**e count as independent: few of a confident drafter, all of an uncertain one. The
# prior of e is normal around the tiny pair's, 0.3 at temperature 1 and 0.4 at 0.
_EXPONENTS = np.array([0.2, 0.35, 0.5, 0.75, 1.0])
_PRIOR_OF_EXPONENTS = -((_EXPONENTS - 0.35) ** 2) / (2 * 0.1)
_PATHS_POWERS = np.arange(1, MAX_PATHS + 1)[:, None] ** _EXPONENTS[:, None, None]
_INDEPENDENT: Array = 1 + (_PATHS_POWERS - 1) * _STAYING ** np.arange(MAX_DEPTH)


@dataclass(slots=True)
class RequestMemory(PlanState):
    """How a request differs from its kind, by its trials up to its ``step``: accepted less expected
    drafts, and the sum of h (1 - h) of their expected chances h; and its latest lookup's match."""

    score: float = 0.0
    information: float = 0.0
    step: int = 0
    matched: int = 0

    @classmethod
    def of(cls, request: Request) -> "RequestMemory":
        """Return what is known of a request; it fades, even while nothing is drafted."""
        if request.plan_state is None:
            request.plan_state = cls()
        memory = request.plan_state
        if not isinstance(memory, cls):
            raise TypeError(f"request {request.number} belongs to another planner")
        kept = _REQUEST_MEMORY ** (request.step - memory.step)
        memory.score, memory.information = kept * memory.score, kept * memory.information
        memory.step = request.step
        return memory

    @property
    def shift(self) -> float:
        """Difference of log-odds, a posteriori by one Newton step from 0."""
        return self.score / (self.information + 1 / _SHIFT_VARIANCE)


class Acceptance:
    """How far drafts of one kind get, by paths and depth."""

    def __init__(self, first: float = _FIRST_CHANCE, memory: float = _LONG_MEMORY) -> None:
        """Start with the chance of a first draft; ``memory`` is that of the long run."""
        self._first = first
        self._memories = np.array((_MEMORY, memory))[:, None, None, None]
        # [latest and long run, trials and successes, paths, depths]
        self._counts = np.zeros((2, 2, MAX_PATHS, MAX_DEPTH))
        self._uncounted: list[tuple[int, int, int, float]] = []
        self._step = 0
        self.hazards = self._estimate()
        """``[MAX_PATHS, MAX_DEPTH]`` float64, as of the latest :meth:`count`."""

    def observe(self, memory: RequestMemory, *, paths: int, offered: int, accepted: int) -> None:
        """Learn from a decided step of ``offered`` levels of the request of ``memory``."""
        tried = min(accepted + 1, offered)
        expected = self.hazards[paths - 1, :tried].tolist()
        # However long one text is, it says little about others.
        weight = 1 / (1 + _SHIFT_VARIANCE * memory.information)
        memory.score += accepted - sum(expected)
        memory.information += sum(h * (1 - h) for h in expected)
        self._uncounted.append((paths - 1, tried, accepted, weight))

    def count(self, step: int) -> Self:
        """Count what was observed up to the planner's ``step``, and let older counts fade."""
        if step - self._step >= _RECOUNT:
            self._counts *= self._memories ** (step - self._step)
            self._step = step
            for row, tried, accepted, weight in self._uncounted:
                self._counts[:, 0, row, :tried] += weight
                self._counts[:, 1, row, :accepted] += weight
            self._uncounted.clear()
            self.hazards = self._estimate()
        return self

    def tokens(self, shift: float = 0.0, limit: int = MAX_DEPTH + 1) -> Array:
        """Return ``[MAX_PATHS, MAX_DEPTH]`` tokens of a step, at log-odds shifted by ``shift``."""
        survival = self.hazards / (self.hazards + (1 - self.hazards) * math.exp(-shift))
        survival = survival.cumprod(axis=1)
        survival[:, max(0, limit - 1) :] = 0.0
        return np.asarray(1 + survival.cumsum(axis=1))

    def _estimate(self) -> Array:
        """Each depth has the one above as prior, each number of paths its depth, now the past."""
        (trials, successes), (long_trials, long_successes) = self._counts
        rates = np.minimum(long_successes / np.maximum(long_trials, 1e-9), 1 - 1e-6)
        # The likeliest exponent, by the trials at depth 1.
        drafts, weights, prior = _INDEPENDENT[:, :, 0], long_trials[:, 0], _PRIOR_TRIALS
        firsts = _any(rates[:, 0], 1 / drafts) @ weights + prior * self._first
        hoped = _any(firsts[:, None] / (weights.sum() + prior), drafts).clip(1e-6, 1 - 1e-6)
        likelihood = np.log(hoped) @ long_successes[:, 0] + _PRIOR_OF_EXPONENTS
        likelihood += np.log1p(-hoped) @ (weights - long_successes[:, 0])
        independent = _INDEPENDENT[int(likelihood.argmax())]
        pooled = (long_trials * _any(rates, 1 / independent)).sum(axis=0).tolist()
        chances, chance = [], self._first
        for total, weight in zip(pooled, long_trials.sum(axis=0).tolist(), strict=True):
            chance = (total + prior * chance) / (weight + prior)
            chances.append(chance)
            chance = chance / (chance + (1 - chance) * math.exp(-_RISE))
        usual = long_successes + prior * _any(np.array(chances), independent)
        hazards = (successes + prior * usual / (long_trials + prior)) / (trials + prior)
        return np.asarray(hazards.clip(1e-6, 1 - 1e-6))


def _any(chances: Array, drafts: Array) -> Array:
    """Return the chance that any of so many independent drafts is accepted, given that of one."""
    return np.asarray(-np.expm1(np.log1p(-chances) * drafts))


# Scores, and the selector.

_ALIKE = 2  # Like steps in a row until times are typical: the first takes up to a third longer.
_TRIED = 3  # Steps in which plain decoding, and a plan that drafts, first run at a new batch size.
_HOPELESS = 0.6  # Share of the best expected rate below which no plan is tried so.
_BETTER = 1.03  # Gain that a change must promise: the best of thirty estimates is too high.
_PAYS = 0.03  # More that drafting must gain per doubling of the batch, whose requests end apart.
_HOLD = 8  # Steps for which a choice is held: a choice takes as long as a tenth of a small step.
_LONGEST_HOLD = 32  # The same if it is made again: with most probes two holds apart.
_BUDGET = 0.006  # Share of the time that probes may cost; with what they learn, below 1%.
_SAVED_STEPS = 1000  # Steps over which it may be saved up: a change is found within as many.
_PROBE_EVERY = 32  # Least steps between probes, so that most steps are alike and timed.
_RETRY = 500  # Steps of rest that make a plan as worth a probe as one of twice its rate.
_DISAGREE = math.log(1.4)  # Kept costs are dropped beyond: less is soon corrected, busy is twice.
_RELEARNED = 100  # Own times after which new costs are kept in place of those dropped.
_READING_SHARE = 0.1  # Of the time that drafting should save, what reading a prompt may cost.
_READ_ROWS = 32  # Positions that must be read at once to tell their price.
_HORIZON = 256  # Most tokens over which reading missed positions is spread: answers end early.


@dataclass(frozen=True, slots=True)
class Scores:
    """What is expected of every plan, plain decoding first, for the requests that decode next."""

    plans: tuple[Plan, ...]  # the plans
    # Requests of the step: those that choose, and others that will soon decode like them.
    batch: int
    each: Array  # [requests, plans] float64, tokens of each request in a step
    seconds: Array  # [plans] float64, of a step
    late: Array  # [plans] float64, seconds in which drafters first read what they missed
    spread: Array  # [plans] float64, the same seconds, spread over the tokens to come

    @property
    def tokens(self) -> Array:
        """``[plans]`` float64: tokens of the whole batch in a step."""
        return np.asarray(self.each.mean(axis=0) * self.batch)

    @property
    def rates(self) -> Array:
        """``[plans]`` float64: tokens a second."""
        return np.asarray(self.tokens / (self.seconds + self.spread))

    def __str__(self) -> str:
        rates = self.rates
        best = np.argsort(-rates, kind="stable")[:5].tolist()
        listed = ", ".join(f"{plan_name(self.plans[n])} {rates[n]:.0f}" for n in best)
        return f"tokens/s expected at batch {self.batch}: {listed}"


class _Choice(NamedTuple):
    """A plan and its place in ``scores``, if anything is known, and why it was chosen."""

    plan: Plan
    reason: PlanReason
    why: str
    scores: Scores | None = None
    place: int = 0


class _Book:
    """What is known about steps of one kind of sampling, greedy or not, and what was tried."""

    def __init__(self, recorded: Sequence[Measured], keep: Callable[[], None]) -> None:
        self.costs = StepCosts(recorded)
        self.step = self.probed = 0
        self.credit = 0.0
        self.ran: Counter[Cell] = Counter()
        self.latest: dict[Cell, int] = {}
        self.lessons: Counter[Plan] = Counter()
        # By size class: the plan that was best last, and the seconds a token that it saves.
        self.present: dict[int, tuple[Plan, float]] = {}
        self.guess = StepCosts(recorded) if recorded else None
        self._own: list[Measured] = []
        self._keep, self._keep_at = keep, 0

    def present_at(self, size: int) -> tuple[Plan, float] | None:
        """Return what was best last at a size class or the nearest; None at first."""
        nearest = min(self.present, key=lambda known: (abs(known - size), known), default=None)
        return None if nearest is None else self.present[nearest]

    def note(self, choice: _Choice, shape: StepShape, *, whole: bool) -> None:
        """Count the step about to run; where others take part it says nothing of its plan."""
        self.step += 1
        if whole:
            self.ran[shape.cell] += 1
            self.latest[shape.cell] = self.step
        if choice.scores is not None:
            own = _BUDGET * float(choice.scores.seconds[choice.place])
            self.credit = min(self.credit + own, max(self.credit, own * _SAVED_STEPS))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn a time; confirm or drop kept costs once plain steps and drafts were timed twice."""
        self.costs.observe(shape, seconds)
        self._own.append(Measured(shape, seconds))
        if self.guess is None:
            if len(self._own) == self._keep_at:
                self._keep()
            del self._own[_RELEARNED:]
            return
        expected = self.guess.seconds([step.shape for step in self._own]).tolist()
        steps = list(zip(self._own, expected, strict=True))
        logs = [
            [math.log(step.seconds / usual) for step, usual in steps if bool(step.shape.paths) is d]
            for d in (False, True)
        ]
        if min(map(len, logs)) >= _ALIKE:
            self.guess = None
        if any(len(own) >= _ALIKE and abs(float(np.median(own))) > _DISAGREE for own in logs):
            self.guess = None
            self.costs, self._keep_at = StepCosts(), _RELEARNED
            for step in self._own:
                self.costs.observe(step.shape, step.seconds)


class Planner:
    """Chooses plans before steps, and learns from the steps."""

    def __init__(
        self, known: KnownCosts | None = None, keep: Callable[[KnownCosts], None] | None = None
    ) -> None:
        """Start with kept costs, a guess; ``keep`` is called with new ones if they were wrong."""
        known = known or KnownCosts()
        write = (lambda: keep(self.known)) if keep is not None else lambda: None
        self._books = {True: _Book(known.greedy, write), False: _Book(known.sampled, write)}
        self._acceptance: dict[tuple[object, ...], Acceptance] = {}
        # What a choice was made for, its plan, the steps it is held, and those that are left.
        self._held: dict[AutoPlan, tuple[tuple[int, ...], Plan, int, deque[_Choice]]] = {}
        self._timed: tuple[_Book, StepShape] | None = None
        # What the latest step did, if all its requests did the same, and how often in a row.
        self._kind: tuple[_Book, Cell] | None = None
        self._alike = self._now = 0
        self._prices: deque[float] = deque(maxlen=5)
        self.why = ""
        """Why the plans of the latest step were chosen, in words; empty if all were fixed."""

    @property
    def known(self) -> KnownCosts:
        """What was learned of costs."""
        greedy, sampled = (self._books[kind].costs.known for kind in (True, False))
        return KnownCosts(greedy=greedy, sampled=sampled)

    def assign(
        self,
        requests: Sequence[Request],
        *,
        others: int = 0,
        behind: Callable[[Request], int] = lambda _: 0,
        matched: Callable[[Request], int] = lambda _: 0,
    ) -> None:
        """Give every automatic request among ``requests`` the plan of its next step.

        Args:
            requests: The requests that decode next.
            others: Number of requests that take part in the step without decoding. They will decode
                soon, so a plan has to pay in the batch that all of them make together.
            behind: Number of committed positions that a request's drafter has not run yet.
            matched: Number of tokens at the end of a request's text that a lookup finds before.
        """
        self._timed, self.why, kind = None, "", None
        self._now += 1
        batch = len(requests) + others
        groups: dict[AutoPlan, list[Request]] = {}
        for request in requests:
            if request.auto is not None:
                groups.setdefault(request.auto, []).append(request)
        for auto, members in groups.items():
            book, whole = self._book(members), len(members) == batch
            # A usual step of a drafter reads a few positions anyway.
            missed = [rows if rows > 1 + auto.max_depth else 0 for rows in map(behind, members)]
            choice = self._next(book, auto, members, batch, missed)
            plans = self._look_up(book, auto, choice, members, matched)
            for request, plan in zip(members, plans, strict=True):
                request.plan, request.plan_reason = plan, choice.reason
            self.why = choice.why
            shape = StepShape.of(plans, batch, _context(members, batch))
            book.note(choice, shape, whole=whole)
            if whole:
                kind = book, shape.cell
                self._alike = self._alike + 1 if kind == self._kind else 1
                late = any(m for m, plan in zip(missed, plans, strict=True) if plan.asks_drafter)
                if self._alike >= _ALIKE and not late:
                    self._timed = book, shape
        self._kind = kind

    def observe_request(self, request: Request, *, offered: int, accepted: int) -> None:
        """Learn from a request's decided step, whose tree was ``offered`` levels deep."""
        if request.auto is None or not offered:
            return
        memory, plan = RequestMemory.of(request), request.plan
        if plan.source is Source.LOOKUP:  # the match says how far it gets, whatever the request
            memory = RequestMemory()
        kind = self._acceptance_of(request, plan)
        kind.observe(memory, paths=plan.paths, offered=offered, accepted=accepted)

    def observe_step(self, seconds: float) -> None:
        """Learn the time of the step whose plans were assigned last."""
        if self._timed is not None:
            book, shape = self._timed
            book.observe(shape, seconds)

    def observe_reading(self, rows: int, seconds: float) -> None:
        """Learn the time drafters took to read ``rows`` positions that they had missed."""
        if rows >= _READ_ROWS:
            self._prices.append(seconds / rows)

    @property
    def reading_seconds(self) -> float:
        """Seconds in which a drafter reads a missed position; 0 while too little is known."""
        # The least of the latest: what seems too expensive is not read, so an estimate raised by
        # one slow reading could never fall again.
        return min(self._prices) if len(self._prices) > 1 else 0.0

    def worth_reading(self, request: Request, *, rows: int, batch: int) -> bool:
        """Return whether a request's drafter should read ``rows`` positions before it drafts.

        The request soon decodes in a batch of ``batch``. Where no request drafts, reading can wait.
        Where some do, reading a long prompt may not pay for a short answer: its end is enough.
        """
        if request.auto is None:
            return request.drafted
        present = self._book([request]).present_at(size_class(batch))
        if present is None:  # nothing is known yet
            return True
        saved = _to_come(request) * present[1]
        return saved > 0 and rows * self.reading_seconds <= _READING_SHARE * saved

    def scores(
        self, members: Sequence[Request], auto: AutoPlan, batch: int, missed: Sequence[int] = ()
    ) -> Scores | None:
        """Return what is expected of every plan within ``auto``; None while nothing is known.

        ``members`` of a batch of ``batch`` requests choose; their drafters first have to read
        ``missed`` positions each, by default none.
        """
        book, plans = self._book(members), (PLAIN, *auto.candidates)
        if (0, 0) not in book.costs.knows():
            return None
        each = np.ones((len(members), len(plans)))
        each[:, 1:] = [self._tokens(request, auto.candidates) for request in members]
        shapes = [StepShape.of([plan], batch, _context(members, batch)) for plan in plans]
        reading = self.reading_seconds * np.array(missed or [0] * len(members))
        drafts = np.array([plan.speculative for plan in plans])
        to_come = np.array([_to_come(request) for request in members])
        spread = drafts * (reading @ np.minimum(1.0, each / to_come[:, None]))
        seconds = book.costs.seconds(shapes)
        return Scores(plans, batch, each, seconds, drafts * reading.sum(), spread)

    def explain(self, requests: Sequence[Request]) -> str:
        """Return in words what is expected of the best plans for the automatic ``requests``."""
        members = [request for request in requests if request.auto is not None]
        if not members or members[0].auto is None:
            return "no request leaves its plan to the engine"
        scores = self.scores(members, members[0].auto, len(requests))
        return "nothing is known yet about the cost of steps" if scores is None else str(scores)

    def _next(
        self, book: _Book, auto: AutoPlan, members: list[Request], batch: int, missed: list[int]
    ) -> _Choice:
        """Return the held choice if it still applies to these requests, or choose anew."""
        key = (batch, *(request.number for request in members))
        before, plan, length, left = self._held.get(auto, ((), PLAIN, 0, deque[_Choice]()))
        if before != key or not left:
            choice = self._choose(book, auto, members, batch, missed)
            again = before == key and plan == choice.plan and length >= _HOLD
            length = min(_LONGEST_HOLD, 2 * length) if again else _HOLD
            length = length if choice.reason is PlanReason.BEST else _TRIED
            probe = self._probe(book, choice) if batch == len(members) else []
            left = deque([*probe, *[choice] * length])
            self._held[auto] = key, choice.plan, length, left
        return left.popleft()

    def _choose(
        self, book: _Book, auto: AutoPlan, members: list[Request], batch: int, missed: list[int]
    ) -> _Choice:
        """Return what teaches most while too little is known, then the best plan."""
        whole, size = batch == len(members), size_class(batch)
        scores = self.scores(members, auto, batch, missed)
        # A step that others take part in cannot be timed.
        lessons, known = _lessons(auto), book.costs.knows()
        unknown = [
            p
            for p in lessons
            if StepShape.of([p], 1, 0).cell[1:] not in known and book.lessons[p] < 2 * _TRIED
        ]
        unknown = unknown if whole and len(known) < len(lessons) else []
        if scores is None or unknown:
            plan = unknown[0] if unknown else PLAIN
            book.lessons[plan] += _TRIED
            why, place = f"{plan_name(plan)} was never timed", (PLAIN, *auto.candidates).index(plan)
            return _Choice(plan, PlanReason.LEARNING, why, scores, place)
        rates = scores.rates
        drafting = 1 + int(rates[1:].argmax())
        drafted = sum(n for (own, paths, _), n in book.ran.items() if own == size and paths)
        at_once = scores.tokens / (scores.seconds + scores.late)
        for n, tried in ((0, book.ran[size, 0, 0]), (drafting, drafted)):
            worth = not n or book.guess is not None or at_once[n] > _HOPELESS * rates.max()
            if whole and tried < _TRIED and worth:
                why = f"{plan_name(scores.plans[n])} has hardly run at this batch; {scores}"
                return _Choice(scores.plans[n], PlanReason.LEARNING, why, scores, n)
        present, pays = book.present_at(size), _BETTER + _PAYS * size
        if present is not None and present[0] in scores.plans[1:]:
            stay, pays = scores.plans.index(present[0]), 1 + _PAYS * size
            drafting = drafting if rates[drafting] > _BETTER * rates[stay] else stay
        best = drafting if rates[drafting] > pays * rates[0] else 0
        book.present[size] = scores.plans[best], float(1 / rates[0] - 1 / rates[best])
        why = f"{plan_name(scores.plans[best])}; {scores}"
        return _Choice(scores.plans[best], PlanReason.BEST, why, scores, best)

    def _probe(self, book: _Book, best: _Choice) -> list[_Choice]:
        """Return steps of another plan that is worth a try, once its expected loss is saved up.

        A plan is the more worth a try the longer it has not run, so none is given up for good.
        """
        scores = best.scores
        due = book.step - book.probed >= _PROBE_EVERY
        if best.reason is not PlanReason.BEST or scores is None or not due:
            return []
        rates, seconds = scores.rates, scores.seconds
        loss = scores.late + _ALIKE * (seconds - scores.tokens / rates[best.place])
        cells = [StepShape.of([plan], scores.batch, 0).cell for plan in scores.plans]
        age = np.array([book.step - book.latest.get(cell, 0) for cell in cells])
        worth = rates * (1 + age / _RETRY)
        worth[loss > _BUDGET * _SAVED_STEPS * seconds[best.place]] = 0
        worth[best.place] = 0
        n = int(worth.argmax())
        if not worth[n] or loss[n] > book.credit:
            return []
        book.credit -= max(0.0, float(loss[n]))
        book.probed = book.step
        why = f"{plan_name(scores.plans[n])} has not run for {age[n]} steps; {scores}"
        return [_Choice(scores.plans[n], PlanReason.PROBE, why, scores, n)] * _ALIKE

    def _look_up(
        self,
        book: _Book,
        auto: AutoPlan,
        choice: _Choice,
        members: list[Request],
        matched: Callable[[Request], int],
    ) -> list[Plan]:
        """Return the requests' plans, with lookups where they promise more.

        If steps as chosen commit r tokens a second, a lookup of d nodes is worth its tokens less
        r d node, and going on as chosen those of that less r times the request's share of drafting.
        """
        plans, scores = [choice.plan] * len(members), choice.scores
        if choice.reason is not PlanReason.BEST or scores is None:
            return plans
        rate = scores.tokens[choice.place] / scores.seconds[choice.place]
        share = (scores.seconds[choice.place] - scores.seconds[0]) / scores.batch
        node = book.costs.node_seconds(_context(members, 1))
        depths = np.array([plan.depth for plan in auto.lookups])
        for n, request in enumerate(members):
            count = matched(request) if request.looks_up else 0
            if count:
                RequestMemory.of(request).matched = count
                tokens = self._tokens(request, auto.lookups)
                worth = tokens - rate * node * depths
                if worth.max() > scores.each[n, choice.place] - rate * share:
                    plans[n] = auto.lookups[int(worth.argmax())]
        return plans

    def _book(self, members: Sequence[Request]) -> _Book:
        return self._books[all(request.params.greedy for request in members)]

    def _tokens(self, request: Request, plans: tuple[Plan, ...]) -> Array:
        """Return ``[plans]`` float64: tokens that a request should commit by each plan."""
        lookup = plans[:1] and plans[0].source is Source.LOOKUP
        shift = 0.0 if lookup else RequestMemory.of(request).shift
        left = request.max_tokens - len(request.token_ids)
        tables: dict[float, Array] = {}
        for plan in plans:
            if plan.draft_temperature not in tables:
                kind = self._acceptance_of(request, plan).count(self._now)
                tables[plan.draft_temperature] = kind.tokens(shift, left)
        return np.array([tables[p.draft_temperature][p.paths - 1, p.depth - 1] for p in plans])

    def _acceptance_of(self, request: Request, plan: Plan) -> Acceptance:
        """Return what is known of drafts by a class of temperatures, or of lookups by one of
        matches: greedy, then steps of a half; 1, 2-3, 4-7, ... tokens."""
        lookup, temperature = plan.source is Source.LOOKUP, request.params.temperature
        kind = 0 if temperature == 0 else 1 + min(4, math.floor(temperature * 2))
        matched = RequestMemory.of(request).matched.bit_length() if lookup else 0
        key = lookup, matched or kind, plan.draft_temperature
        if key not in self._acceptance:
            # After m repeated tokens, the prior chance that the next repeats too is m / (m + 1).
            # A lookup that was left costs so little that it is soon tried again.
            first = 1 / (1 + 2.0 ** (1 - matched))
            self._acceptance[key] = Acceptance(first, _MEMORY) if lookup else Acceptance()
        return self._acceptance[key]


def _lessons(auto: AutoPlan) -> tuple[Plan, ...]:
    """Return what the first steps run if no costs are known: drafts of three shapes, and none."""
    plans = sorted(auto.candidates, key=lambda plan: (plan.paths, plan.depth))
    lone = [plan for plan in plans if plan.paths == plans[0].paths]
    middle = plans[len(plans) // 2 + len(lone) // 2 - len(lone)]
    return tuple(dict.fromkeys((middle, lone[len(lone) // 4], lone[-1], PLAIN)))


def _context(members: Sequence[Request], batch: int) -> int:
    """Return the KV slots that a batch of requests like these attends to, all together."""
    return sum(request.context for request in members) * batch // len(members)


def _to_come(request: Request) -> int:
    """Return how many tokens a request is expected to commit until it ends."""
    return max(1, min(request.max_tokens - len(request.token_ids), _HORIZON))
