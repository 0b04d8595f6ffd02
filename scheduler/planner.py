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
from typing import Annotated, TypeAlias

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
_STALE = 400  # Steps after which a time counts half and gives way to a newer one: some minutes.
_PACE = 0.15  # Share of a surprise that is blamed on the machine, which other programs slow down.
_PACE_KEPT = 0.98  # A slow minute passes; what lasts a hundred steps is blamed on the plan.
_SURPRISE = 0.35  # Largest log of a surprise believed at once: a program may be held up a second.
_REFIT = 8  # Times between two fits, which take as long as a tenth of a small model's step.
# Steps of one request, path or length cannot tell some costs apart: on most machines a further
# request or node costs little, so these count as costs of the step, of a level or of a node.
_RIDGE = 1e-3 * np.diag((1.0, 20.0, 20.0, 1.0, 1.0, 20.0, 5.0, 20.0))


class StepShape(msgspec.Struct, frozen=True, array_like=True):
    """What decides the cost of a step.

    Attributes:
        requests: Requests in the batch.
        context: KV slots they attend to, all together.
        drafting: Requests that draft.
        paths: Paths each of those drafts; 0 where none drafts.
        depth: Tokens of a path.
        looked_up: Nodes of looked-up drafts of the other requests, all together.
    """

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
        """What the fit multiplies; contexts count in units of 1024 tokens.

        A step, its requests and context; of drafts: a step, its levels, requests, nodes, and looks
        of the nodes at contexts.
        """
        nodes = self.drafting * self.paths * self.depth + self.looked_up
        context, drafts = self.context / 1024, min(1, self.drafting)
        looks = nodes * context / self.requests
        levels = drafts * self.depth
        return 1, self.requests, context, drafts, levels, self.drafting, nodes, looks

    @property
    def cell(self) -> Cell:
        """The cell by whose times it is corrected."""
        depth = self.depth if self.drafting else self.looked_up.bit_length()
        return size_class(self.requests), self.paths, depth


def size_class(requests: int) -> int:
    """Return the class of a batch size: 1, 2, 3-4, 5-8, 9-16, ..."""
    return (requests - 1).bit_length()


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
    offset: float = 0.0
    samples: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))

    @property
    def typical(self) -> float:
        """The median, of two the smaller: one of the first two steps may be held up."""
        logs = sorted(log for _, log in self.samples)
        return self.offset + logs[(len(logs) - 1) // 2]

    def weight(self, now: int) -> float:
        return 0.5 ** ((now - self.samples[-1][0]) / _STALE)


class StepCosts:
    """Learns from steps what steps cost."""

    def __init__(self, recorded: Sequence[Measured] = ()) -> None:
        """Start from recorded steps; the first own time of a cell replaces its recorded one."""
        self._cells: dict[Cell, _Times] = {}
        self._fit = np.zeros(len(_RIDGE))
        self._pace = 0.0
        self._now = self._unfitted = 0
        for step in recorded:
            self._note(step.shape, step.seconds, recorded=True)
        if recorded:
            self._refit()

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step that took ``seconds``, more than 0."""
        self._now += 1
        self._unfitted += 1
        times = self._cells.get(shape.cell)
        if times is not None:
            surprise = math.log(seconds / self.seconds([shape]).item())
            self._pace *= _PACE_KEPT
            self._pace += _PACE * max(-_SURPRISE, min(_SURPRISE, surprise))
            if times.recorded:
                times.recorded = False
                times.samples.clear()
            while times.samples and times.samples[0][0] < self._now - _STALE:
                times.samples.popleft()
        self._note(shape, seconds / math.exp(self._pace), recorded=False)
        if times is None or self._unfitted >= _REFIT:
            self._refit()

    def seconds(self, shapes: Sequence[StepShape]) -> Array:
        """Return ``[shapes]`` float64: expected seconds; at least one step was observed."""
        logs = np.array([self._correction(shape) for shape in shapes])
        result: Array = self._linear(shapes) * np.exp(logs + self._pace)
        return result

    def node_seconds(self, context: float) -> float:
        """Return the seconds of a further node that looks at ``context`` slots."""
        return float(self._fit[-2] + self._fit[-1] * context / 1024) * math.exp(self._pace)

    def knows(self, plan: Plan) -> bool:
        """Return whether steps of a plan were timed or recorded, in a batch of any size."""
        shape = StepShape.of([plan], 1, 0).cell[1:]
        return any(cell[1:] == shape for cell in self._cells)

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
        times = self._cells.setdefault(shape.cell, _Times(shape, recorded))
        times.shape = shape
        log = math.log(seconds / self._linear([shape]).item())
        times.samples.append((self._now, log - times.offset))

    def _correction(self, shape: StepShape) -> float:
        size, paths, _ = shape.cell
        # A size of lookups that was never run takes the correction of plain decoding.
        times = self._cells.get(shape.cell) or (None if paths else self._cells.get((size, 0, 0)))
        if times is None:
            return 0.0
        count = len(times.samples)
        return times.typical * times.weight(self._now) * count / (count + 1)

    def _linear(self, shapes: Sequence[StepShape]) -> Array:
        rows = np.array([shape.features for shape in shapes]).reshape(-1, len(_RIDGE))
        result: Array = np.maximum(1e-9, rows @ self._fit)
        return result

    def _refit(self) -> None:
        """Fit relative errors by least squares, no coefficient below 0; cells' estimates stay."""
        self._unfitted = 0
        cells = list(self._cells.values())
        shapes = [times.shape for times in cells]
        before = self._linear(shapes)
        seconds = before * np.exp([times.typical for times in cells])
        # Old times keep a little weight, where newer ones say nothing about a feature.
        weights = np.array([max(0.05, times.weight(self._now)) for times in cells])
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
_LONG_MEMORY = 1 - 1 / 2000  # Of the long run, their prior, so that a few probes show a change.
_PRIOR_TRIALS = 10.0  # Weight of every prior: texts differ by about as much as ten trials tell.
_FIRST_CHANCE = 0.55  # Of a first draft before any was tried (the tiny pair: 0.5 to 0.65).
_RISE = (
    0.15  # Of the log-odds with each depth: an accepted path belongs to an easy text (measured).
)
_INDEPENDENCE = 0.35  # Of K drafts K**0.35 count as independent (the tiny pair: 0.3 to 0.4).
_STAYING = (
    0.45  # Share of these, beyond the first, that remains with each further depth (measured).
)
_REQUEST_MEMORY = 1 - 1 / 60  # What a request's trials keep with every step: a text has parts.
_SHIFT_VARIANCE = 0.35  # Of the log-odds among texts (MT-Bench, the tiny pair).
_RECOUNT = 4  # Steps between two estimates, which take half a millisecond.

_INDEPENDENT: Array = 1 + (
    np.arange(1, MAX_PATHS + 1)[:, None] ** _INDEPENDENCE - 1
) * _STAYING ** np.arange(MAX_DEPTH)


@dataclass(slots=True)
class RequestMemory(PlanState):
    """How a request differs from its kind, and how much of its text's end occurred before.

    Attributes:
        score: Accepted drafts less expected ones, over its trials, as of ``step``.
        information: Sum of h (1 - h) over these trials, with h the expected chance.
        step: Its step by then.
        matched: Tokens at the text's end that the latest lookup matched.
    """

    score: float = 0.0
    information: float = 0.0
    step: int = 0
    matched: int = 0

    @classmethod
    def of(cls, request: Request) -> "RequestMemory":
        """Return what is known about a request; nothing at first."""
        if request.plan_state is None:
            request.plan_state = cls()
        if not isinstance(request.plan_state, cls):
            raise TypeError(f"request {request.number} belongs to another planner")
        return request.plan_state

    def age(self, step: int) -> "RequestMemory":
        """Let evidence fade up to a step, even while nothing is drafted."""
        kept = _REQUEST_MEMORY ** (step - self.step)
        self.score, self.information, self.step = kept * self.score, kept * self.information, step
        return self

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

    def count(self, step: int) -> None:
        """Count what was observed up to the planner's ``step``, and let older counts fade."""
        if 0 <= step - self._step < _RECOUNT:
            return
        self._counts *= self._memories ** (step - self._step)
        self._step = step
        for row, tried, accepted, weight in self._uncounted:
            self._counts[:, 0, row, :tried] += weight
            self._counts[:, 1, row, :accepted] += weight
        self._uncounted.clear()
        self.hazards = self._estimate()

    def tokens(self, paths: Array, depths: Array, *, shift: float, limit: int) -> Array:
        """Return ``[plans]`` float64: tokens that a step of each plan should commit.

        Args:
            paths: ``[plans]`` int64.
            depths: ``[plans]`` int64.
            shift: The request's shift of the log-odds.
            limit: Most tokens it may still commit, at least 1.
        """
        hazards = self.hazards[: paths.max(), : depths.max()]
        survival = (hazards / (hazards + (1 - hazards) * math.exp(-shift))).cumprod(axis=1)
        survival[:, max(0, limit - 1) :] = 0.0
        result: Array = 1 + survival.cumsum(axis=1)[paths - 1, depths - 1]
        return result

    def _estimate(self) -> Array:
        """Each depth has the one above as prior, each number of paths its depth, now the past."""
        (trials, successes), (long_trials, long_successes) = self._counts
        rates = np.minimum(long_successes / np.maximum(long_trials, 1e-9), 1 - 1e-6)
        singles = -np.expm1(np.log1p(-rates) / _INDEPENDENT)
        pooled = (long_trials * singles).sum(axis=0).tolist()
        chances, chance = [], self._first
        for total, weight in zip(pooled, long_trials.sum(axis=0).tolist(), strict=True):
            chance = (total + _PRIOR_TRIALS * chance) / (weight + _PRIOR_TRIALS)
            chances.append(chance)
            chance = chance / (chance + (1 - chance) * math.exp(-_RISE))
        prior = -np.expm1(np.log1p(-np.array(chances)) * _INDEPENDENT)
        usual = (long_successes + _PRIOR_TRIALS * prior) / (long_trials + _PRIOR_TRIALS)
        result: Array = (successes + _PRIOR_TRIALS * usual) / (trials + _PRIOR_TRIALS)
        return np.clip(result, 1e-6, 1 - 1e-6)


# Scores, and the selector.

_ALIKE = 2  # Like steps in a row until times are typical: the first takes up to a third longer.
_TRIED = 4  # Steps in which plain decoding, and a plan that drafts, first run at a new batch size.
_HOPELESS = 0.5  # Share of the best expected rate below which no plan is tried so.
_BETTER = 1.03  # Gain that a change must promise: the best of thirty estimates is too high.
_PAYS = 0.02  # More that drafting must gain per doubling of the batch, whose requests end apart.
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
    """What is expected of every plan, plain decoding first, for the requests that decode next.

    Attributes:
        plans: The plans.
        batch: Requests of the step: those that choose, and others that will soon decode like them.
        each: ``[requests, plans]`` float64, tokens of each request in a step.
        seconds: ``[plans]`` float64, of a step.
        late: ``[plans]`` float64, seconds in which drafters first read what they missed.
        spread: ``[plans]`` float64, the same seconds, spread over the tokens to come.
    """

    plans: tuple[Plan, ...]
    batch: int
    each: Array
    seconds: Array
    late: Array
    spread: Array

    @property
    def tokens(self) -> Array:
        """``[plans]`` float64: tokens of the whole batch in a step."""
        result: Array = self.each.mean(axis=0) * self.batch
        return result

    @property
    def rates(self) -> Array:
        """``[plans]`` float64: tokens a second."""
        result: Array = self.tokens / (self.seconds + self.spread)
        return result

    def __str__(self) -> str:
        rates = self.rates
        best = np.argsort(-rates, kind="stable")[:5].tolist()
        listed = ", ".join(f"{plan_name(self.plans[n])} {rates[n]:.0f}" for n in best)
        return f"tokens/s expected at batch {self.batch}: {listed}"


@dataclass(frozen=True, slots=True)
class _Choice:
    """A plan, and why it was chosen; ``index`` is its place in ``scores``, if any are known."""

    plan: Plan
    reason: PlanReason
    why: str
    scores: Scores | None = None

    @property
    def index(self) -> int:
        return self.scores.plans.index(self.plan) if self.scores else 0


@dataclass(slots=True)
class _Held:
    """Choices of the coming steps of a batch, the last of them made for ``length`` steps."""

    batch: tuple[int, ...]
    plan: Plan
    length: int
    left: deque[_Choice]


class _Book:
    """What is known about steps of one kind of sampling, greedy or not, and what was tried."""

    def __init__(self, recorded: Sequence[Measured], keep: Callable[[], None]) -> None:
        self.costs = StepCosts(recorded)
        self.step = self.probed = 0
        self.ran: Counter[Cell] = Counter()
        self.latest: dict[Cell, int] = {}
        self.present: dict[int, Plan] = {}
        self.credit = 0.0
        self._guess = StepCosts(recorded) if recorded else None
        self._own: list[Measured] = []
        self._keep, self._keep_at = keep, 0

    def present_at(self, size: int) -> Plan | None:
        """Return the plan that was best last at a size class or the nearest; None at first."""
        nearest = min(self.present, key=lambda known: (abs(known - size), known), default=None)
        return None if nearest is None else self.present[nearest]

    def note(self, choice: _Choice, shape: StepShape, *, whole: bool) -> None:
        """Count the step about to run; where others take part it says nothing of its plan."""
        self.step += 1
        if whole:
            self.ran[shape.cell] += 1
            self.latest[shape.cell] = self.step
        if choice.scores is not None:
            own = _BUDGET * float(choice.scores.seconds[choice.index])
            self.credit = min(self.credit + own, max(self.credit, own * _SAVED_STEPS))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn a time, and judge kept costs by it."""
        self.costs.observe(shape, seconds)
        self._own.append(Measured(shape, seconds))
        if self._guess is not None:
            self._judge(self._guess)
        elif len(self._own) == self._keep_at:
            self._keep()
        del self._own[_RELEARNED:]

    def _judge(self, guess: StepCosts) -> None:
        """Confirm or drop kept costs once both plain decoding and drafts were timed twice."""
        ratios: dict[bool, list[float]] = {False: [], True: []}
        expected = guess.seconds([step.shape for step in self._own]).tolist()
        for step, usual in zip(self._own, expected, strict=True):
            ratios[step.shape.drafting > 0].append(math.log(step.seconds / usual))
        if min(map(len, ratios.values())) < _ALIKE:
            return
        self._guess = None
        if any(abs(float(np.median(logs))) > _DISAGREE for logs in ratios.values()):
            self._keep_at = _RELEARNED
            self.costs = StepCosts()
            for step in self._own:
                self.costs.observe(step.shape, step.seconds)


def _nothing(_: Request) -> int:
    """Return 0: the default of counts of a request that are not known."""
    return 0


class Planner:
    """Chooses plans before steps, and learns from the steps."""

    def __init__(
        self, known: KnownCosts | None = None, keep: Callable[[KnownCosts], None] | None = None
    ) -> None:
        """Start with kept costs, which are a guess; nothing is known of acceptance.

        Args:
            known: Kept costs.
            keep: Called with what was learned if the first steps showed that ``known`` is wrong.
        """
        known = known or KnownCosts()

        def write() -> None:
            if keep is not None:
                keep(self.known)

        self._books = {True: _Book(known.greedy, write), False: _Book(known.sampled, write)}
        self._acceptance: dict[tuple[int, float], Acceptance] = {}
        self._lookups: dict[int, Acceptance] = {}
        self._held: dict[AutoPlan, _Held] = {}
        self._timed: tuple[_Book, StepShape] | None = None
        # What the latest step did, if all its requests did the same, and how often in a row.
        self._kind: tuple[_Book, Cell] | None = None
        self._alike = 0
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
        behind: Callable[[Request], int] = _nothing,
        matched: Callable[[Request], int] = _nothing,
    ) -> None:
        """Give every automatic request among ``requests`` the plan of its next step.

        Args:
            requests: The requests that decode next.
            others: Number of requests that take part in the step without decoding. They will decode
                soon, so a plan has to pay in the batch that all of them make together.
            behind: Number of committed positions that a request's drafter has not run yet.
            matched: Number of tokens at the end of a request's text that occurred before, where a
                lookup finds them; 0 where it finds none.
        """
        self._timed, self.why, kind = None, "", None
        batch = len(requests) + others
        groups: dict[AutoPlan, list[Request]] = {}
        for request in requests:
            if request.auto is not None:
                groups.setdefault(request.auto, []).append(request)
        for auto, members in groups.items():
            book, whole = self._book(members), len(members) == batch
            missed = [_missed(request, auto, behind) for request in members]
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
        plan, memory = request.plan, RequestMemory.of(request).age(request.step)
        if plan.source is Source.LOOKUP:
            # The match says how far a lookup gets, whatever the request.
            kind, memory = self._lookup(memory.matched), RequestMemory()
        else:
            kind = self._kind_of(request, plan.draft_temperature)
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
        """Seconds in which a drafter reads a missed position; 0 while too little is known.

        This is the least of the latest: positions that seem too expensive are not read, so an
        estimate raised by one slow reading could never fall again.
        """
        return min(self._prices) if len(self._prices) > 1 else 0.0

    def worth_reading(self, request: Request, *, rows: int, batch: int) -> bool:
        """Return whether the request's drafter should read ``rows`` positions before it drafts.

        Where no request drafts, reading can wait. Where some do, reading a long prompt may not pay
        for a short answer: the end of the prompt is enough to draft by.

        Args:
            request: A request that decodes soon, among ``batch`` similar ones.
            rows: Positions of its text that its drafter has not run.
            batch: Number of requests that decode together, including this one.
        """
        if request.auto is None:
            return request.drafted
        book = self._book([request])
        plan = book.present_at(size_class(batch))
        if plan is None:  # nothing is known yet
            return True
        if plan not in request.auto.candidates:
            return False
        context = batch * request.length_to_read
        shapes = [StepShape.of([p], batch, context) for p in (PLAIN, plan)]
        plain, drafting = book.costs.seconds(shapes).tolist()
        tokens = self._tokens(book, request, (plan,)).item()
        saved = min(_left(request), _HORIZON) * (plain - drafting / tokens)
        return saved > 0 and batch * rows * self.reading_seconds <= _READING_SHARE * saved

    def scores(
        self, members: Sequence[Request], auto: AutoPlan, batch: int, missed: Sequence[int] = ()
    ) -> Scores | None:
        """Return what is expected of every plan within ``auto``; None while nothing is known.

        Args:
            members: The requests that choose, of a batch of ``batch`` requests.
            auto: The limits.
            batch: See :class:`Scores`.
            missed: Positions that each one's drafter has to read first; none by default.
        """
        book, plans = self._book(members), (PLAIN, *auto.candidates)
        if not book.costs.knows(PLAIN):
            return None
        each = np.ones((len(members), len(plans)))
        each[:, 1:] = [self._tokens(book, request, auto.candidates) for request in members]
        shapes = [StepShape.of([plan], batch, _context(members, batch)) for plan in plans]
        reading = self.reading_seconds * np.array(missed or [0] * len(members))
        left = np.array([max(1, min(_left(request), _HORIZON)) for request in members])
        drafts = np.array([plan.speculative for plan in plans])
        spread = drafts * (reading @ np.minimum(1.0, each / left[:, None]))
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
        held = self._held.get(auto)
        again = held is not None and held.batch == key
        if held is None or not again or not held.left:
            choice = self._choose(book, auto, members, batch, missed)
            length = _HOLD if choice.reason is PlanReason.BEST else _ALIKE
            if held is not None and again and held.plan == choice.plan and length == _HOLD:
                length = min(_LONGEST_HOLD, 2 * held.length)
            probe = self._probe(book, choice) if batch == len(members) else []
            held = _Held(key, choice.plan, length, deque([*probe, *[choice] * length]))
            self._held[auto] = held
        return held.left.popleft()

    def _choose(
        self, book: _Book, auto: AutoPlan, members: list[Request], batch: int, missed: list[int]
    ) -> _Choice:
        """Return what teaches most while too little is known, then the best plan."""
        whole, size = batch == len(members), size_class(batch)
        scores = self.scores(members, auto, batch, missed)
        lesson = next((plan for plan in _lessons(auto) if not book.costs.knows(plan)), None)
        if scores is None or (lesson is not None and whole):
            # A step that others take part in cannot be timed.
            plan = lesson if lesson is not None and whole else PLAIN
            return _Choice(plan, PlanReason.LEARNING, f"{plan_name(plan)} was never timed", scores)
        rates = scores.rates
        drafting = 1 + int(rates[1:].argmax())
        drafted = sum(n for (own, paths, _), n in book.ran.items() if own == size and paths)
        for n, tried in ((0, book.ran[size, 0, 0]), (drafting, drafted)):
            if whole and tried < _TRIED and rates[n] > _HOPELESS * rates.max():
                why = f"{plan_name(scores.plans[n])} has hardly run at this batch; {scores}"
                return _Choice(scores.plans[n], PlanReason.LEARNING, why, scores)
        present, pays = book.present_at(size), _PAYS * size
        if present in scores.plans[1:]:
            stay, pays = scores.plans.index(present), pays + 1
            drafting = drafting if rates[drafting] > _BETTER * rates[stay] else stay
        else:
            pays += _BETTER
        best = scores.plans[drafting if rates[drafting] > pays * rates[0] else 0]
        book.present[size] = best
        return _Choice(best, PlanReason.BEST, f"{plan_name(best)}; {scores}", scores)

    def _probe(self, book: _Book, best: _Choice) -> list[_Choice]:
        """Return steps of another plan that is worth a try, once its expected loss is saved up.

        A plan is the more worth a try the longer it has not run, so none is given up for good.
        """
        scores = best.scores
        due = book.step - book.probed >= _PROBE_EVERY
        if best.reason is not PlanReason.BEST or scores is None or not due:
            return []
        rates, seconds = scores.rates, scores.seconds
        loss = scores.late + _ALIKE * (seconds - scores.tokens / rates[best.index])
        cells = [StepShape.of([plan], scores.batch, 0).cell for plan in scores.plans]
        age = np.array([book.step - book.latest.get(cell, 0) for cell in cells])
        worth = rates * (1 + age / _RETRY)
        worth[loss > _BUDGET * _SAVED_STEPS * seconds[best.index]] = 0
        worth[best.index] = 0
        n = int(worth.argmax())
        if not worth[n] or loss[n] > book.credit:
            return []
        book.credit -= max(0.0, float(loss[n]))
        book.probed = book.step
        why = f"{plan_name(scores.plans[n])} has not run for {age[n]} steps; {scores}"
        return [_Choice(scores.plans[n], PlanReason.PROBE, why, scores)] * _ALIKE

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
        rate = scores.tokens[choice.index] / scores.seconds[choice.index]
        share = (scores.seconds[choice.index] - scores.seconds[0]) / scores.batch
        node = book.costs.node_seconds(_context(members, 1))
        for n, request in enumerate(members):
            count = matched(request) if request.looks_up else 0
            if count:
                RequestMemory.of(request).matched = count
                kind = self._lookup(count)
                kind.count(book.step)
                tokens = _expected(kind, auto.lookups, shift=0.0, limit=_left(request))
                worth = tokens - rate * node * np.array([plan.depth for plan in auto.lookups])
                if worth.max() > scores.each[n, choice.index] - rate * share:
                    plans[n] = auto.lookups[int(worth.argmax())]
        return plans

    def _book(self, members: Sequence[Request]) -> _Book:
        return self._books[all(request.params.greedy for request in members)]

    def _tokens(self, book: _Book, request: Request, plans: tuple[Plan, ...]) -> Array:
        """Return ``[plans]`` float64: tokens that a request should commit by each plan."""
        shift = RequestMemory.of(request).age(request.step).shift
        tokens = np.ones(len(plans))
        for temperature in {plan.draft_temperature for plan in plans}:
            own = [n for n, plan in enumerate(plans) if plan.draft_temperature == temperature]
            kind = self._kind_of(request, temperature)
            kind.count(book.step)
            some = tuple(plans[n] for n in own)
            tokens[own] = _expected(kind, some, shift=shift, limit=_left(request))
        return tokens

    def _kind_of(self, request: Request, draft_temperature: float) -> Acceptance:
        temperature = request.params.temperature
        # Classes of temperatures: greedy, then steps of a half.
        kind = 0 if temperature == 0 else 1 + min(4, math.floor(temperature * 2))
        if (kind, draft_temperature) not in self._acceptance:
            self._acceptance[kind, draft_temperature] = Acceptance()
        return self._acceptance[kind, draft_temperature]

    def _lookup(self, matched: int) -> Acceptance:
        """Return the acceptance of lookups by matches of 1, 2-3, 4-7, ... tokens."""
        kind = matched.bit_length()
        if kind not in self._lookups:
            # After m repeated tokens, the prior chance that the next repeats too is m / (m + 1).
            least = 1 << (kind - 1)
            self._lookups[kind] = Acceptance(least / (least + 1), memory=_MEMORY)
        return self._lookups[kind]


def _expected(kind: Acceptance, plans: tuple[Plan, ...], *, shift: float, limit: int) -> Array:
    paths, depths = (np.array([getattr(p, name) for p in plans]) for name in ("paths", "depth"))
    return kind.tokens(paths, depths, shift=shift, limit=limit)


def _lessons(auto: AutoPlan) -> tuple[Plan, ...]:
    """Return what the first steps run if no costs are known: drafts of three shapes, and none."""
    plans = sorted(auto.candidates, key=lambda plan: (plan.paths, plan.depth))
    lone = [plan for plan in plans if plan.paths == plans[0].paths]
    middle = plans[len(plans) // 2 + len(lone) // 2 - len(lone)]
    return tuple(dict.fromkeys((middle, lone[len(lone) // 4], lone[-1], PLAIN)))


def _missed(request: Request, auto: AutoPlan, behind: Callable[[Request], int]) -> int:
    """Return the positions its drafter must read before it drafts, 0 if a usual step reads them."""
    rows = behind(request)
    return rows if rows > 1 + auto.max_depth else 0


def _context(members: Sequence[Request], batch: int) -> int:
    """Return the KV slots that a batch of requests like these attends to, all together."""
    return sum(request.context for request in members) * batch // len(members)


def _left(request: Request) -> int:
    """Return how many tokens a request may still commit."""
    return request.max_tokens - len(request.token_ids)
