"""Choice of the plan of each request's next step, where the user leaves it to the engine.

Before a step, the planner knows what steps cost (:mod:`eaglegbv.scheduler.costs`) and how far
drafts get (:mod:`eaglegbv.scheduler.acceptance`). It considers every plan, and for each plan every
number of requests that draft by it: those that gain most draft, the others decode plainly. It takes
the choice with the most expected tokens a second:

    rate = (requests + sum over those that draft of weight * expected accepted tokens)
           / expected seconds

If no request waits to be served, requests with more tokens to come get a larger weight, because a
batch ends with its last request. Where drafting does not pay (a large batch, a poor drafter) no
request drafts. A drafter that fell behind has to read what it missed first; these seconds are
spread over the steps to come. Now and then a probe, of another plan or of plain decoding, checks
what is known, on a budget of 0.6% of the time.

Losslessness: a step's plan is settled before anything of that step is drawn. It depends on
committed tokens, on acceptances of earlier steps and on measured times, all of them in the past;
and given any past, a step of any plan follows the target's distribution. The planner never looks at what is
drafted in the step or not yet verified.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from eaglegbv.config import PLAIN, AutoPlan, Plan, Source, plan_name
from eaglegbv.request import PlanReason, Request
from eaglegbv.scheduler.choice import Choice, Options, Outlook
from eaglegbv.scheduler.costs import (
    ALIKE,
    Array,
    Cell,
    KnownCosts,
    StepCosts,
    StepShape,
    size_class,
)
from eaglegbv.scheduler.held_choice import HeldChoice, hold_length
from eaglegbv.scheduler.lookups import Lookups, look_up
from eaglegbv.scheduler.plan_book import PlanBook
from eaglegbv.scheduler.prospects import Prospects, limits_of, memory_of, tokens_to_come, weights_of
from eaglegbv.scheduler.reading_cost import ReadingCost

_OFTEN, _SAMPLE_EVERY = 64, 5
"""After this many steps of one kind, it is enough to time one in five.

Five divides none of the numbers of steps for which a choice is kept. Otherwise the timed steps
might always be the first after a choice, which take longer because the choice was made in them.
"""

_READING_SHARE = 0.1
"""Largest share of the time drafting should save that reading a whole prompt may cost."""


def _nothing(_: Request) -> int:
    """Return 0: the default of counts of a request that are not known."""
    return 0


@dataclass(frozen=True, slots=True)
class _Timed:
    """A step whose time is typical, and the book that learns from it."""

    book: PlanBook
    shape: StepShape
    reason: PlanReason


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """What the planner expects of a plan, in readable form.

    Attributes:
        plan: Name of the plan.
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
        """Start with what is known of costs; nothing is known of acceptance."""
        self._books = {True: PlanBook(), False: PlanBook()}
        if known is not None:
            self._books = {
                greedy: PlanBook(costs=StepCosts.of_table(table), taught=table.knows_drafts)
                for greedy, table in ((True, known.greedy), (False, known.sampled))
            }
        self._prospects = Prospects()
        self._options: dict[AutoPlan, Options] = {}
        self._held: dict[AutoPlan, HeldChoice] = {}
        self._timed: _Timed | None = None
        # What the latest step did, if all its requests did the same, and for how many steps in a
        # row.
        self._kind: tuple[bool, Cell] | None = None
        self._alike = 0
        self._reading = ReadingCost()
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
            requests: The requests that decode next.
            others: Number of requests that take part in the step without decoding. They will decode
                soon, so a plan has to pay in the batch that all of them make together.
            waiting: Number of requests that wait to be served.
            behind: Number of committed positions that a request's drafter has not run yet.
            matched: Number of tokens at the end of a request's text that occurred before, where a
                lookup finds them; 0 where it finds none.
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
            book.note(choice, shape, whole=whole)
            if whole:
                kind = greedy, shape.cell
                self._alike = self._alike + 1 if kind == self._kind else 1
                late = any(_missed(members[place], auto, behind) for place in choice.drafting)
                if self._alike >= ALIKE and not late:
                    self._timed = _Timed(book, shape, choice.reason)
        self._kind = kind

    def observe_request(self, request: Request, *, offered: int, accepted: int) -> None:
        """Learn from a request's decided step, whose tree was ``offered`` levels deep."""
        if request.auto is None or not offered:
            return
        memory = memory_of(request)
        if request.plan.source is Source.LOOKUP:
            self._lookups.observe(matched=memory.matched, offered=offered, accepted=accepted)
            return
        self._prospects.observe(request, offered=offered, accepted=accepted)

    def observe_step(self, seconds: float) -> None:
        """Learn the time of the step whose plans were assigned last."""
        if self._timed is None:
            return
        book, shape = self._timed.book, self._timed.shape
        often = book.costs.steps_in(shape.cell) >= _OFTEN
        if self._timed.reason is PlanReason.PROBE or not often or book.step % _SAMPLE_EVERY == 0:
            book.costs.observe(shape, seconds)

    def observe_reading(self, rows: int, seconds: float) -> None:
        """Learn the time drafters took to read ``rows`` positions, of prompts for example."""
        self._reading.observe(rows, seconds)

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
        book = self._books[request.params.greedy]
        plan = book.present_at(size_class(batch))
        if plan is None or not book.costs.steps:  # nothing is known yet
            return True
        saved = self._saved(book, request, plan, batch=batch) if plan.speculative else 0.0
        return saved > 0 and batch * rows * self._reading.seconds <= _READING_SHARE * saved

    def _saved(self, book: PlanBook, request: Request, plan: Plan, *, batch: int) -> float:
        """Return the seconds that drafts will save ``batch`` requests like this one."""
        tokens = self._prospects.expected_tokens([request], Options.of((plan,)), batch=batch).item()
        plain, drafting = (
            book.costs.seconds(
                StepShape.of(
                    p, requests=batch, context=batch * request.length_to_read, drafting=drafts
                )
            )
            for p, drafts in ((PLAIN, 0), (plan, batch))
        )
        return tokens_to_come([request]).item() * (plain - drafting / tokens)

    def explain(self, requests: Sequence[Request]) -> list[PlanEstimate]:
        """Return what is expected of each plan for automatic requests, the best first.

        The list does not contain lookups, which are decided step by step. It is empty if nothing
        is known yet or no request leaves its plan to the planner.
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
        return [PlanEstimate(plan_name(c.plan), c.tokens, c.seconds, c.rate) for c in choices]

    def _go_on(self, auto: AutoPlan, members: list[Request], *, batch: int) -> Choice | None:
        """Return the kept choice if it still applies to these requests, or None."""
        held = self._held.get(auto)
        if held is None or not held.left or held.batch != batch:
            return None
        if held.numbers != [r.number for r in members]:
            return None
        return held.left.popleft()

    def _choose_anew(
        self,
        book: PlanBook,
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
        weights = None if waiting else weights_of(members)
        outlook = self._outlook(book, auto, members, batch=batch, missed=missed, weights=weights)
        size = size_class(batch)
        choice = book.choose(outlook, size)
        probe: Choice | None = None
        if choice.reason is PlanReason.BEST:
            book.present[size] = choice.plan
            probe = book.probe(outlook, choice)
        numbers = [request.number for request in members]
        length = hold_length(self._held.get(auto), numbers, choice)
        # A probe informs the next choice; the present one continues after it.
        left = deque([choice] * length)
        if probe is not None:
            left.extendleft([probe] * ALIKE)
        self._held[auto] = HeldChoice(numbers, batch, choice, length, len(left), left)
        return left.popleft()

    def _age(self, auto: AutoPlan, members: list[Request]) -> None:
        """Age the evidence of the requests that did not draft by the choice that ends here."""
        held = self._held.get(auto)
        if held is None:
            return
        plainly, past = held.plainly, held.past
        for request in members:
            if request.number in plainly:
                memory_of(request).drafts.age(past)

    def _look_up(
        self,
        book: PlanBook,
        auto: AutoPlan,
        choice: Choice,
        members: list[Request],
        matched: Callable[[Request], int],
        *,
        context: int,
    ) -> Choice:
        """Let requests at temperature 0 look up their drafts where they gain by it."""
        found = [matched(request) if request.looks_up else 0 for request in members]
        if not any(found):
            return choice
        for request, count in zip(members, found, strict=True):
            memory_of(request).matched = count
        depths = np.array([plan.depth for plan in auto.lookups])
        tokens = self._lookups.expected_tokens(np.array(found), limits_of(members), depths)
        return look_up(choice, auto.lookups, tokens, book.costs, context=context)

    def _outlook(
        self,
        book: PlanBook,
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
        tokens = self._prospects.expected_tokens(members, options, batch=batch)
        return Outlook.of(
            book.costs,
            options,
            tokens,
            batch=batch,
            context=_context(members, batch),
            missed=missed,
            left=tokens_to_come(members),
            weights=weights,
        )


def _missed(request: Request, auto: AutoPlan, behind: Callable[[Request], int]) -> int:
    """Return the positions its drafter must read before it drafts, 0 if a usual step reads them."""
    rows = behind(request)
    return rows if rows > 1 + auto.max_depth else 0


def _context(members: list[Request], batch: int) -> int:
    """Return the KV slots that a batch of requests like these attends to, all together."""
    return sum(request.context for request in members) * batch // len(members)
