"""A choice of plans that is kept for some steps."""

from collections import deque
from dataclasses import dataclass

from eaglegbv.request import PlanReason
from eaglegbv.scheduler.choice import Choice
from eaglegbv.scheduler.costs import ALIKE

_HOLD, _LONGEST_HOLD = 8, 32
"""Steps for which a choice is kept: at first, and at most, if the same choice is made again."""


@dataclass(slots=True)
class HeldChoice:
    """A choice that is kept for some steps.

    Attributes:
        numbers: Numbers of the requests it was made for.
        batch: Requests of each step, at least those.
        choice: The choice.
        length: Number of steps for which it is kept.
        steps: ``length`` plus the steps of a probe before it.
        left: Choices of the coming steps: the rest of a probe, then ``choice``.
    """

    numbers: list[int]
    batch: int
    choice: Choice
    length: int
    steps: int
    left: deque[Choice]

    @property
    def plainly(self) -> set[int]:
        """Numbers of the requests that do not draft by this choice."""
        drafting = {self.numbers[place] for place in self.choice.drafting}
        return set(self.numbers) - drafting

    @property
    def past(self) -> int:
        """Number of steps that ran."""
        return self.steps - len(self.left)


def hold_length(before: HeldChoice | None, numbers: list[int], choice: Choice) -> int:
    """Return for how many steps to keep a choice."""
    if choice.reason is not PlanReason.BEST:
        return ALIKE
    if before is None or before.numbers != numbers or before.choice.plan != choice.plan:
        return _HOLD
        # Requests that draft get ahead of the others; soon it is the others that should draft.
    apart = choice.drafting and len(numbers) > 1
    return _HOLD if apart else min(_LONGEST_HOLD, 2 * before.length)
