"""How requests decode while the time of their steps is measured."""

import msgspec

from eaglegbv.config import Plan
from eaglegbv.errors import InvalidArgument

WARM_UP_STEPS = 3
"""Number of steps before those that are timed."""


class StepSetting(msgspec.Struct, frozen=True, kw_only=True):
    """Setting of a measurement of steps.

    Attributes:
        plan: How requests speculate.
        batch: Number of requests.
        context: Tokens of each prompt.
        temperature: Sampling temperature.
        steps: Number of timed steps, after those that warm up.
    """

    plan: Plan
    batch: int = 1
    context: int = 512
    temperature: float = 1.0
    steps: int = 30

    def __post_init__(self) -> None:
        for name, value in (
            ("batch", self.batch),
            ("context", self.context),
            ("steps", self.steps),
        ):
            if value < 1:
                raise InvalidArgument(name, value, "an integer of at least 1")

    @property
    def tokens(self) -> int:
        """Tokens of an answer, enough for all steps, including those whose launches are counted."""
        return (self.plan.depth + 1) * (WARM_UP_STEPS + self.steps + 3)
