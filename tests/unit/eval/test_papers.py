"""Papers as sheets: which directions are tested in which cells, and what is printed."""

from collections.abc import Callable, Sequence

import pytest

from eaglegbv.config import Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.papers.base import (
    AGAINST,
    AGREES,
    OPEN,
    Finding,
    Options,
    Report,
    findings_table,
)
from eaglegbv.eval.papers.cells import Cell, Figure, Run, Way
from eaglegbv.eval.papers.grids import GBV
from eaglegbv.eval.papers.registry import PAPERS, paper_named
from eaglegbv.eval.papers.sheets import (
    NOT_AT_HAND,
    GridPaper,
    Order,
    Quote,
    Rise,
    Sheet,
    Widening,
    cells_of,
    findings,
    sheet_tables,
)
from eaglegbv.eval.records import Setting
from eaglegbv.eval.statistics import Estimate
from eaglegbv.metrics import Phase

QUESTIONS = 8
RUN = Run(
    paper="gbv",
    options=Options(),
    model="/models/tiny",
    drafter="eagle3",
    dtype="float32",
    suite="mt-bench",
    origin="here",
    question_ids=("a", "b"),
    questions_sha256="",
)
GRIDS = {name: paper for name, paper in PAPERS.items() if isinstance(paper, GridPaper)}
SHEETS = [(name, sheet) for name, paper in GRIDS.items() for sheet in paper.sheets]


def cell(setting: Setting, tokens: float, *, verify: float = 1.0, draft: float = 1.0) -> Cell:
    """A cell of ``tokens`` a step, harder questions having fewer steps."""
    steps = tuple(10 + question for question in range(QUESTIONS))
    return Cell(
        setting=setting,
        tokens=tuple(tokens * count for count in steps),
        steps=steps,
        seconds={
            Phase.DRAFT: tuple(draft * count for count in steps),
            Phase.VERIFY: tuple(verify * count for count in steps),
        },
    )


def measured(sheet: Sheet, tokens: Callable[[Setting], float]) -> list[Cell]:
    return [cell(setting, tokens(setting)) for setting in sheet.settings]


def setting(verifier: str, paths: int = 1, depth: int = 4, temperature: float = 1.0) -> Setting:
    plan = Plan(verifier=verifier, paths=paths, depth=depth)
    return Setting(plan=plan, temperature=temperature)


def rank(one: Setting) -> float:
    """As the papers say of their grids: better verifiers, more paths, longer ones."""
    order = ["token", "block", "specinfer", "spectr", "traversal", "gbv", "otbv"]
    base = order.index(one.plan.verifier) if one.plan.verifier in order else 0
    lead = base * (1 + one.plan.depth / 10)
    return 2 + 0.1 * lead + 0.01 * one.plan.paths + 0.01 * one.plan.depth


def test_the_grid_of_gbv_has_a_finding_in_every_cell() -> None:
    [sheet] = [sheet for sheet in GBV.sheets if sheet.name == "grid"]
    cells = measured(sheet, rank)
    # One path for block, four for the six others, at five temperatures.
    assert len(cells) == 5 * (1 + 6 * 4)
    found = findings(sheet, cells)
    # gbv against four and otbv against six at every K and T, and two trends at every T.
    assert len(found) == 5 * (4 * 4 + 6 * 4 + 2)
    assert {one.verdict for one in found} == {AGREES}
    statements = [one.statement for one in found]
    assert len(set(statements)) == len(statements)
    assert "otbv K3 L8 T0.2 at least block K1 L8 T0.2" in statements
    assert "otbv K4 L8 at least otbv K1 L8" in statements
    against = findings(sheet, measured(sheet, lambda one: 9 - rank(one)))
    assert {one.verdict for one in against} == {AGAINST}
    report = GBV.report({"grid": measured(sheet, lambda one: 9 - rank(one))}, RUN)
    assert report.exceptions == tuple(against)
    assert GBV.report({}, RUN) == Report(tables=(), notes=(RUN.summary, *GBV.notes))
    assert "Target tiny, drafter eagle3, float32; 2 questions of mt-bench" in RUN.summary
    assert "5 places of each, 4 judgements of each tree" in RUN.summary


@pytest.mark.parametrize(("paper", "sheet"), SHEETS, ids=[f"{p}-{s.name}" for p, s in SHEETS])
def test_every_direction_and_quote_of_a_paper_finds_its_cells(paper: str, sheet: Sheet) -> None:
    del paper
    cells = measured(sheet, rank)
    for direction in sheet.directions:
        one = Sheet(sheet.name, sheet.title, sheet.way, sheet.settings, (direction,))
        if isinstance(direction, Order) and direction.better == direction.worse:
            pytest.fail("an order of one verifier")
        if isinstance(direction, Order) and direction.worse == "global_resolution":
            continue  # measured in one sheet only
        assert findings(one, cells), direction
        assert all(found.source for found in findings(one, cells))
    tables = sheet_tables(sheet, cells)
    assert all(len({len(row) for row in table.rows}) == 1 for table in tables)
    quoted = [row for table in tables if "at hand" in table.title for row in table.rows[1:]]
    assert [row[1] for row in quoted] == [quote.text for quote in sheet.quotes]
    notes = [note for table in tables for note in table.notes]
    assert sum(NOT_AT_HAND in note for note in notes) == 1


def test_orders_take_the_cell_of_the_same_setting() -> None:
    sheet = Sheet(
        "s",
        "t",
        Way.SAME_DRAFTS,
        cells_of(("block", "otbv"), paths=(1, 2), depths=(4, 6), temperatures=(0.5, 1.0)),
        (Order("otbv", "block", "x"),),
    )
    cells = measured(sheet, lambda one: 3 if one.plan.verifier == "otbv" else 2)
    found = findings(sheet, cells)
    assert len(found) == 2 * 2 * 2
    assert found[0].statement == "otbv K1 L4 T0.5 at least block K1 L4 T0.5"
    assert all(one.ratio == Estimate(1.5, 1.5, 1.5) for one in found)


def test_rises_go_from_the_least_to_the_most_or_as_they_say() -> None:
    settings = cells_of(("otbv",), paths=(2,), depths=(4, 8, 24), temperatures=(1.0,))
    speeds = {4: 2.0, 8: 4.0, 24: 3.0}
    cells = [cell(one, speeds[one.plan.depth]) for one in settings]

    def found(*rises: Rise) -> list[Finding]:
        return findings(Sheet("s", "t", Way.TIMED, settings, rises), cells)

    [up] = found(Rise("otbv", "depth", "x"))
    assert up.statement == "otbv K2 L24 at least otbv K2 L4"
    assert up.ratio == Estimate(1.5, 1.5, 1.5)
    [down] = found(Rise("otbv", "depth", "x", start=24, end=8, figure=Figure.TOKENS_A_SECOND))
    assert down.statement == "otbv K2 L8 at least otbv K2 L24 (tokens a second)"
    assert down.ratio is not None
    assert down.ratio.value == pytest.approx(4 / 3)
    assert found(Rise("otbv", "paths", "x"), Rise("otbv", "depth", "x", end=16)) == []


def test_a_widening_compares_leads() -> None:
    settings = cells_of(("token", "block"), depths=(4, 8), temperatures=(1.0,))
    tokens = {("token", 4): 2.0, ("block", 4): 2.2, ("token", 8): 2.5, ("block", 8): 3.0}
    cells = [cell(one, tokens[one.plan.verifier, one.plan.depth]) for one in settings]
    sheet = Sheet("s", "t", Way.SAME_DRAFTS, settings, (Widening("block", "token", "x"),))
    [one] = findings(sheet, cells)
    assert one.statement == "block K1 L8 / token K1 L8 at least block K1 L4 / token K1 L4"
    assert one.ratio is not None
    assert one.ratio.value == pytest.approx((3 / 2.5) / (2.2 / 2))


def test_figures_of_a_cell() -> None:
    fast = cell(setting("otbv"), 3.0, verify=0.5, draft=0.5)
    slow = cell(setting("spectr"), 2.0, verify=2.0, draft=2.0)
    assert fast.over(slow).value == pytest.approx(1.5)
    assert fast.over(slow, Figure.TOKENS_A_SECOND).value == pytest.approx(3 / 1 / (2 / 4))
    assert fast.over(slow, Figure.VERIFYING).value == pytest.approx((3 / 0.5) / (2 / 2))
    untimed = Cell(setting=setting("otbv"), tokens=(1.0,), steps=(1,))
    with pytest.raises(InvalidArgument, match="timed"):
        untimed.over(untimed, Figure.TOKENS_A_SECOND)
    joined = Cell.joined([fast, fast])
    assert joined.steps == fast.steps * 2
    assert joined.seconds[Phase.VERIFY] == fast.seconds[Phase.VERIFY] * 2
    assert joined.estimate().value == pytest.approx(3.0)


def test_quotes_stand_beside_ours() -> None:
    settings = cells_of(("token", "block"), depths=(4,), temperatures=(1.0,))
    quote = Quote(
        text="1.083",
        models="large models",
        source="a summary",
        better="block",
        worse="token",
        paths=1,
        depth=4,
        temperature=1.0,
    )
    sheet = Sheet("s", "Title", Way.SAME_DRAFTS, settings, quotes=(quote,))
    tables = sheet_tables(sheet, [cell(settings[0], 2.0), cell(settings[1], 2.5)])
    assert tables[0].rows == [
        ["tokens a step", "L = 4"],
        ["token K1", "2.000"],
        ["block K1", "2.500"],
    ]
    [row] = tables[-1].rows[1:]
    assert row[:3] == ["block / token, tokens a step", "1.083", "large models"]
    assert row[3:] == ["1.250", "block K1 L4"]
    assert "a summary" in tables[-1].notes[0]


def test_time_by_phase() -> None:
    settings = cells_of(("token",), depths=(4,), temperatures=(1.0,))
    sheet = Sheet("s", "Title", Way.TIMED, settings)
    tables = sheet_tables(sheet, [cell(settings[0], 2.0, verify=0.5, draft=1.5)])
    assert tables[1].rows == [
        ["milliseconds a token", "draft", "verify", "all", "verify / all"],
        ["token K1 L4", "750.000", "250.000", "1000.000", "25.0%"],
    ]


def test_what_cannot_be_told_apart_is_said() -> None:
    def finding(ratio: Estimate | None) -> Finding:
        return Finding(statement="x", source="y", ratio=ratio)

    ratios: Sequence[Estimate | None] = (None, Estimate(1.0, 1.0, 1.0), Estimate(1.1, 0.9, 1.2))
    assert {finding(ratio).verdict for ratio in ratios} == {OPEN}
    assert finding(Estimate(1.1, 1.05, 1.2)).verdict == AGREES
    assert findings_table([finding(Estimate(0.9, 0.85, 0.95)), finding(None)]) == [
        ["should be", "ratio", "measured"],
        ["x", "0.900 [0.850, 0.950]", AGAINST],
        ["x", "-", OPEN],
    ]


def test_papers_have_names() -> None:
    for name, paper in PAPERS.items():
        assert paper_named(name) is paper
        assert paper.title
    with pytest.raises(InvalidArgument, match="bv, gbv"):
        paper_named("nope")
