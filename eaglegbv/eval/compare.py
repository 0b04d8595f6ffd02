"""Two settings compared question by question, of one run or two."""

from collections.abc import Iterator
from itertools import chain

import msgspec

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.figures import CONVERSATIONS, FEWEST, RATIO_DIGITS, Estimate, Sums
from eaglegbv.eval.observations import Observation, Run
from eaglegbv.eval.tables import Cell, Table

HIDDEN = {"question_ids", "origin", "started", "template"}
"""Facts of a run that may differ from another's unsaid."""


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

    @property
    def row(self) -> list[Cell]:
        """It as a row of a table."""
        values = (Estimate.exactly(value, RATIO_DIGITS) for value in (self.a, self.b))
        return [self.figure, *values, self.ratio, self.verdict]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two settings, B compared with A, and a difference for each figure."""

    a: str
    b: str
    questions: int  # that both answered to the end
    differences: list[Difference]

    @property
    def table(self) -> Table:
        """It as a table."""
        rows = [one.row for one in self.differences]
        return Table(rows=[["figure", "A", "B", "B / A", "B is"], *rows])


def compared_runs(a: Run, b: Run, setting_a: str | None, setting_b: str | None) -> list[Comparison]:
    """Compare all settings that both runs have measured, or one of each.

    Raises:
        InvalidArgument: A run has not measured a setting, or they share no setting or question.
    """
    sums = Sums(chain(_side("A ", a), _side("B ", b)))
    of_a, of_b = ([n[2:] for n in sums.settings if n.startswith(side)] for side in ("A ", "B "))
    if setting_a is None or setting_b is None:
        shared = [name for name in of_a if name in of_b]
        if not shared:
            expected = "at least one in both runs, or --setting-a and -b"
            raise InvalidArgument("settings", [of_a, of_b], expected)
        return [_compared(sums, name, name) for name in shared]
    for name, known in ((setting_a, of_a), (setting_b, of_b)):
        if name not in known:
            expected = f"one of those measured: {', '.join(sorted(known))}"
            raise InvalidArgument("setting", name, expected)
    return [_compared(sums, setting_a, setting_b)]


def _side(side: str, run: Run) -> Iterator[Observation]:
    for sheet in run.sheets:
        for one in run.observations(sheet):
            yield msgspec.structs.replace(one, setting=side + one.setting)


def _compared(sums: Sums, a: str, b: str) -> Comparison:
    sides = base, other = f"A {a}", f"B {b}"
    units = {unit for _, unit in sums.shared(*sides)}
    if not units:
        expected = "two with questions that both answered to the end"
        raise InvalidArgument("settings", [a, b], expected)
    differences = []
    for figure in CONVERSATIONS:
        if all(sums.total(side, figure.below) for side in sides):
            values = [sums.ratio(figure, [side], (), *sides).value for side in sides]
            ratio = sums.over(figure, other, base) if values[0] else None
            one = Difference(figure=figure.name, a=values[0], b=values[1], ratio=ratio)
            differences.append(one)
    return Comparison(a=a, b=b, questions=len(units), differences=differences)


def unlike(a: Run, b: Run) -> list[str]:
    """Return a line for each other difference between the two runs."""
    one, other = ({**run.head.setup, **msgspec.to_builtins(run.head.environment)} for run in (a, b))
    lines = [
        f"{name}: {one.get(name)!s:.60} and {other.get(name)!s:.60}"
        for name in (one | other)
        if name not in HIDDEN and one.get(name) != other.get(name)
    ]
    asked = [set(facts.get("question_ids") or ()) for facts in (one, other)]
    if only := len(asked[0] ^ asked[1]):
        lines.append(f"questions asked in one run alone, left out: {only}")
    return lines
