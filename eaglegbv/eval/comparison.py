"""Two settings compared question by question, of one run or two; and drafters on the same ones."""

from collections.abc import Sequence

import msgspec

from eaglegbv.config import Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.records import Record, Results
from eaglegbv.eval.report import with_interval
from eaglegbv.eval.statistics import (
    ACCEPTANCE_LENGTH,
    FIGURES,
    Acceptance,
    Estimate,
    paired_ratio,
    whole,
)

FEWEST = 2  # least number of questions for a bootstrap


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of two settings on the questions that both answered."""

    figure: str  # name of the figure
    a: float  # value in A, repeats pooled; likewise `b`
    b: float
    # B over A, with its 95% paired bootstrap interval over questions; None if A's value is 0.
    ratio: Estimate | None
    questions: int  # number of questions that both answered to the end

    @property
    def verdict(self) -> str:
        """Whether the interval excludes equality."""
        if self.ratio is None or self.questions < FEWEST:
            return "cannot be told"
        return self.ratio.told("higher", "lower", "no difference shown")


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two settings, B compared with A, and a difference for each figure."""

    a: str
    b: str
    differences: tuple[Difference, ...]


def side(results: Results, setting: str) -> list[Record]:
    """Return the records of a setting.

    Raises:
        InvalidArgument: The run has no such setting, or has measured nothing in it.
    """
    records = [record for record in results.records if record.setting == setting]
    if not records:
        known = sorted({record.setting for record in results.records})
        raise InvalidArgument("setting", setting, f"one of those measured: {', '.join(known)}")
    return records


def compare(a: Sequence[Record], b: Sequence[Record]) -> Comparison:
    """Return every figure of both sides, and B over A with its paired interval.

    Both sides are from :func:`side`. Questions are resampled as a whole, with the same draw for
    both, so what makes a question easy or hard for both cancels out. Repeats are pooled.

    Raises:
        InvalidArgument: No question was answered to its end on both sides.
    """
    names = [a[0].setting, b[0].setting]
    shared = set.intersection(*({record.question_id for record in whole(own)} for own in (a, b)))
    if not shared:
        expected = "two with questions that both answered to the end"
        raise InvalidArgument("settings", names, expected)
    theirs, ours = ([one for one in whole(own) if one.question_id in shared] for own in (a, b))
    differences = tuple(
        Difference(
            figure=figure.name,
            a=base,
            b=figure.of(ours),
            ratio=paired_ratio(figure, ours, theirs) if base else None,
            questions=len(shared),
        )
        for figure in FIGURES.values()
        for base in (figure.of(theirs),)
    )
    return Comparison(a=names[0], b=names[1], differences=differences)


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
        f"{field}: {getattr(mine, field)!s:.60} and {getattr(theirs, field)!s:.60}"
        for mine, theirs in ((a.settings, b.settings), (a.environment, b.environment))
        for field in mine.__struct_fields__
        if field not in {"settings", "question_ids", "origin", "started"}
        and getattr(mine, field) != getattr(theirs, field)
    ]
    only = len(set(a.settings.question_ids) ^ set(b.settings.question_ids))
    if only:
        lines.append(f"questions asked in one run alone, left out: {only}")
    return lines


def table(comparison: Comparison) -> list[list[str]]:
    """Return a comparison as rows, headings first."""
    rows = [["figure", "A", "B", "B / A", "B is"]]
    for one in comparison.differences:
        values = (f"{one.a:.3f}", f"{one.b:.3f}", with_interval(one.ratio, 3))
        rows.append([one.figure, *values, one.verdict])
    return rows


# Drafters: what a verifier accepts of each, by depth and by category.


class DrafterReport(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one drafter with one plan."""

    name: str  # name under which it is shown
    drafter: str  # its name or folder
    plan: Plan
    acceptance: Acceptance  # counts over all conversations
    length: Estimate  # acceptance length with its 95% bootstrap interval over questions
    # Acceptance length over the first drafter's with the same plan, paired by question; None for
    # the first.
    ratio: Estimate | None
    by_category: dict[str, Acceptance]
    errors: int  # number of conversations that broke off; they do not enter any figure


def drafter_report(
    name: str,
    drafter: str,
    plan: Plan,
    records: Sequence[Record],
    first: Sequence[Record] | None = None,
) -> DrafterReport:
    """Count what was accepted; ``first`` are records of the drafter to compare with, if any."""
    held = whole(records)

    def accepted(category: str | None = None) -> Acceptance:
        kept = [one for one in held if category in (None, one.category)]
        return Acceptance.of([turn.metrics for one in kept for turn in one.turns], plan.depth)

    return DrafterReport(
        name=name,
        drafter=drafter,
        plan=plan,
        acceptance=accepted(),
        length=ACCEPTANCE_LENGTH.pooled(held),
        ratio=None if first is None else paired_ratio(ACCEPTANCE_LENGTH, held, first),
        by_category={name: accepted(name) for name in dict.fromkeys(r.category for r in held)},
        errors=len(records) - len(held),
    )


def depth_table(reports: Sequence[DrafterReport]) -> list[list[str]]:
    """Return a row for each report: its acceptance length, and the shares by depth."""
    deepest = max(one.plan.depth for one in reports)
    headings = ["drafter", "verifier", "K", "acceptance length", "ratio"]
    rows = [[*headings, *(f"{depth} or more" for depth in range(1, deepest + 1))]]
    for one in reports:
        shares = [f"{share:.3f}" for share in one.acceptance.shares]
        figures = [with_interval(one.length, 3), with_interval(one.ratio, 3), *shares]
        rows.append([*_named(one), *figures, *[""] * (deepest - len(shares))])
    return rows


def category_table(reports: Sequence[DrafterReport]) -> list[list[str]]:
    """Return a row for each report: its acceptance length in each category."""
    categories = list(dict.fromkeys(c for one in reports for c in one.by_category))
    rows = [["drafter", "verifier", "K", *categories]]
    for one in reports:
        parts = one.by_category
        rows.append(
            [*_named(one), *(f"{parts[c].length:.3f}" if c in parts else "-" for c in categories)]
        )
    return rows


def _named(one: DrafterReport) -> list[str]:
    return [one.name, one.plan.verifier, str(one.plan.paths)]
