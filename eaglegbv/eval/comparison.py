"""Comparison of two settings question by question, within a run or between two runs."""

from collections.abc import Sequence

import msgspec

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.records import Environment, Record, Results, RunSettings
from eaglegbv.eval.report import with_interval
from eaglegbv.eval.statistics import FIGURES, Estimate, Figure, SideOfOne, paired_ratio, whole

FEWEST = 2
"""Least number of questions for a bootstrap."""

WORDS = {
    SideOfOne.ABOVE: "higher",
    SideOfOne.BELOW: "lower",
    SideOfOne.OPEN: "no difference shown",
}


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """The records of one setting of a run.

    Attributes:
        setting: Name of the setting.
        records: Conversations in this setting.
    """

    setting: str
    records: tuple[Record, ...]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of two settings on the questions that both answered.

    Attributes:
        figure: Name of the figure.
        a: Value in A, repeats pooled.
        b: Value in B, repeats pooled.
        ratio: B over A, with its 95% paired bootstrap interval over questions; None if A's value
            is 0.
        questions: Number of questions that both answered to the end.
    """

    figure: str
    a: float
    b: float
    ratio: Estimate | None
    questions: int

    @property
    def verdict(self) -> str:
        """Whether the interval excludes equality."""
        if self.ratio is None or self.questions < FEWEST:
            return "cannot be told"
        return WORDS[self.ratio.side_of_one()]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two settings and the figures that tell them apart.

    Attributes:
        a: Name of the setting that the other is compared with.
        b: Name of the other setting.
        differences: One for each figure.
    """

    a: str
    b: str
    differences: tuple[Difference, ...]


def side(results: Results, setting: str) -> Side:
    """Return the records of a setting.

    Raises:
        InvalidArgument: The run has no such setting, or has measured nothing in it.
    """
    records = tuple(record for record in results.records if record.setting == setting)
    if not records:
        known = sorted({record.setting for record in results.records})
        raise InvalidArgument("setting", setting, f"one of those measured: {', '.join(known)}")
    return Side(setting=setting, records=records)


def compare(a: Side, b: Side) -> Comparison:
    """Return every figure of both sides, and B over A with its paired interval.

    Questions are resampled as a whole, with the same draw for both sides, so what makes a question
    easy or hard for both cancels out. Repeats are pooled.

    Raises:
        InvalidArgument: No question was answered to its end on both sides.
    """
    shared = _questions(a.records) & _questions(b.records)
    if not shared:
        raise InvalidArgument(
            "settings", [a.setting, b.setting], "two with questions that both answered to the end"
        )
    ours, theirs = (_only(records, shared) for records in (b.records, a.records))
    return Comparison(
        a=a.setting,
        b=b.setting,
        differences=tuple(
            _difference(figure, theirs, ours, len(shared)) for figure in FIGURES.values()
        ),
    )


def compare_runs(a: Results, b: Results) -> list[Comparison]:
    """Compare all settings that both runs have measured, matched by name.

    Raises:
        InvalidArgument: The runs share no setting, or no question.
    """
    measured = [{record.setting for record in results.records} for results in (a, b)]
    shared = [s.name for s in a.settings.settings if all(s.name in names for names in measured)]
    if not shared:
        names = [sorted(names) for names in measured]
        raise InvalidArgument("settings", names, "at least one in both runs, or --setting-a and -b")
    return [compare(side(a, name), side(b, name)) for name in shared]


def unlike(a: Results, b: Results) -> list[str]:
    """Return a line for each other difference between the two runs."""
    lines = [
        f"{field}: {_short(getattr(a.settings, field))} and {_short(getattr(b.settings, field))}"
        for field in RunSettings.__struct_fields__
        if field not in {"settings", "question_ids", "origin"}
        and getattr(a.settings, field) != getattr(b.settings, field)
    ]
    lines += [
        f"{field}: {_short(getattr(a.environment, field))} and "
        f"{_short(getattr(b.environment, field))}"
        for field in Environment.__struct_fields__
        if field != "started" and getattr(a.environment, field) != getattr(b.environment, field)
    ]
    only = len(set(a.settings.question_ids) ^ set(b.settings.question_ids))
    if only:
        lines.append(f"questions asked in one run alone, left out: {only}")
    return lines


def table(comparison: Comparison) -> list[list[str]]:
    """Return a comparison as rows, headings first."""
    rows = [["figure", "A", "B", "B / A", "B is"]]
    for one in comparison.differences:
        ratio = "-" if one.ratio is None else with_interval(one.ratio, 3)
        rows.append([one.figure, f"{one.a:.3f}", f"{one.b:.3f}", ratio, one.verdict])
    return rows


def _difference(
    figure: Figure, a: Sequence[Record], b: Sequence[Record], questions: int
) -> Difference:
    base = figure.pooled(a).value
    return Difference(
        figure=figure.name,
        a=base,
        b=figure.pooled(b).value,
        ratio=paired_ratio(figure, b, a) if base else None,
        questions=questions,
    )


def _questions(records: Sequence[Record]) -> set[str]:
    return {record.question_id for record in whole(records)}


def _only(records: Sequence[Record], questions: set[str]) -> list[Record]:
    return [record for record in whole(records) if record.question_id in questions]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
