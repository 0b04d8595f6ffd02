"""What is known about steps of one kind of sampling, and the choice that follows from it."""

from collections import Counter
from dataclasses import dataclass, field

from eaglegbv.config import PLAIN, Plan
from eaglegbv.request import PlanReason
from eaglegbv.scheduler.choice import Choice, Outlook
from eaglegbv.scheduler.costs import ALIKE, Cell, StepCosts, StepShape, cell_of

_KNOWN = 2
"""Steps after which a plan counts as tried at a batch size."""

_PLAINLY = 6
"""Steps of plain decoding before another plan may be chosen: all plans are compared with it.

These are needed even after a calibration, whose costs come from made-up texts.
"""

_HOPELESS = 0.7
"""A plan is not tried at a new batch size if its rate is below this share of the best rate.

Plain decoding is tried anyway until two of its steps were timed: one may have been held up.
"""

_BETTER = 1.02
"""How many times the present plan's rate another plan must reach to replace it."""

_PAYS, _PAYS_BY_SIZE, _BEGINS = 1.03, 0.04, 0.04
"""How many times the rate of plain decoding drafting must reach to continue: the value for one
request, and the addition for every doubling of the batch. The third value is a further addition
before drafting may begin, because a drafter that fell behind has to catch up first.

Requests that draft end at different times, and the rest of their batch is served at a lower rate.
Where drafting looks 1% better in a batch of 8, the whole batch takes 6% longer; where it looks 6%
better in a batch of 16, 14% longer (tiny pair, when all tokens still counted the same). Also, the
plan that looks best among many is seldom as good as it looks. Where drafting barely pays, 18 of 100
simulated engines lost more than 3% in a batch of 8 with 0.02 a doubling, but 7 with 0.04, and the
mean was the same (tests/support/closed_batches.py).
"""

_BUDGET = 0.006
"""Share of the time that probes may cost."""

_SAVED_STEPS = 1024
"""Number of steps like the present one from which probes may save up their share at most."""

_PROBE_EVERY, _PLAINLY_EVERY = 64, 120
"""Least number of steps from one probe to the next: while requests draft, and while none does.

In the latter case a probe first has to read what the drafters missed.
"""

_WORTH_A_PROBE = 0.8
"""A plan is probed if its rate is at least this share of the best rate."""


@dataclass(slots=True)
class PlanBook:
    """What is known about steps of one kind of sampling, greedy or not.

    Attributes:
        costs: What the steps cost.
        tried: Number of steps of each plan at each class of batch sizes.
        latest: Number of the latest step of each plan.
        step: Number of steps so far.
        whole: Number of steps in which no other requests took part.
        credit: Seconds that probes may cost.
        probed: Number of the step of the latest probe.
        present: The plan that looked best last, by class of batch sizes.
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
        """Return the plan that looked best last at a size class or the nearest; None at first."""
        nearest = min(self.present, key=lambda known: (abs(known - size), known), default=None)
        return None if nearest is None else self.present[nearest]

    def note(self, choice: Choice, shape: StepShape, *, whole: bool) -> None:
        """Record the step about to run; ``whole`` if no other requests take part in it."""
        self.step += 1
        if choice.drafting or not choice.lookups:
            self.latest[choice.plan] = self.step
        if whole:  # otherwise its time says nothing about the plan
            self.whole += 1
            self.tried[shape.cell] += 1
        most = _BUDGET * choice.seconds * _SAVED_STEPS
        self.credit = min(self.credit + _BUDGET * choice.seconds, max(self.credit, most))

    def choose(self, outlook: Outlook, size: int) -> Choice:
        """Choose by what is known so far; probes are chosen separately."""
        if (lesson := self._lesson(outlook)) is not None:
            return lesson
        plain, drafting = outlook.plain(PlanReason.BEST), outlook.best_drafting()
        trial = self._trial(outlook, size, plain, drafting)
        return self._best(outlook, size, plain, drafting) if trial is None else trial

    def _lesson(self, outlook: Outlook) -> Choice | None:
        """Return the choice that teaches most while next to nothing is known, or None."""
        if outlook.others:
            # A step that other requests take part in teaches nothing.
            return None if self.costs.steps else outlook.plain(PlanReason.LEARNING)
        lessons = () if self.taught else _lessons(outlook.options.plans)
        if self.costs.steps and self.whole >= ALIKE * len(lessons):
            return None
        lesson = lessons[self.whole // ALIKE % len(lessons)]
        # Half of the requests draft, then all: otherwise the cost of a step that drafts and the
        # cost of a request that drafts could not be told apart.
        count = outlook.requests if lesson.everybody else (outlook.requests + 1) // 2
        return outlook.first(count, lesson.plan, PlanReason.LEARNING)

    def _trial(self, outlook: Outlook, size: int, plain: Choice, drafting: Choice) -> Choice | None:
        """Return a promising plan that has hardly run in batches of this size, or None."""
        if outlook.others:
            return None
        for plan in (plain.plan, drafting.plan):
            if not self._unknown(plan, size):
                continue
            trial = outlook.at_once().first(outlook.requests, plan, PlanReason.LEARNING)
            timed = self.costs.steps_in(cell_of(plan, size))
            if not plan.speculative and timed < _KNOWN:
                return trial
            if trial.rate > _HOPELESS * max(plain.rate, drafting.rate):
                return trial
        return None

    def _best(self, outlook: Outlook, size: int, plain: Choice, drafting: Choice) -> Choice:
        """Return the choice with the most tokens a second, by what is known."""
        pays = _PAYS + _PAYS_BY_SIZE * size
        present = self.present_at(size)
        if present in outlook.options.plans:
            stay = outlook.by(present, PlanReason.BEST)
            drafting = drafting if drafting.rate > _BETTER * stay.rate else stay
        else:
            pays += _BEGINS
        return drafting if drafting.rate > pays * plain.rate else plain

    def _unknown(self, plan: Plan, size: int) -> bool:
        """Return whether a plan still has to be tried at a class of batch sizes."""
        tried = self.tried[cell_of(plan, size)]
        if not plan.speculative:
            return tried < _PLAINLY
        # Observed sizes around this one already tell what plans cost here.
        return tried < _KNOWN and not (self.taught and self.costs.spans(size))

    def probe(self, outlook: Outlook, best: Choice) -> Choice | None:
        """Return another choice that is worth a try and within the budget, or None.

        There is no probe while other requests take part in the step: its time would say little.
        """
        every = _PROBE_EVERY if best.drafting else _PLAINLY_EVERY
        if outlook.others or self.step - self.probed < every:
            return None
        plan = self._least_recent(outlook, best)
        # Drafters may read for a probe in vain, so all of the reading counts in its first step.
        probe = outlook.at_once().by(plan, PlanReason.PROBE)
        again = outlook.by(plan, PlanReason.PROBE)
        loss = probe.seconds - probe.worth / best.rate
        loss += (ALIKE - 1) * (again.seconds - again.worth / best.rate)
        if loss > self.credit:
            return None
        self.credit -= max(0.0, loss)
        self.probed = self.step
        return probe

    def _least_recent(self, outlook: Outlook, best: Choice) -> Plan:
        """Return the plan to probe.

        Every other time this is plain decoding, because all plans are compared with it; otherwise
        it is the plan that has not run for longest.
        """
        plans, rates = outlook.options.plans, outlook.rates()
        promising = rates > _WORTH_A_PROBE * best.rate
        fits = zip(plans, promising.tolist(), strict=True)
        near = [plan for plan, fit in fits if fit and plan != best.plan]
        if best.plan is PLAIN:
            near = near or [plans[int(rates.argmax())]]
        elif not near or self.latest.get(PLAIN, 0) <= self.probed:
            return PLAIN
        return min(near, key=lambda plan: self.latest.get(plan, 0))


@dataclass(frozen=True, slots=True)
class _Lesson:
    """What one of the first steps does; it is repeated until it can be timed.

    Attributes:
        plan: The plan by which requests draft.
        everybody: Whether all requests draft, or half of them.
    """

    plan: Plan
    everybody: bool = True


def _lessons(plans: tuple[Plan, ...]) -> tuple[_Lesson, ...]:
    """Return the first lessons: drafts of different shapes, then plain decoding."""
    paths, depths = sorted({p.paths for p in plans}), sorted({p.depth for p in plans})

    def plan(k: int, d: int) -> Plan:
        fit = [p for p in plans if (p.paths, p.depth) == (paths[k], depths[d])]
        return fit[-1]

    middle = plan(len(paths) // 2, len(depths) // 2)
    small, deep = plan(0, len(depths) // 4), plan(len(paths) // 4, len(depths) - 2)
    halves = (_Lesson(plan, everybody) for plan in (middle, small) for everybody in (False, True))
    return (*halves, *(_Lesson(plan) for plan in (deep, PLAIN, PLAIN)))
