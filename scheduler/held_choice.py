"""A choice of plans that goes on for some steps."""

from collections import deque
from dataclasses import dataclass

from eaglegbv.request import PlanReason
from eaglegbv.scheduler.choice import Choice
from eaglegbv.scheduler.costs import ALIKE

_HOLD, _LONGEST_HOLD = 8, 32
"""Steps between two choices for the same requests: at first, and after many that were the same."""


@dataclass(slots=True)
class HeldChoice:
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


def hold_length(before: HeldChoice | None, numbers: list[int], choice: Choice) -> int:
    """Return for how many steps a choice holds."""
    if choice.reason is not PlanReason.BEST:
        return ALIKE
    if before is None or before.numbers != numbers or before.choice.plan != choice.plan:
        return _HOLD
    # Several drift apart while they draft, and others of them are to.
    apart = choice.drafting and len(numbers) > 1
    return _HOLD if apart else min(_LONGEST_HOLD, 2 * before.length)
