"""Settings of a user who leaves the choice of plans to the engine."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Literal, TypeAlias, cast

import msgspec

from eaglegbv.checks import require_integer, require_number
from eaglegbv.config import MAX_DEPTH, MAX_PATHS, MAX_WIDTH, Plan, Source
from eaglegbv.defaults import DRAFT_WIDTH
from eaglegbv.errors import InvalidArgument
from eaglegbv.tree import Law

_PATHS = (1, 2, 3, 4, 6, 8, 12, 16)
_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
_LOOKUP_DEPTHS = (2, 4, 8, 16)
_MAX_TEMPERATURES = 4

_WHOLE_VOCAB = 8192
"""Size up to which single paths keep draft vocabularies whole: width hardly slows verification.

The tiny pair's laws of all 4,096 tokens cover 0.61 of the target's on MT-Bench, those of the 256
most likely cover 0.59. For several paths, verifying all tokens takes longer than that is worth.
"""


class AutoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Let the engine choose a plan for each request and step, from its measurements so far.

    Every choice gives the same law of the text; only speed differs. Because the choice depends on
    measured times, the same seed need not give the same text twice (at temperature 0 it does).

    Attributes:
        verifier: Verifier of all plans; a stateless one that takes sampled paths.
        max_paths: Most drafted paths.
        max_depth: Most drafted tokens of a path.
        draft_width: See :class:`eaglegbv.config.Plan`. Single paths keep draft vocabularies of up
            to 8,192 tokens whole.
        draft_temperatures: Draft temperatures to choose from; the first is the usual one.
        lookup_depth: Most tokens that are looked up in the text itself instead of drafted, at
            temperature 0 and where lookups promise more; 0 for no lookups.

    Raises:
        InvalidArgument: A value is out of range.
    """

    verifier: str = "otbv"
    max_paths: int = 4
    max_depth: int = 8
    draft_width: int = DRAFT_WIDTH
    draft_temperatures: tuple[float, ...] = (1.0,)
    lookup_depth: int = 16

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("max_paths", self.max_paths, 1, MAX_PATHS),
            ("max_depth", self.max_depth, 1, MAX_DEPTH),
            ("draft_width", self.draft_width, 1, MAX_WIDTH),
            ("lookup_depth", self.lookup_depth, 0, MAX_DEPTH),
        ):
            require_integer(name, value, low, high)
        if self.verifier == "none":
            raise InvalidArgument("verifier", "none", "a verifier; a fixed plan decodes plainly")
        if not isinstance(self.draft_temperatures, Sequence):
            expected = f"a sequence of 1 to {_MAX_TEMPERATURES} different numbers"
            raise InvalidArgument("draft_temperatures", self.draft_temperatures, expected)
        msgspec.structs.force_setattr(self, "draft_temperatures", tuple(self.draft_temperatures))
        for temperature in self.draft_temperatures:
            require_number("draft_temperatures", temperature, 0.05, 20)
        count = len(self.draft_temperatures)
        if not 1 <= count <= _MAX_TEMPERATURES or len(set(self.draft_temperatures)) < count:
            expected = f"1 to {_MAX_TEMPERATURES} different numbers"
            raise InvalidArgument("draft_temperatures", self.draft_temperatures, expected)
        # The plans themselves check the rest.
        _ = self.candidates

    @property
    def candidates(self) -> tuple[Plan, ...]:
        """The plans by which the drafter drafts, the smallest first; see also :attr:`lookups`.

        Plain decoding is always possible too.
        """
        return _candidates(self)

    @property
    def lookups(self) -> tuple[Plan, ...]:
        """The plans by which requests at temperature 0 may look drafts up, the smallest first."""
        return _lookups(self)


@lru_cache(maxsize=64)
def _candidates(auto: AutoPlan) -> tuple[Plan, ...]:
    return tuple(
        Plan(
            verifier=auto.verifier,
            paths=paths,
            depth=depth,
            draft_width=auto.draft_width,
            whole_vocab=_WHOLE_VOCAB if paths == 1 else 0,
            draft_temperature=temperature,
        )
        for temperature in reversed(auto.draft_temperatures)
        for paths in _up_to(_PATHS, auto.max_paths)
        for depth in _up_to(_DEPTHS, auto.max_depth)
    )


@lru_cache(maxsize=64)
def _lookups(auto: AutoPlan) -> tuple[Plan, ...]:
    if not auto.lookup_depth:
        return ()
    return tuple(
        Plan(verifier=auto.verifier, paths=1, depth=depth, source=Source.LOOKUP)
        for depth in _up_to(_LOOKUP_DEPTHS, auto.lookup_depth)
    )


def _up_to(grid: tuple[int, ...], largest: int) -> list[int]:
    return [value for value in grid if value < largest] + [largest]


Planning: TypeAlias = Plan | AutoPlan
"""One plan for all steps, or the engine's own choice."""

PlanName: TypeAlias = Literal["auto"]
"""``"auto"`` stands for :data:`AUTO`."""

AUTO = AutoPlan()
"""The engine's own choice, with its usual limits."""


def named_planning(plan: Planning | str) -> Planning:
    """Return the planning that a user's ``plan`` stands for.

    Raises:
        InvalidArgument: ``plan`` is neither a planning nor ``"auto"``.
    """
    if plan == "auto":
        return AUTO
    if not isinstance(plan, Plan | AutoPlan):
        raise InvalidArgument("plan", plan, "'auto', an AutoPlan or a Plan")
    return plan


@dataclass(frozen=True, slots=True)
class PlanChoices:
    """A user's choices for a plan; None and default values choose nothing.

    Attributes:
        verifier: See :class:`eaglegbv.config.Plan` for this and the others.
        paths: Number of drafted paths.
        depth: Length of a drafted path.
        law: How a tree's children arise.
        draft_width: Draft width of the plan, or of those the engine chooses from.
        draft_temperature: Draft temperature of the same plans, as a multiple of the request's.
    """

    verifier: str | None = None
    paths: int | None = None
    depth: int | None = None
    law: Law | str | None = None
    draft_width: int = DRAFT_WIDTH
    draft_temperature: float = 1.0

    @property
    def fixed(self) -> bool:
        """Whether any of the first four is given, so that one plan holds for all steps."""
        return any(c is not None for c in (self.verifier, self.paths, self.depth, self.law))

    def plan(self) -> Plan:
        """Return the plan with these choices, and defaults for those that are None.

        Raises:
            InvalidArgument: A choice is out of range.
        """
        usual = Plan()
        return Plan(
            verifier=usual.verifier if self.verifier is None else self.verifier,
            paths=usual.paths if self.paths is None else self.paths,
            depth=usual.depth if self.depth is None else self.depth,
            law=cast("Law | None", self.law),
            draft_width=self.draft_width,
            draft_temperature=self.draft_temperature,
        )

    def planning(self) -> Planning:
        """Return such a plan, or the engine's own choice if nothing fixes a plan.

        Raises:
            InvalidArgument: A choice is out of range.
        """
        if self.fixed:
            return self.plan()
        return AutoPlan(draft_width=self.draft_width, draft_temperatures=(self.draft_temperature,))

    def give_way_to(self, plan: Planning | str) -> Planning:
        """Return the planning that a user's ``plan`` stands for; nothing else may be chosen.

        Raises:
            InvalidArgument: Something else was chosen too, or ``plan`` is not a plan.
        """
        usual = asdict(PlanChoices())
        also = [name for name, value in asdict(self).items() if value != usual[name]]
        if also:
            expected = f"None where {also[0]} is given: a plan says that too"
            raise InvalidArgument("plan", plan, expected)
        return named_planning(plan)


def plans_of(planning: Planning, *, greedy: bool) -> tuple[Plan, ...]:
    """Return all plans that a request may follow at some step, besides plain decoding."""
    if isinstance(planning, AutoPlan):
        return planning.candidates + (planning.lookups if greedy else ())
    return (planning,)


@lru_cache(maxsize=1024)
def plan_name(plan: Plan) -> str:
    """Return a short name, such as ``otbv 3x4``: verifier, paths and depth, and other choices."""
    if not plan.speculative:
        return "none"
    judge = plan.verifier if plan.source is Source.DRAFTER else f"{plan.verifier} {plan.source}"
    law = "" if plan.law is None else f" {plan.law}"
    hot = "" if plan.draft_temperature == 1 else f" at {plan.draft_temperature:g}"
    return f"{judge} {plan.paths}x{plan.depth}{law}{hot}"
