"""Two settings compared question by question, of one run or two."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.figures import CONVERSATIONS, FEWEST, Estimate, Sums
from eaglegbv.eval.observations import Run
from eaglegbv.eval.tables import shown

SIDES = ("A ", "B ")


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of two settings on the units that both answered."""

    figure: str
    a: float
    b: float
    ratio: Estimate | None  # B over A; None if A's value is 0

    @property
    def verdict(self) -> str:
        """Whether the interval excludes equality."""
        if self.ratio is None or self.ratio.units < FEWEST:
            return "cannot be told"
        return self.ratio.told("higher", "lower", "no difference shown")


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two settings, B compared with A, and a difference for each figure."""

    a: str
    b: str
    questions: int  # that both answered to the end
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class _Both:
    """The sums of two runs, their settings' names led by A and B."""

    sums: Sums
    names: tuple[list[str], list[str]]  # settings measured in A and in B, in order


def _both(a: Run, b: Run) -> _Both:
    observations = [
        msgspec.structs.replace(one, setting=side + one.setting)
        for side, run in zip(SIDES, (a, b), strict=True)
        for sheet in run.sheets
        for one in run.observations(sheet)
    ]
    sums = Sums(observations)
    names = [[name[2:] for name in sums.settings if name.startswith(side)] for side in SIDES]
    return _Both(sums, (names[0], names[1]))


def compared_runs(a: Run, b: Run, setting_a: str | None, setting_b: str | None) -> list[Comparison]:
    """Compare all settings that both runs have measured, or one of each.

    Raises:
        InvalidArgument: A run has not measured a setting, or they share no setting or question.
    """
    both = _both(a, b)
    if setting_a is not None and setting_b is not None:
        for name, known in zip((setting_a, setting_b), both.names, strict=True):
            if name not in known:
                expected = f"one of those measured: {', '.join(sorted(known))}"
                raise InvalidArgument("setting", name, expected)
        return [_compared(both.sums, setting_a, setting_b)]
    shared = [name for name in both.names[0] if name in both.names[1]]
    if not shared:
        expected = "at least one in both runs, or --setting-a and -b"
        raise InvalidArgument("settings", list(both.names), expected)
    return [_compared(both.sums, name, name) for name in shared]


def _compared(sums: Sums, a: str, b: str) -> Comparison:
    base, other = SIDES[0] + a, SIDES[1] + b
    units = sums.shared([base, other])
    if not units:
        expected = "two with questions that both answered to the end"
        raise InvalidArgument("settings", [a, b], expected)
    return Comparison(
        a=a, b=b, questions=len(units), differences=tuple(_differences(sums, base, other))
    )


def _differences(sums: Sums, base: str, other: str) -> Iterator[Difference]:
    for figure in CONVERSATIONS:
        if not sums.total(base, figure.below) or not sums.total(other, figure.below):
            continue
        a, b = (sums.ratio(figure, [name], among=(base, other)).value for name in (base, other))
        ratio = sums.ratio(figure, [other], [base]) if a else None
        yield Difference(figure=figure.name, a=a, b=b, ratio=ratio)


def unlike(a: Run, b: Run) -> list[str]:
    """Return a line for each other difference between the two runs."""
    facts = [{**run.head.setup, **msgspec.to_builtins(run.head.environment)} for run in (a, b)]
    hidden = {"question_ids", "origin", "started", "template"}
    lines = [
        f"{name}: {facts[0].get(name)!s:.60} and {facts[1].get(name)!s:.60}"
        for name in dict.fromkeys((*facts[0], *facts[1]))
        if name not in hidden and facts[0].get(name) != facts[1].get(name)
    ]
    asked = [set(one.get("question_ids") or ()) for one in facts]
    if only := len(asked[0] ^ asked[1]):
        lines.append(f"questions asked in one run alone, left out: {only}")
    return lines


def comparison_table(comparison: Comparison) -> list[list[str]]:
    """Return a comparison as rows, headings first."""
    rows = [["figure", "A", "B", "B / A", "B is"]]
    for one in comparison.differences:
        values = (f"{one.a:.3f}", f"{one.b:.3f}", shown(one.ratio, 3))
        rows.append([one.figure, *values, one.verdict])
    return rows
