"""Choice of the plan of each request's next step, where the user leaves it to the engine.

    estimator   seconds of a step (StepCosts) and tokens that it commits (Acceptance)
    scores      tokens a second of every plan, for the requests that decode next
    selector    the best plan, held for some steps; now and then a probe of another one

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
from scipy.special import expit, logit

from eaglegbv.config import MAX_DEPTH, MAX_PATHS, PLAIN, AutoPlan, Plan, Source, plan_name
from eaglegbv.request import PlanReason, Request

Array: TypeAlias = NDArray[np.float64]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
# Steps timed together: size class, paths, depth (or class of looked-up nodes), class of contexts.
Cell: TypeAlias = tuple[int, int, int, int]

# Estimator: seconds of a step. A linear fit tells what was never run; what was run is corrected by
# its own latest times, because a machine is not linear.
_GAIN = 1 / 8  # Share of a step's time in what is typical: times vary by 5%, their mean by 1%.
_STALE = 300  # Steps after which a time counts half: changes last longer.
_PACE = 0.15  # Share of a surprise that is blamed on the machine, which other programs slow down.
_PACE_KEPT = 0.95  # A slow minute passes; what lasts fifty steps is blamed on the plan.
_SURPRISE = 0.35  # Largest log that chance or a slow minute explains: a busy machine takes twice.
# Steps of one request, path or length cannot tell some costs apart: on most machines a further
# request costs little, so that counts as a cost of the step, of a level or of a node.
_RIDGE = 1e-3 * np.diag((1.0, 20.0, 20.0, 1.0, 1.0, 20.0, 3.0, 20.0))


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
        drafting = requests if len(drafts) == len(plans) else len(drafts)
        paths, depth = (drafts[0].paths, drafts[0].depth) if drafts else (0, 0)
        return cls(requests, context, drafting, paths, depth, looked_up)

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
        length = (self.context // self.requests // 512).bit_length()
        return size_class(self.requests), self.paths, depth, length


def size_class(requests: int) -> int:
    """Return the class of a batch size: 1, 2, 3-4, 5-8, 9-16, ..."""
    return (requests - 1).bit_length()


class Measured(msgspec.Struct, frozen=True, array_like=True):
    """A step that was timed: its shape and its seconds."""

    shape: StepShape
    seconds: Annotated[float, msgspec.Meta(gt=0, le=3600)]


class KnownCosts(msgspec.Struct, frozen=True):
    """Steps timed by an earlier run or beforehand: at temperature 0, and at others."""

    greedy: tuple[Measured, ...] = ()
    sampled: tuple[Measured, ...] = ()


@dataclass(slots=True)
class _Typical:
    """A cell's latest shape and its typical seconds; the logarithm of their ratio to the fit."""

    shape: StepShape
    seconds: float
    log: float = 0.0
    count: int = 0  # own times in it; 0 if it was recorded
    seen: int = 0  # step of the latest one
    slow: bool = False  # whether that one was much slower

    def move(self, by: float) -> None:
        self.log += by
        self.seconds *= math.exp(by)


class StepCosts:
    """Learns from steps what steps cost."""

    def __init__(self, recorded: Sequence[Measured] = ()) -> None:
        """Start from recorded steps; the first own time of a cell replaces its recorded one."""
        self.cells = {step.shape.cell: _Typical(step.shape, step.seconds) for step in recorded}
        self._fit = np.zeros(len(_RIDGE))
        self._pace = 0.0
        self._now = self._fitted = 0  # times seen, and those of them in the latest fit
        if recorded:
            self._refit()

    def observe(self, shape: StepShape, seconds: float) -> float:
        """Learn from a step that took ``seconds``, more than 0; return the log that surprises."""
        self._now += 1
        if not self.cells:
            self._fit[0] = seconds
        linear = self._linear([shape]).item()
        log = math.log(seconds / linear) - self._pace
        if shape.cell not in self.cells:
            usual = seconds / math.exp(self._pace)
            self.cells[shape.cell] = _Typical(shape, usual, log, 1, self._now)
            return 0.0
        cell = self.cells[shape.cell]
        surprise = log - cell.log
        limited = max(-_SURPRISE, min(_SURPRISE, surprise))
        self._pace = _PACE_KEPT * self._pace + _PACE * limited
        # A step may be held up, neither sped up nor held up twice: all that rested believe that.
        slow, cell.slow = cell.slow, surprise > 2 * _SURPRISE
        news = surprise < -_SURPRISE or (slow and cell.slow)
        if news and shape.paths and cell.count != 1:  # a single time may have been held up
            for place, other in self.cells.items():
                rested = place[0] != shape.cell[0] or self._now - other.seen > _HOLD
                other.move(surprise if place[1] and rested and other is not cell else 0.0)
        cell.shape, cell.seconds = shape, linear * math.exp(cell.log)
        if news or not cell.slow:
            first = news or not cell.count or self._now - cell.seen > _STALE
            cell.move(surprise if first else max(_GAIN, 1 / (cell.count + 1)) * limited)
            cell.count = 1 if first else cell.count + 1
        cell.seen = self._now
        return surprise - limited

    def seconds(self, shapes: Sequence[StepShape]) -> Array:
        """Return ``[shapes]`` float64: expected seconds; at least one step was observed."""
        if self._fitted < self._now:
            self._refit()
        logs = np.array([self._correction(shape) for shape in shapes])
        return np.asarray(self._linear(shapes) * np.exp(logs + self._pace))

    def node_seconds(self, context: float) -> float:
        """Return the seconds of a further node that looks at ``context`` slots."""
        return float(self._fit[-2] + self._fit[-1] * context / 1024) * math.exp(self._pace)

    @property
    def known(self) -> tuple[Measured, ...]:
        """What was learned, at the machine's usual pace: one step of every cell."""
        return tuple(Measured(cell.shape, cell.seconds) for cell in self.cells.values())

    def _weight(self, cell: _Typical) -> float:
        return float(0.5 ** ((self._now - cell.seen) / _STALE))

    def _correction(self, shape: StepShape) -> float:
        size, paths, depth, length = shape.cell
        own = (self.cells.get((size, paths, depth, n)) for n in range(length, -1, -1))
        cell = next(filter(None, own), _Typical(shape, 0.0))
        count = cell.count or _ALIKE  # recorded ones were measured twice
        return cell.log * self._weight(cell) * count / (count + 2)

    def _linear(self, shapes: Sequence[StepShape]) -> Array:
        return np.maximum(1e-9, np.array([shape.features for shape in shapes]) @ self._fit)

    def _refit(self) -> None:
        """Fit relative errors by least squares, no coefficient below 0; cells' seconds stay."""
        self._fitted = self._now
        cells = list(self.cells.values())
        shapes = [cell.shape for cell in cells]
        seconds = np.array([cell.seconds for cell in cells])
        weights = np.array([max(0.01, self._weight(cell)) for cell in cells])
        rows = np.array([shape.features for shape in shapes]) / seconds[:, None]
        gram = (rows * weights[:, None]).T @ rows
        scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
        root = np.linalg.cholesky(gram / np.outer(scale, scale) + _RIDGE).T
        self._fit = nnls(root, np.linalg.solve(root.T, weights @ rows / scale))[0] / scale
        for cell, log in zip(cells, np.log(seconds / self._linear(shapes)).tolist(), strict=True):
            cell.log = log


# Estimator: tokens of a step. The hazard at depth d of a tree of K paths is the chance that a path
# accepted up to depth d - 1 is accepted at depth d too.
# What trials keep with every step: a few hundred decide; a longer run, their prior, remembers.
_MEMORIES = np.array((1 - 1 / 200, 1 - 1 / 1000))[:, None, None, None]
_PRIOR_TRIALS = 10.0  # Weight of every prior: texts differ by about as much as ten trials tell.
_FIRST_CHANCE = 0.55  # Of a first draft before any was tried (the tiny pair: 0.5 to 0.65).
_STAYING = 0.45  # Share of independent drafts, beyond the first, that each depth keeps (measured).
_TEXT_MEMORY = 1 - 1 / 60  # What is known of a request and kept with every step: a text has parts.
_TEXT_VARIANCE = 0.35  # Of the log-odds among texts (MT-Bench); a Newton step tells one's own.
_RECOUNT = 4  # Steps between two estimates, which take a tenth of a small model's step.
# Of K drafts K**0.35 count as independent (the tiny pair: 0.3 at temperature 1, 0.4 at 0).
_PATHS_POWERS = np.arange(1, MAX_PATHS + 1)[:, None] ** 0.35
_INDEPENDENT: Array = 1 + (_PATHS_POWERS - 1) * _STAYING ** np.arange(MAX_DEPTH)


class Acceptance:
    """How far drafts of one kind get, by paths and depth; the prior is a ``first`` chance."""

    def __init__(self, first: float = _FIRST_CHANCE) -> None:
        self._first, self._step = first, 0
        # [latest and long run, trials and successes, paths, depths]
        self._counts = np.zeros((2, 2, MAX_PATHS, MAX_DEPTH))
        self.hazards = self._estimate()  # [paths, depths], as of the latest count

    def observe(self, *, paths: int, offered: int, accepted: int) -> Array:
        """Learn from a step; return accepted less expected drafts, and sum h (1 - h) of hazards."""
        tried = min(accepted + 1, offered)
        self._counts[:, 0, paths - 1, :tried] += 1
        self._counts[:, 1, paths - 1, :accepted] += 1
        expected = self.hazards[paths - 1, :tried]
        return np.array((accepted - expected.sum(), expected @ (1 - expected)))

    def count(self, step: int) -> Self:
        """Let what was counted fade up to the planner's ``step``, and estimate anew."""
        if step - self._step >= _RECOUNT:
            self._counts *= _MEMORIES ** (step - self._step)
            self._step = step
            self.hazards = self._estimate()
        return self

    def tokens(self, shift: float = 0.0, limit: int = MAX_DEPTH + 1) -> Array:
        """Return ``[MAX_PATHS, MAX_DEPTH]`` tokens of a step, at log-odds shifted by ``shift``."""
        survival = expit(logit(self.hazards) + shift).cumprod(axis=1)
        survival[:, max(0, limit - 1) :] = 0.0
        return np.asarray(1 + survival.cumsum(axis=1))

    def _estimate(self) -> Array:
        """Each depth has the one above as prior, each number of paths its depth, now the past."""
        (trials, successes), (long_trials, long_successes) = self._counts
        rates = np.minimum(long_successes / np.maximum(long_trials, 1e-9), 1 - 1e-6)
        pooled = (long_trials * _any(rates, 1 / _INDEPENDENT)).sum(axis=0).tolist()
        chances, chance, prior = [], self._first, _PRIOR_TRIALS
        for total, weight in zip(pooled, long_trials.sum(axis=0).tolist(), strict=True):
            chance = (total + prior * chance) / (weight + prior)
            chances.append(chance)
        usual = long_successes + prior * _any(np.array(chances), _INDEPENDENT)
        usual /= long_trials + prior
        surplus, information = (successes - trials * usual).sum(), trials * usual * (1 - usual)
        # What these steps show of some plans and depths is true of those that rested.
        usual = expit(logit(usual) + surplus / (information.sum() + 1 / _TEXT_VARIANCE))
        hazards = (successes + prior * usual) / (trials + prior)
        return np.asarray(hazards.clip(1e-6, 1 - 1e-6))


def _any(chances: Array, drafts: Array) -> Array:
    """Return the chance that any of so many independent drafts is accepted, given that of one."""
    return np.asarray(-np.expm1(np.log1p(-chances) * drafts))


_ALIKE = 2  # Like steps in a row until times are typical: the first takes up to a third longer.
_BETTER = 0.03  # Gain that a change must promise, and drafting for every fourfold batch.
_HOLD = 8  # Steps for which a choice is held: a choice takes as long as a tenth of a small step.
_LONGEST_HOLD = 32  # The same if it is made again, and least steps between two probes.
_BUDGET = 0.006  # Share of the time that probes may cost; with what they learn, below 1%.
_RETRY = 500  # Steps of rest that make a plan as worth a probe as one of twice its rate.
_RELEARNED = 100  # Own times after which new costs are kept in place of those dropped.
_READING_SHARE = 0.1  # Of the time that drafting should save, what reading a prompt may cost.
_READ_ROWS = 32  # Positions that must be read at once to tell their price.
_USUAL_ROWS = 9  # Most positions that a drafter reads in a usual step, after a path of 8 tokens.
_HORIZON = 256  # Most tokens over which reading missed positions is spread: answers end early.


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
        best = np.argsort(-self.rates, kind="stable")[:5].tolist()
        listed = ", ".join(f"{plan_name(self.plans[n])} {self.rates[n]:.0f}" for n in best)
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
        known = len({step.shape.cell[1:3] for step in recorded}) > 1
        self.guess: StepCosts | None = StepCosts(recorded) if known else None
        self.lessons = 4  # at most, to confirm a guess: a draft, plain decoding, and both again
        self.step = self.probed = self.learned = 0  # this step, the latest probe and lessons
        self.latest: dict[tuple[int, ...], int] = {}  # by cell, of any context: its latest step
        # By size class: the plan that was best last, and the seconds a token that it saves.
        self.present: dict[int, tuple[Plan, float]] = {}
        self._surprises: tuple[deque[float], ...] = deque(maxlen=9), deque(maxlen=9)
        self._keep, self._until_kept = keep, 0

    def present_at(self, size: int) -> tuple[Plan, float] | None:
        """Return what was best last at a size class or the nearest; None at first."""
        nearest = min(self.present, key=lambda known: (abs(known - size), known), default=None)
        return None if nearest is None else self.present[nearest]

    @property
    def lesson(self) -> bool | None:
        """Whether a draft has to be timed, or plain decoding (False); None if neither has to."""
        if self.guess is not None:
            return self.lessons % 2 == 0 if self.lessons else None
        timed = {paths > 0 for _, paths, *_ in self.costs.cells}
        return next((drafts for drafts in (True, False) if drafts not in timed), None)

    def observe(self, shape: StepShape, seconds: float) -> bool:
        """Learn a time; confirm or drop kept costs once plain steps and drafts were timed twice."""
        cell = self.costs.cells.get(shape.cell)
        often = cell is not None and cell.count > 1  # a single time may have been held up
        surprise = self.costs.observe(shape, seconds)
        self._until_kept -= 1
        if not self._until_kept:
            self._keep()
        if (guess := self.guess) is not None:
            self._surprises[bool(shape.paths)].append(math.log(seconds / guess.seconds([shape])[0]))
            if min(map(len, self._surprises)) >= _ALIKE:
                logs = [float(np.median(own)) for own in self._surprises]
                if self.lessons and abs(logs[1] - logs[0]) > _SURPRISE:  # pace changed between
                    self._surprises = deque(maxlen=9), deque(maxlen=9)
                    return True
                self.guess = None
                if max(map(abs, logs)) > _SURPRISE:  # of what has not run, proportions are kept
                    shapes = [step.shape for step in guess.known]
                    by = np.exp([logs[shape.paths > 0] for shape in shapes])
                    new = map(Measured, shapes, (by * guess.seconds(shapes)).tolist())
                    timed = (cell for cell in self.costs.cells.values() if cell.count)
                    own = [Measured(cell.shape, cell.seconds) for cell in timed]
                    self.costs, self._until_kept = StepCosts([*new, *own]), _RELEARNED
                    return True
        elif surprise < 0 and shape.paths and often and self.step - self.learned > _RETRY:
            self.costs = StepCosts([step for step in self.costs.known if not step.shape.paths])
            self.learned = self.step
        return surprise != 0 and self.guess is None


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
        # Of requests by number: see :meth:`assign`; and how their texts differ from their kind.
        self._matched, self._missed = dict[int, int](), dict[int, int]()
        self._texts: dict[int, Array] = {}
        self._timed: tuple[_Book, StepShape] | None = None
        self._kind: tuple[_Book, Cell] | None = None  # what the latest step did, if one thing
        self._alike = self._now = 0  # how often in a row, and this step
        self._prices: deque[float] = deque(maxlen=5)
        self.reading_seconds = 0.0  # of a missed position; 0 while too little is known
        self.why = ""  # why the latest plans were chosen, in words; empty if all were fixed

    @property
    def known(self) -> KnownCosts:
        """What was learned of costs."""
        return KnownCosts(*(self._books[greedy].costs.known for greedy in (True, False)))

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
        self._timed, self.why, kind = None, "", None
        self._now += 1
        self._matched = {r.number: matched(r) for r in requests if r.looks_up}
        missed = {r.number: behind(r) for r in requests if r.auto is not None}
        self._missed = {n: rows for n, rows in missed.items() if rows > _USUAL_ROWS}
        batch = len(requests) + others
        texts, self._texts = self._texts, {}
        groups: dict[AutoPlan, list[Request]] = {}
        for request in requests:
            if request.auto is not None:
                groups.setdefault(request.auto, []).append(request)
                self._texts[request.number] = _TEXT_MEMORY * texts.get(request.number, np.zeros(2))
        for auto, members in groups.items():
            book = self._book(members)
            choice = self._next(book, auto, members, batch)
            wanted = self._look_up(book, choice, members)
            plans = [fitted(*pair) for pair in zip(members, wanted, strict=True)]
            for request, plan in zip(members, plans, strict=True):
                request.plan, request.plan_reason = plan, choice.reason
            self.why = choice.why
            shape = StepShape.of(plans, batch, _context(members, batch))
            book.step += 1
            if plans == wanted and len(members) == batch:
                book.latest[shape.cell[:3]] = book.step
                kind = book, shape.cell
                self._alike = self._alike + 1 if kind == self._kind else 1
                late = shape.drafting and any(r.number in self._missed for r in members)
                self._timed = (book, shape) if self._alike >= _ALIKE and not late else None
        self._kind = kind

    def observe_request(self, request: Request, *, offered: int, accepted: int) -> None:
        """Learn from a request's decided step, whose tree was ``offered`` levels deep."""
        if request.auto is not None and offered:
            kind, paths = self._acceptance_of(request, request.plan), request.plan.paths
            learned = kind.observe(paths=paths, offered=offered, accepted=accepted)
            if request.plan.asks_drafter:  # a match says how far lookups get, whatever the text
                self._texts[request.number] = self._texts.get(request.number, 0.0) + learned

    def observe_step(self, seconds: float) -> None:
        """Learn the time of the step whose plans were assigned last."""
        if self._timed is not None and self._timed[0].observe(self._timed[1], seconds):
            self._held.clear()  # what was chosen no longer holds

    def observe_reading(self, rows: int, seconds: float) -> None:
        """Learn the time drafters took to read ``rows`` positions that they had missed."""
        if rows >= _READ_ROWS:
            self._prices.append(seconds / rows)
        # The least: what seems too expensive is not read, so an estimate once raised would stay.
        self.reading_seconds = min(self._prices) if len(self._prices) > 1 else 0.0

    def worth_reading(self, request: Request, *, rows: int, batch: int) -> bool:
        """Return whether a drafter should soon read ``rows`` positions of a request in a batch."""
        if request.auto is None:
            return request.drafted
        present = self._book([request]).present_at(size_class(batch))
        saved = _to_come(request) * (present[1] if present else math.inf)  # unknown at first
        return saved > 0 and rows * self.reading_seconds <= _READING_SHARE * saved

    def scores(self, members: Sequence[Request], auto: AutoPlan, batch: int) -> Scores | None:
        """Return what is expected of every plan for ``members`` of a batch; None at first."""
        book, plans = self._book(members), (PLAIN, *auto.candidates)
        if all(place[1:3] != (0, 0) for place in book.costs.cells):
            return None
        each = np.array([[1.0, *self._tokens(own, auto.candidates)] for own in members])
        context = _context(members, batch)
        seconds = book.costs.seconds([StepShape.of([plan], batch, context) for plan in plans])
        drafts = np.array([plan.speculative for plan in plans])
        reading = self.reading_seconds * np.array([self._missed.get(r.number, 0) for r in members])
        spread = drafts * (reading @ np.minimum(1.0, each / [[_to_come(r)] for r in members]))
        tokens, late = each.mean(axis=0) * batch, drafts * reading.sum()
        return Scores(plans, batch, each, tokens, seconds, late, tokens / (seconds + spread))

    def explain(self, requests: Sequence[Request]) -> str:
        """Return in words what is expected of the best plans for the automatic ``requests``."""
        members = [request for request in requests if request.auto is not None]
        if not members or members[0].auto is None:
            return "no request leaves its plan to the engine"
        scores = self.scores(members, members[0].auto, len(requests))
        return "nothing is known yet about the cost of steps" if scores is None else str(scores)

    def _next(self, book: _Book, auto: AutoPlan, members: list[Request], batch: int) -> _Choice:
        """Return the held choice if it still applies to these requests, or choose anew."""
        key = (batch, *(request.number for request in members))
        before, plan, length, left = self._held.get(auto, ((), PLAIN, 0, deque[_Choice]()))
        if before != key or not left:
            choice = self._choose(book, auto, members, batch)
            best = choice.reason is PlanReason.BEST
            probe = self._probe(book, choice) if best and batch == len(members) else []
            again = before == key and plan == choice.plan
            length = min(_LONGEST_HOLD, 2 * length) if again else _HOLD
            left = deque([*probe, *[choice] * (length if best else _ALIKE + 1)])
            self._held[auto] = key, choice.plan, length, left
        return left.popleft()

    def _choose(self, book: _Book, auto: AutoPlan, members: list[Request], batch: int) -> _Choice:
        """Return what teaches most while too little is known, then the best plan."""
        scores = self.scores(members, auto, batch)
        lesson, timed = book.lesson, batch == len(members)  # without others that take part
        if scores is None or (lesson is not None and (timed or book.guess is None)):
            draft = auto.candidates[:2][-1]
            if scores is not None and book.guess is not None:
                draft = scores.plans[1 + int(scores.rates[1:].argmax())]
            plan = draft if lesson and timed else PLAIN
            book.lessons = max(0, book.lessons - timed)
            return _Choice(plan, PlanReason.LEARNING, f"{plan_name(plan)} has to be timed")
        size, worth = size_class(batch), scores.rates.copy()
        present = book.present_at(size)
        stay = scores.plans.index(present[0]) if present and present[0] in scores.plans else 0
        worth[1:] /= 1 + _BETTER * size / 2
        worth[stay] *= 1 + _BETTER
        best = int(worth.argmax())
        book.present[size] = scores.plans[best], float(1 / scores.rates[0] - 1 / scores.rates[best])
        plan = scores.plans[best]
        return _Choice(plan, PlanReason.BEST, f"{plan_name(plan)}; {scores}", scores, best)

    def _probe(self, book: _Book, best: _Choice) -> list[_Choice]:
        """Return steps of a plan worth a try, if its loss is saved up; rest makes it worth more."""
        scores, rested = best.scores, book.step - book.probed
        if scores is None or rested < _LONGEST_HOLD:
            return []
        loss = scores.late + _ALIKE * (scores.seconds - scores.tokens / scores.rates[best.place])
        cells = [StepShape.of([plan], scores.batch, 0).cell[:3] for plan in scores.plans]
        age = np.array([book.step - book.latest.get(cell, 0) for cell in cells])
        worth = scores.rates * (1 + age / _RETRY)
        worth[best.place] = 0
        n = int(worth.argmax())
        if loss[n] > _BUDGET * rested * scores.seconds[best.place]:
            return []
        book.probed = book.step
        why = f"{plan_name(scores.plans[n])} has not run for {age[n]} steps; {scores}"
        return [_Choice(scores.plans[n], PlanReason.PROBE, why, scores, n)] * _ALIKE

    def _look_up(self, book: _Book, choice: _Choice, members: list[Request]) -> list[Plan]:
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
        for n, request in enumerate(members):
            if request.auto is not None and self._matched.get(request.number):
                lookups = request.auto.lookups
                depths = np.array([plan.depth for plan in lookups])
                worth = self._tokens(request, lookups) - rate * node * depths
                if worth.max() > scores.each[n, choice.place] - rate * share:
                    plans[n] = lookups[int(worth.argmax())]
        return plans

    def _book(self, members: Sequence[Request]) -> _Book:
        return self._books[all(request.params.greedy for request in members)]

    def _tokens(self, request: Request, plans: tuple[Plan, ...]) -> Array:
        """Return ``[plans]`` float64: tokens that a request should commit by each plan."""
        left = request.max_tokens - len(request.token_ids)
        surplus, information = self._texts.get(request.number, np.zeros(2)).tolist()
        shift = surplus / (information + 1 / _TEXT_VARIANCE) if plans[0].asks_drafter else 0.0
        tokens = self._acceptance_of(request, plans[0]).count(self._now).tokens(shift, left)
        return np.array([tokens[p.paths - 1, p.depth - 1] for p in plans])

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
    return max(1, min(request.max_tokens - len(request.token_ids), _HORIZON))
