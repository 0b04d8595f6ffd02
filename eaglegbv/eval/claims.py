"""What should be seen in what was measured: claims, each of which yields findings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from eaglegbv.config import Plan
from eaglegbv.eval.figures import ACCEPTANCE, FEWEST, SPEED, Estimate, Figure, Sums
from eaglegbv.eval.settings import Axis, Setting

AGREES = "agrees"
AGAINST = "against"
OPEN = "not told apart"
SAME_WAY = "same"
OPPOSITE = "opposite"
BOTH = "the paper has both"
UNDECIDED = "not decided"
FEW = f"fewer than {FEWEST} questions"
SAME = 1e-6  # ratios nearer to 1 are rounding, and those of solvers to their tolerance
SHOWN = {ACCEPTANCE.name: "", SPEED.name: "tokens a second"}


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
        yes = AGREES
        no = AGAINST
        neither = OPEN
        if self.paper:
            yes = SAME_WAY
            no = OPPOSITE
            neither = UNDECIDED
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
    where: Callable[[Plan], bool] = lambda _: True  # by the better one's plan

    def findings(self, sums: Sums, settings: Sequence[Setting]) -> Iterator[Finding]:
        """Yield the finding of each setting of the better rule."""
        for better in _of(settings, self.better):
            worse = counterpart(settings, better, self.worse)
            if worse is not None and self.where(better.plan):
                yield compared(sums, better, worse, self.source, self.figure)


@dataclass(frozen=True, slots=True)
class Rises:
    """A rule's figure does not fall from one place on an axis to another."""

    rule: str
    axis: Axis
    source: str
    start: float | None = None  # None for the least
    end: float | None = None  # None for the most
    figure: Figure = ACCEPTANCE
    over: str | None = None  # a rule over which it leads: then the lead does not fall

    def findings(self, sums: Sums, settings: Sequence[Setting]) -> Iterator[Finding]:
        """Yield the finding of each line of settings that differ along the axis alone."""
        lines: dict[Setting, dict[float, Setting]] = {}
        for setting in _of(settings, self.rule):
            line = lines.setdefault(setting.moved(self.axis, 1), {})
            line[setting.at(self.axis)] = setting
        for line in lines.values():
            near = line.get(min(line) if self.start is None else self.start)
            far = line.get(max(line) if self.end is None else self.end)
            if near is None or far is None or near is far:
                continue
            if self.over is None:
                yield compared(sums, far, near, self.source, self.figure)
            else:
                yield from self._lead(sums, settings, far, near, self.over)

    def _lead(
        self, sums: Sums, settings: Sequence[Setting], far: Setting, near: Setting, over: str
    ) -> Iterator[Finding]:
        behind = [counterpart(settings, setting, over) for setting in (far, near)]
        if behind[0] is None or behind[1] is None:
            return
        lead, before = (
            f"{a.name} / {b.name}" for a, b in zip((far, near), behind, strict=True) if b
        )
        above = (far.name, behind[1].name)
        below = (near.name, behind[0].name)
        yield Finding(
            statement=f"{lead} at least {before}",
            source=self.source,
            ratio=sums.ratio(self.figure, above, below),
        )


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
    values: Mapping[Setting, float] = {
        setting: sums.value(ACCEPTANCE, setting.name)
        for setting in _of(settings, rule)
        if sums.has(setting.name)
        and 1e3 * sums.total(setting.name, "seconds")
        <= milliseconds * sums.total(setting.name, "steps")
    }
    return max(values, key=lambda setting: values[setting], default=None)


def compared(
    sums: Sums, better: Setting, worse: Setting, source: str, figure: Figure = ACCEPTANCE
) -> Finding:
    """Return the finding that one setting's figure is at least another's."""
    what = SHOWN.get(figure.name, figure.name)
    what = f" ({what})" if what else ""
    ratio = None
    if sums.has(better.name, worse.name):
        ratio = sums.ratio(figure, [better.name], [worse.name])
    return Finding(
        statement=f"{better.name} at least {worse.name}{what}", source=source, ratio=ratio
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
