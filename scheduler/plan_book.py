"""What is known about steps of one kind of sampling, and what it recommends."""

from collections import Counter
from dataclasses import dataclass, field

from eaglegbv.config import PLAIN, Plan
from eaglegbv.request import PlanReason
from eaglegbv.scheduler.choice import Choice, Outlook
from eaglegbv.scheduler.costs import ALIKE, Cell, StepCosts, StepShape, cell_of

_KNOWN = 2
"""Steps after which a plan counts as tried at a batch size."""

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


@dataclass(slots=True)
class PlanBook:
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

    def note(self, choice: Choice, shape: StepShape, *, whole: bool) -> None:
        """Remember what is about to run, by itself or beside others."""
        self.step += 1
        if choice.drafting or not choice.lookups:
            self.latest[choice.plan] = self.step
        if whole:  # else its time says nothing
            self.whole += 1
            self.tried[shape.cell] += 1
        most = _BUDGET * choice.seconds * _SAVED_STEPS
        self.credit = min(self.credit + _BUDGET * choice.seconds, max(self.credit, most))

    def choose(self, outlook: Outlook, size: int) -> Choice:
        """Choose by what the book knows; probes come on top."""
        if (lesson := self._lesson(outlook)) is not None:
            return lesson
        plain, drafting = outlook.plain(PlanReason.BEST), outlook.best_drafting()
        trial = self._trial(outlook, size, plain, drafting)
        return self._best(outlook, size, plain, drafting) if trial is None else trial

    def _lesson(self, outlook: Outlook) -> Choice | None:
        """Return what teaches most while next to nothing is known, or None."""
        if outlook.others:
            # What others share in teaches nothing.
            return None if self.costs.steps else outlook.plain(PlanReason.LEARNING)
        lessons = () if self.taught else _lessons(outlook.options.plans)
        if self.costs.steps and self.whole >= ALIKE * len(lessons):
            return None
        lesson = lessons[self.whole // ALIKE % len(lessons)]
        # All, then half of them: else a step that drafts and a request that does cost the same.
        count = outlook.requests if lesson.everybody else (outlook.requests + 1) // 2
        return outlook.first(count, lesson.plan, PlanReason.LEARNING)

    def _trial(self, outlook: Outlook, size: int, plain: Choice, drafting: Choice) -> Choice | None:
        """Return a promising plan that was hardly run in batches of this size, or None."""
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
        """Return what commits the most tokens a second, by what is known."""
        pays = _PAYS + _PAYS_BY_SIZE * size
        present = self.present_at(size)
        if present in outlook.options.plans:
            stay = outlook.by(present, PlanReason.BEST)
            drafting = drafting if drafting.rate > _BETTER * stay.rate else stay
        else:
            pays += _BEGINS
        return drafting if drafting.rate > pays * plain.rate else plain

    def _unknown(self, plan: Plan, size: int) -> bool:
        """Return whether a plan has still to be tried at a class of batch sizes."""
        tried = self.tried[cell_of(plan, size)]
        if not plan.speculative:
            return tried < _PLAINLY
        # What plans cost is told by others.
        return tried < _KNOWN and not (self.taught and self.costs.spans(size))

    def probe(self, outlook: Outlook, best: Choice) -> Choice | None:
        """Return another choice that is worth a look and within the budget, or None.

        Beside others, who share in its time, it would say little.
        """
        every = _PROBE_EVERY if best.drafting else _PLAINLY_EVERY
        if outlook.others or self.step - self.probed < every:
            return None
        plan = self._least_recent(outlook, best)
        # What drafters read for a probe may be read in vain: all of it counts, in the first step.
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
        """Return what to probe: plain decoding every other time, else what was not run for longest.

        Plain decoding is what all else is measured against.
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
