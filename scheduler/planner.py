"""Which plan each request's next step follows, where the user leaves the choice to the engine.

Before a step, the planner knows what steps cost (:mod:`eaglegbv.scheduler.costs`) and how far
drafts get (:mod:`eaglegbv.scheduler.acceptance`). Among all plans, and for each plan among all
numbers of requests that draft by it, those with most to gain first, while the others decode
plainly, it takes the choice with the most expected tokens a second:

    rate = (requests + sum over those that draft of weight * expected accepted tokens)
           / expected seconds

Where nobody waits, the weights say who has most to come: a batch ends with its last request. Where
drafting does not pay (a large batch, a poor drafter) nobody drafts. A drafter that was left behind
has to read what it missed first; that counts as seconds, spread over the steps to come. What is
known is checked now and then by a probe, of another plan or of plain decoding, on a budget of 0.6%
of the time.

Losslessness: a step's plan is settled before anything of that step is drawn. It depends on
committed tokens, on acceptances of earlier steps and on measured times, all of them in the past;
and given any past, a step of any plan follows the target's law. What is drafted in the step, or not
yet verified, is never looked at.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from eaglegbv.auto_plan import AutoPlan, plan_name
from eaglegbv.config import PLAIN, Plan, Source
from eaglegbv.request import PlanReason, PlanState, Request
from eaglegbv.scheduler.acceptance import Acceptance, Evidence, kind_of
from eaglegbv.scheduler.choice import Choice, Options, Outlook
from eaglegbv.scheduler.costs import Array, Cell, CostTable, Ints, StepCosts, StepShape, size_class
from eaglegbv.scheduler.lookups import Lookups, look_up

_HOLD, _LONGEST_HOLD = 8, 32
"""Steps between two choices for the same requests: at first, and after many that were the same."""

_KNOWN = 2
"""Steps after which a plan counts as tried at a batch size."""

_ALIKE = 2
"""Steps alike in a row from which on their times are usual ones.

The first of them finds caches full of what others needed, and takes up to a third longer. Where
its shapes are new, memory is fetched and kernels are prepared for it besides. So probes are as many
steps, too.
"""

_PLAINLY = 6
"""Steps of plain decoding before others are chosen: what all else is measured against.

Costs measured before the first request are of made-up texts.
"""

_HOPELESS = 0.7
"""A plan that looks this bad beside others is not tried at a new batch size.

Plain decoding is, until two of its steps were timed: one may have been held up.
"""

_BETTER = 1.02
"""How much better another plan must look to replace the present one."""

_PAYS, _PAYS_BY_SIZE, _BEGINS = 1.03, 0.04, 0.04
"""How much better drafting must look than plain decoding to go on: of one request, and more with
every doubling of the batch. And how much more to begin: a drafter left behind has to catch up
first.

Requests that draft end at different times, and what is left of their batch is served at a lower
rate: where drafting looks 1% better in a batch of 8, the whole of it takes 6% longer, and where it
looks 6% better in one of 16, 14% (tiny pair, when all tokens still counted the same). And of many
plans the one that looks best is seldom as good: where drafting about pays, 18 of 100 simulated
engines lost more than 3% at 8 with 0.02 a doubling, with 0.04 seven, and the mean was the same
(tests/support/closed_batches.py).
"""

_BUDGET = 0.006
"""Share of the time that probes may lose."""

_SAVED_STEPS = 1024
"""Steps like the present one whose share probes may save up, and no more than that."""

_PROBE_EVERY, _PLAINLY_EVERY = 64, 120
"""Least number of steps from one probe to the next, and where nobody drafts.

There a probe has to read what drafters missed.
"""

_WORTH_A_PROBE = 0.8
"""A plan is probed if it looks at least this good beside the best."""

_OFTEN, _SAMPLE_EVERY = 64, 5
"""After so many steps of one kind, the time of one in five is enough.

No divisor of the steps that choices hold: of these the first takes longer, for it was chosen anew.
"""


_REQUEST_HOPE = 0.5
"""Standard errors by which what is known of a request is raised, where it decodes alone.

A text of which little is known may be an easy one, and a few steps tell. Without that, one hard
text in the beginning could keep drafting off for the next twenty texts (simulated).
"""

_HORIZON = 256
"""Tokens that a request is expected to go on for at most, whatever its limit.

What a drafter has to read is spread over them.
"""

_READING_ROWS = 32
"""Rows read at once that say something about what a row costs."""

_READINGS, _FEW_READINGS = 5, 2
"""Latest readings that are remembered, and number below which they say nothing."""

_READING_SHARE = 0.1
"""Most that the reading of a whole prompt may take of what drafting is expected to save."""


def _nothing(_: Request) -> int:
    """Say that there is none, of whatever is asked about a request."""
    return 0


@dataclass(slots=True)
class _Held:
    """A choice that goes on for some steps.

    Attributes:
        numbers: The requests it was made for.
        batch: Requests of the steps, at least those.
        choice: It.
        length: How many steps it holds.
        steps: These, and those of a probe before it.
        left: What runs in the next steps: the rest of a probe, then the choice.
    """

    numbers: list[int]
    batch: int
    choice: Choice
    length: int
    steps: int
    left: deque[Choice]

    @property
    def plainly(self) -> set[int]:
        """Requests that do not draft by it."""
        drafting = {self.numbers[place] for place in self.choice.drafting}
        return set(self.numbers) - drafting

    @property
    def past(self) -> int:
        """Steps that ran."""
        return self.steps - len(self.left)


@dataclass(slots=True)
class _Book:
    """What is known about steps of one kind of sampling, greedy or not.

    Attributes:
        costs: What they cost.
        tried: Steps of each plan at each class of batch sizes.
        latest: Number of the latest step of each plan.
        step: Steps so far.
        whole: Those of them in which nobody else took part.
        credit: Seconds that probes may lose.
        probed: Number of the step of the latest probe.
        present: What looked best last, by class of batch sizes.
        taught: Whether costs were known before the first step.
    """

    costs: StepCosts = field(default_factory=StepCosts)
    tried: Counter[Cell] = field(default_factory=Counter)
    latest: dict[Plan, int] = field(default_factory=dict)
    step: int = 0
    whole: int = 0
    credit: float = 0.0
    probed: int = 0
    present: dict[int, Plan] = field(default_factory=dict)
    taught: bool = False

    def present_at(self, size: int) -> Plan | None:
        """Return what looked best last in a class of sizes, or in the nearest; None at first."""
        nearest = min(self.present, key=lambda known: (abs(known - size), known), default=None)
        return None if nearest is None else self.present[nearest]


@dataclass(frozen=True, slots=True)
class _Timed:
    """A step whose time is a usual one, and where it belongs."""

    book: _Book
    shape: StepShape
    reason: PlanReason


@dataclass(slots=True)
class _Memory(PlanState):
    """What is known of one request.

    Attributes:
        drafts: How far its drafts got.
        matched: Of a lookup, how much of the text's end it had found.
    """

    drafts: Evidence = field(default_factory=Evidence)
    matched: int = 0


class KnownCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of steps before the first of them.

    Attributes:
        greedy: Of steps at temperature 0.
        sampled: Of others.
    """

    greedy: CostTable
    sampled: CostTable


@dataclass(slots=True)
class _Reading:
    """What a drafter takes to read a position that it missed.

    Attributes:
        latest: Seconds of a position, at the latest times that many were read at once.
    """

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_READINGS))

    @property
    def seconds(self) -> float:
        """Seconds of a position; 0 while too little is known.

        The least: what is too dear is not read, so that a price could not fall which somebody's
        hiccup had raised.
        """
        return min(self.latest) if len(self.latest) >= _FEW_READINGS else 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from ``rows`` that were read in ``seconds``."""
        self.latest.append(seconds / rows)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the planner makes of a plan, for a person to read.

    Attributes:
        plan: Its name.
        tokens: Tokens of a step, all requests together.
        seconds: Time of a step.
        rate: Tokens a second.
    """

    plan: str
    tokens: float
    seconds: float
    rate: float


class Planner:
    """Chooses plans before steps, and learns from the steps."""

    def __init__(self, known: KnownCosts | None = None) -> None:
        """Begin with what is known of costs; of acceptance nothing is."""
        self._books = {True: _Book(), False: _Book()}
        if known is not None:
            self._books = {
                greedy: _Book(costs=StepCosts.of_table(table), taught=table.knows_drafts)
                for greedy, table in ((True, known.greedy), (False, known.sampled))
            }
        self._acceptance: dict[tuple[int, float], Acceptance] = {}
        self._options: dict[AutoPlan, Options] = {}
        self._held: dict[AutoPlan, _Held] = {}
        self._timed: _Timed | None = None
        # What the latest step did and nothing else, and how many did in a row.
        self._kind: tuple[bool, Cell] | None = None
        self._alike = 0
        self._reading = _Reading()
        self._lookups = Lookups()

    def assign(
        self,
        requests: Sequence[Request],
        *,
        others: int = 0,
        waiting: int = 0,
        behind: Callable[[Request], int] = _nothing,
        matched: Callable[[Request], int] = _nothing,
    ) -> None:
        """Give every automatic request among ``requests`` the plan of its next step.

        Args:
            requests: Those that decode next.
            others: Requests that take part in the step without decoding. Soon they will: a plan has
                to pay in the batch that they make together.
            waiting: Requests that wait to be served.
            behind: For how many committed positions a request's drafter has not run yet.
            matched: How much of the end of a request's text stood before where a lookup finds it;
                0 where none does.
        """
        self._timed = None
        kind: tuple[bool, Cell] | None = None
        groups: dict[AutoPlan, list[Request]] = {}
        for request in requests:
            if request.auto is not None:
                groups.setdefault(request.auto, []).append(request)
        batch = len(requests) + others
        for auto, members in groups.items():
            greedy = all(request.params.greedy for request in members)
            book, whole = self._books[greedy], len(members) == batch
            choice = self._go_on(auto, members, batch=batch) or self._choose_anew(
                book, auto, members, batch=batch, behind=behind, waiting=waiting
            )
            context = _context(members, batch)
            if choice.reason is PlanReason.BEST:
                choice = self._look_up(book, auto, choice, members, matched, context=context)
            shape = choice.shape(context=context)
            for place, request in enumerate(members):
                request.plan, request.plan_reason = choice.plan_of(place), choice.reason
            self._note(book, choice, shape, whole=whole)
            if whole:
                kind = greedy, shape.cell
                self._alike = self._alike + 1 if kind == self._kind else 1
                late = any(_missed(members[place], auto, behind) for place in choice.drafting)
                if self._alike >= _ALIKE and not late:
                    self._timed = _Timed(book, shape, choice.reason)
        self._kind = kind

    @property
    def times(self) -> bool:
        """Whether what the step takes whose plans were assigned last says something."""
        return self._timed is not None

    def observe_request(self, request: Request, *, offered: int, accepted: int) -> None:
        """Learn from a request's decided step, whose tree was ``offered`` levels deep."""
        if request.auto is None or not offered:
            return
        memory = _memory(request)
        if request.plan.source is Source.LOOKUP:
            self._lookups.observe(matched=memory.matched, offered=offered, accepted=accepted)
            return
        self._acceptance_of(request, request.plan).observe(
            memory.drafts, paths=request.plan.paths, offered=offered, accepted=accepted
        )

    def observe_step(self, seconds: float) -> None:
        """Learn what the step took whose plans were assigned last."""
        if self._timed is None:
            return
        book, shape = self._timed.book, self._timed.shape
        often = book.costs.steps_in(shape.cell) >= _OFTEN
        if self._timed.reason is PlanReason.PROBE or not often or book.step % _SAMPLE_EVERY == 0:
            book.costs.observe(shape, seconds)

    def observe_reading(self, rows: int, seconds: float) -> None:
        """Learn what drafters take to read ``rows`` positions, of prompts say."""
        if rows >= _READING_ROWS:
            self._reading.observe(rows, seconds)

    def worth_reading(self, request: Request, *, rows: int, batch: int) -> bool:
        """Return whether its drafter does well to read ``rows`` positions before any draft.

        Where nobody drafts it had better wait. Where somebody does, a short answer may not be worth
        the reading of a long prompt, whose end is enough to draft by.

        Args:
            request: A request that decodes soon, one of ``batch`` alike.
            rows: Positions of its text that its drafter has not run.
            batch: Number of requests that decode with it, itself included.
        """
        if request.auto is None:
            return request.drafted
        book = self._books[request.params.greedy]
        plan = book.present_at(size_class(batch))
        if plan is None or not book.costs.steps:  # nothing is known yet
            return True
        saved = self._saved(book, request, plan, batch=batch) if plan.speculative else 0.0
        return saved > 0 and batch * rows * self._reading.seconds <= _READING_SHARE * saved

    def _saved(self, book: _Book, request: Request, plan: Plan, *, batch: int) -> float:
        """Return the seconds that ``batch`` requests like this one are spared by drafts to come."""
        tokens = self._expected_tokens([request], Options.of((plan,)), batch=batch).item()
        plain, drafting = (
            book.costs.seconds(
                StepShape.of(
                    p, requests=batch, context=batch * request.length_to_read, drafting=drafts
                )
            )
            for p, drafts in ((PLAIN, 0), (plan, batch))
        )
        return _tokens_to_come([request]).item() * (plain - drafting / tokens)

    def explain(self, requests: Sequence[Request]) -> list[Estimate]:
        """Return what is expected of each plan for automatic requests, the best first.

        Lookups are not among them: they are settled step by step.

        Empty where nothing is known yet, or no request leaves its plan to the planner.
        """
        members = [request for request in requests if request.auto is not None]
        if not members or members[0].auto is None:
            return []
        book = self._books[all(request.params.greedy for request in members)]
        if not book.costs.steps:
            return []
        outlook = self._outlook(book, members[0].auto, members, batch=len(requests))
        choices = [outlook.by(plan, PlanReason.BEST) for plan in (PLAIN, *outlook.options.plans)]
        choices.sort(key=lambda choice: -choice.rate)
        return [Estimate(plan_name(c.plan), c.tokens, c.seconds, c.rate) for c in choices]

    def _go_on(self, auto: AutoPlan, members: list[Request], *, batch: int) -> Choice | None:
        """Return the choice that still holds for these requests, or None."""
        held = self._held.get(auto)
        if held is None or not held.left or held.batch != batch:
            return None
        if held.numbers != [r.number for r in members]:
            return None
        return held.left.popleft()

    def _choose_anew(
        self,
        book: _Book,
        auto: AutoPlan,
        members: list[Request],
        *,
        batch: int,
        behind: Callable[[Request], int],
        waiting: int,
    ) -> Choice:
        missed = np.array([_missed(request, auto, behind) for request in members]) * (
            self._reading.seconds
        )
        self._age(auto, members)
        weights = None if waiting else _weights(members)
        outlook = self._outlook(book, auto, members, batch=batch, missed=missed, weights=weights)
        size = size_class(batch)
        choice = _choose(book, outlook, size)
        probe: Choice | None = None
        if choice.reason is PlanReason.BEST:
            book.present[size] = choice.plan
            probe = _probe(book, outlook, choice)
        numbers = [request.number for request in members]
        length = _hold(self._held.get(auto), numbers, choice)
        # What a probe shows is for the next choice: this one goes on behind it.
        left = deque([choice] * length)
        if probe is not None:
            left.extendleft([probe] * _ALIKE)
        self._held[auto] = _Held(numbers, batch, choice, length, len(left), left)
        return left.popleft()

    def _age(self, auto: AutoPlan, members: list[Request]) -> None:
        """Let what is known of those fade that did not draft by the choice that ends here."""
        held = self._held.get(auto)
        if held is None:
            return
        plainly, past = held.plainly, held.past
        for request in members:
            if request.number in plainly:
                _memory(request).drafts.age(past)

    def _look_up(
        self,
        book: _Book,
        auto: AutoPlan,
        choice: Choice,
        members: list[Request],
        matched: Callable[[Request], int],
        *,
        context: int,
    ) -> Choice:
        """Let those of temperature 0 look their drafts up that gain by it."""
        found = [matched(request) if request.looks_up else 0 for request in members]
        if not any(found):
            return choice
        for request, count in zip(members, found, strict=True):
            _memory(request).matched = count
        depths = np.array([plan.depth for plan in auto.lookups])
        tokens = self._lookups.expected_tokens(np.array(found), _limits(members), depths)
        return look_up(choice, auto.lookups, tokens, book.costs, context=context)

    def _outlook(
        self,
        book: _Book,
        auto: AutoPlan,
        members: list[Request],
        *,
        batch: int,
        missed: Array | None = None,
        weights: Array | None = None,
    ) -> Outlook:
        if auto not in self._options:
            self._options[auto] = Options.of(auto.candidates)
        options = self._options[auto]
        tokens = self._expected_tokens(members, options, batch=batch)
        return Outlook.of(
            book.costs,
            options,
            tokens,
            batch=batch,
            context=_context(members, batch),
            missed=missed,
            left=_tokens_to_come(members),
            weights=weights,
        )

    def _expected_tokens(self, members: list[Request], options: Options, *, batch: int) -> Array:
        """Return ``[requests, plans]`` what each request is expected to commit by each plan.

        They are some of a ``batch``, or all.
        """
        tokens = np.ones((len(members), len(options.plans)))
        temperatures = np.array([plan.draft_temperature for plan in options.plans])
        kinds = np.array([kind_of(request.params.temperature) for request in members])
        drafts = [_memory(request).drafts for request in members]
        # Only the request itself gains by what is learned of it, but the whole batch waits.
        hope = _REQUEST_HOPE / batch
        shifts = np.array([own.shift + hope * own.doubt for own in drafts])
        limits = _limits(members)
        for kind in set(kinds.tolist()):
            rows = np.flatnonzero(kinds == kind)
            for temperature in set(temperatures.tolist()):
                columns = np.flatnonzero(temperatures == temperature)
                tokens[np.ix_(rows, columns)] = self._chances(kind, temperature).expected_tokens(
                    shifts[rows], limits[rows], options.paths[columns], options.depths[columns]
                )
        return tokens

    def _acceptance_of(self, request: Request, plan: Plan) -> Acceptance:
        return self._chances(kind_of(request.params.temperature), plan.draft_temperature)

    def _chances(self, kind: int, draft_temperature: float) -> Acceptance:
        key = kind, draft_temperature
        if key not in self._acceptance:
            # Greedy requests draft other trees than sampled ones.
            like = [k for k in self._acceptance if (k[0] == 0) == (kind == 0)]
            nearest = min(like, key=lambda k: _distance(k, key), default=None)
            known = None if nearest is None else self._acceptance[nearest]
            self._acceptance[key] = Acceptance() if known is None else known.hint()
        return self._acceptance[key]

    def _note(self, book: _Book, choice: Choice, shape: StepShape, *, whole: bool) -> None:
        """Remember what is about to run, by itself or beside others."""
        book.step += 1
        if choice.drafting or not choice.lookups:
            book.latest[choice.plan] = book.step
        if whole:  # else its time says nothing
            book.whole += 1
            book.tried[shape.cell] += 1
        most = _BUDGET * choice.seconds * _SAVED_STEPS
        book.credit = min(book.credit + _BUDGET * choice.seconds, max(book.credit, most))


def _missed(request: Request, auto: AutoPlan, behind: Callable[[Request], int]) -> int:
    """Return the rows its drafter reads before it drafts again, beyond those of a usual step."""
    rows = behind(request)
    return rows if rows > 1 + auto.max_depth else 0


def _context(members: list[Request], batch: int) -> int:
    """Return how many KV slots a batch of them and others like them attends to, all together."""
    return sum(request.context for request in members) * batch // len(members)


def _limits(members: list[Request]) -> Ints:
    """Return ``[requests]`` how many tokens each may still commit."""
    return np.array([r.max_tokens - len(r.token_ids) for r in members])


def _tokens_to_come(members: list[Request]) -> Array:
    """Return ``[requests]`` for how many tokens each is expected to go on."""
    left: Array = np.clip(_limits(members), 1, _HORIZON).astype(np.float64)
    return left


def _weights(members: list[Request]) -> Array:
    """Return ``[requests]`` float64: what a token of each is worth where nobody waits.

    A batch takes as long as its last request, and serves the fewer the worse; so those that have
    most to come are to catch up. The more so, the further they are behind: the square of what is
    to come, which among others of its powers made simulated batches of 16 end first.
    """
    squares = _tokens_to_come(members) ** 2
    weights: Array = squares / squares.mean()
    return weights


def _hold(before: _Held | None, numbers: list[int], choice: Choice) -> int:
    """Return for how many steps a choice holds."""
    if choice.reason is not PlanReason.BEST:
        return _ALIKE
    if before is None or before.numbers != numbers or before.choice.plan != choice.plan:
        return _HOLD
    # Several drift apart while they draft, and others of them are to.
    apart = choice.drafting and len(numbers) > 1
    return _HOLD if apart else min(_LONGEST_HOLD, 2 * before.length)


def _choose(book: _Book, outlook: Outlook, size: int) -> Choice:
    """Choose by what the book knows; probes come on top."""
    if not book.costs.steps and outlook.others:
        return outlook.plain(PlanReason.LEARNING)  # what others share in teaches nothing
    lessons = () if book.taught else _lessons(outlook.options.plans)
    if not outlook.others and (book.whole < _ALIKE * len(lessons) or not book.costs.steps):
        lesson = lessons[book.whole // _ALIKE % len(lessons)]
        # All, then half of them: else a step that drafts and a request that does cost the same.
        count = outlook.requests if lesson.everybody else (outlook.requests + 1) // 2
        return outlook.first(count, lesson.plan, PlanReason.LEARNING)
    drafting, plain = outlook.best_drafting(), outlook.plain(PlanReason.BEST)
    for plan in (plain.plan, drafting.plan):
        if outlook.others or not _unknown(book, plan, size):
            continue
        trial = outlook.at_once().first(outlook.requests, plan, PlanReason.LEARNING)
        if not plan.speculative and book.costs.steps_in(_cell(plan, size)) < _KNOWN:
            return trial
        if trial.rate > _HOPELESS * max(plain.rate, drafting.rate):
            return trial
    pays = _PAYS + _PAYS_BY_SIZE * size
    present = book.present_at(size)
    if present in outlook.options.plans:
        stay = outlook.by(present, PlanReason.BEST)
        drafting = drafting if drafting.rate > _BETTER * stay.rate else stay
    else:
        pays += _BEGINS
    return drafting if drafting.rate > pays * plain.rate else plain


def _unknown(book: _Book, plan: Plan, size: int) -> bool:
    """Return whether a plan has still to be tried at a class of batch sizes."""
    tried = book.tried[_cell(plan, size)]
    if not plan.speculative:
        return tried < _PLAINLY
    # What plans cost is told by others.
    return tried < _KNOWN and not (book.taught and book.costs.spans(size))


def _probe(book: _Book, outlook: Outlook, best: Choice) -> Choice | None:
    """Return another choice that is worth a look and within the budget, or None.

    Beside others, who share in its time, it would say little.
    """
    every = _PROBE_EVERY if best.drafting else _PLAINLY_EVERY
    if outlook.others or book.step - book.probed < every:
        return None
    plan = _least_recent(book, outlook, best)
    # What drafters read for a probe may be read in vain: all of it counts, in the first step.
    probe, again = outlook.at_once().by(plan, PlanReason.PROBE), outlook.by(plan, PlanReason.PROBE)
    loss = probe.seconds - probe.worth / best.rate
    loss += (_ALIKE - 1) * (again.seconds - again.worth / best.rate)
    if loss > book.credit:
        return None
    book.credit -= max(0.0, loss)
    book.probed = book.step
    return probe


def _least_recent(book: _Book, outlook: Outlook, best: Choice) -> Plan:
    """Return what to probe: plain decoding every other time, else what was not run for longest.

    Plain decoding is what all else is measured against.
    """
    plans, rates = outlook.options.plans, outlook.rates()
    promising = rates > _WORTH_A_PROBE * best.rate
    near = [p for p, fit in zip(plans, promising.tolist(), strict=True) if fit and p != best.plan]
    if best.plan is PLAIN:
        near = near or [plans[int(rates.argmax())]]
    elif not near or book.latest.get(PLAIN, 0) <= book.probed:
        return PLAIN
    return min(near, key=lambda plan: book.latest.get(plan, 0))


@dataclass(frozen=True, slots=True)
class _Lesson:
    """What the first steps do, so many of them that they are timed.

    Attributes:
        plan: By what they draft.
        everybody: Whether all do, or half of them.
    """

    plan: Plan
    everybody: bool = True


def _lessons(plans: tuple[Plan, ...]) -> tuple[_Lesson, ...]:
    """Return the first lessons: drafts of different shapes, then none."""
    paths, depths = sorted({p.paths for p in plans}), sorted({p.depth for p in plans})

    def plan(k: int, d: int) -> Plan:
        fit = [p for p in plans if (p.paths, p.depth) == (paths[k], depths[d])]
        return fit[-1]

    middle = plan(len(paths) // 2, len(depths) // 2)
    small, deep = plan(0, len(depths) // 4), plan(len(paths) // 4, len(depths) - 2)
    halves = (_Lesson(plan, everybody) for plan in (middle, small) for everybody in (False, True))
    return (*halves, *(_Lesson(plan) for plan in (deep, PLAIN, PLAIN)))


def _distance(a: tuple[int, float], b: tuple[int, float]) -> float:
    """Return how different two kinds of requests are, at their draft temperatures."""
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _cell(plan: Plan, size: int) -> Cell:
    return Cell(size, plan.paths, plan.depth) if plan.speculative else Cell(size, 0, 0)


def _memory(request: Request) -> _Memory:
    if request.plan_state is None:
        request.plan_state = _Memory()
    if not isinstance(request.plan_state, _Memory):
        raise TypeError(f"request {request.number} belongs to another planner")
    return request.plan_state
