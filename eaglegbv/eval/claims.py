"""What should be seen in what was measured: claims, each of which yields findings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from eaglegbv.eval.figures import (
    ACCEPTANCE,
    FEWEST,
    SPEED,
    STEP_MILLISECONDS,
    Estimate,
    Figure,
    Sums,
)
from eaglegbv.eval.settings import Axis, Setting
from eaglegbv.utils import grouped

AGREES = "agrees"
AGAINST = "against"
OPEN = "not told apart"
SAME_WAY = "same"
OPPOSITE = "opposite"
BOTH = "the paper has both"
UNDECIDED = "not decided"
WORDS = (AGREES, AGAINST, OPEN)
PAPERS_WORDS = (SAME_WAY, OPPOSITE, UNDECIDED)
FEW = f"fewer than {FEWEST} questions"
SAME = 1e-6  # ratios nearer to 1 are rounding, and those of solvers to their tolerance
SHOWN = {ACCEPTANCE.name: "", SPEED.name: " (tokens a second)"}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A direction that somebody gives, and what was measured."""

    statement: str  # the direction, with the settings it is about
    source: str  # who says so
    # The figure that should be higher over the other, paired; None where nothing can be compared.
    ratio: Estimate | None
    paper: str = ""  # the paper's own ratio, where its figures say the direction
    expected: int = 1  # whether the ratio should be above 1, below it (-1), or either (0)

    @property
    def verdict(self) -> str:
        """Whether the interval lies on the expected side of equality, the other one, or both."""
        if self.paper and self.expected == 0:
            return BOTH
        yes, no, neither = PAPERS_WORDS if self.paper else WORDS
        if self.ratio is None:
            return neither
        if self.ratio.units < FEWEST:
            return FEW
        above, below = (yes, no) if self.expected > 0 else (no, yes)
        return self.ratio.told(above, below, neither, SAME)


class Claim(Protocol):
    """Something that should be seen in a sheet's figures."""

    def findings(self, sums: Sums, settings: Sequence[Setting]) -> Iterator[Finding]:
        """Yield the finding of each pair of settings that it is about."""


@dataclass(frozen=True, slots=True)
class AtLeast:
    """A rule's figure is at least another's, wherever both were measured."""

    better: str  # the rule whose figure should be as high or higher
    worse: str  # the other; where it takes one path alone, its one-path setting stands everywhere
    source: str
    figure: Figure = ACCEPTANCE

    def findings(self, sums: Sums, settings: Sequence[Setting]) -> Iterator[Finding]:
        """Yield the finding of each setting of the better rule."""
        for better in _of(settings, self.better):
            worse = counterpart(settings, better, self.worse)
            if worse is not None:
                yield compared(sums, better, worse, self.source, self.figure)


@dataclass(frozen=True, slots=True)
class Rises:
    """A rule's figure does not fall from the least place on an axis to the most."""

    rule: str
    axis: Axis
    source: str

    def findings(self, sums: Sums, settings: Sequence[Setting]) -> Iterator[Finding]:
        """Yield the finding of each line of settings that differ along the axis alone."""
        lines = grouped(_of(settings, self.rule), lambda one: one.moved(self.axis, 1))
        for line in lines.values():
            line.sort(key=lambda one: one.at(self.axis))
            if len(line) > 1:
                yield compared(sums, line[-1], line[0], self.source)


@dataclass(frozen=True, slots=True)
class Within:
    """A rule's best figure within a limit on the mean time is at least another's."""

    better: str
    worse: str
    limits: Sequence[float]  # milliseconds a step
    source: str

    def findings(self, sums: Sums, settings: Sequence[Setting]) -> Iterator[Finding]:
        """Yield the finding of each limit."""
        for limit in self.limits:
            better = best_within(sums, settings, self.better, limit)
            worse = best_within(sums, settings, self.worse, limit)
            if better is not None and worse is not None:
                one = compared(sums, better, worse, self.source)
                statement = f"within {limit:g} ms: {one.statement}"
                yield msgspec.structs.replace(one, statement=statement)


def best_within(
    sums: Sums, settings: Sequence[Setting], rule: str, milliseconds: float
) -> Setting | None:
    """Return a rule's setting with the best figure of those whose steps take at most so long."""
    in_time = [
        setting
        for setting in _of(settings, rule)
        if 0 < sums.value(STEP_MILLISECONDS, setting.name) <= milliseconds
    ]
    return max(in_time, key=lambda own: sums.value(ACCEPTANCE, own.name), default=None)


def compared(
    sums: Sums, better: Setting, worse: Setting, source: str, figure: Figure = ACCEPTANCE
) -> Finding:
    """Return the finding that one setting's figure is at least another's."""
    what = SHOWN.get(figure.name, f" ({figure.name})")
    known = sums.has(better.name, worse.name)
    return Finding(
        statement=f"{better.name} at least {worse.name}{what}",
        source=source,
        ratio=sums.over(figure, better.name, worse.name) if known else None,
    )


def _of(settings: Sequence[Setting], rule: str) -> list[Setting]:
    return [setting for setting in settings if setting.rule == rule]


def counterpart(settings: Sequence[Setting], setting: Setting, rule: str) -> Setting | None:
    """Return the other rule's setting of the same sizes, or its only one along paths."""
    axes: tuple[Axis, ...] = ("temperature", "depth", "draft_width", "batch")
    place = [setting.at(axis) for axis in axes]
    others = [o for o in _of(settings, rule) if [o.at(axis) for axis in axes] == place]
    same = [other for other in others if other.plan.paths == setting.plan.paths]
    alone = others if len(others) == 1 and others[0].plan.paths == 1 else []
    return next(iter(same or alone), None)
