from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.table_pairs import counted, question_set, random_texts, table_pair

from eaglegbv.config import Plan
from eaglegbv.errors import EagleGBVError, InvalidArgument
from eaglegbv.eval.node_acceptance import RULES
from eaglegbv.eval.paired_comparison import Cell, Figure, Sampling, Text
from eaglegbv.eval.papers import cells as module
from eaglegbv.eval.papers import sheets
from eaglegbv.eval.papers.cells import CellStore, Measured, Options, Run, Site, Way, measure_cells
from eaglegbv.eval.papers.grids import GBV, GR_SOLVERS, MDSD, PAPERS, nodes_of
from eaglegbv.eval.papers.sheets import AGAINST, AGREES, OPEN, Finding, Order, Paper, Quote, Sheet
from eaglegbv.eval.records import Setting
from eaglegbv.eval.statistics import Estimate
from eaglegbv.metrics import Phase, RequestMetrics
from eaglegbv.request import FinishReason
from eaglegbv.text import Completion
from eaglegbv.tree import DraftSampling
from eaglegbv.verifiers.global_resolution import Solver, solve

QUESTIONS = question_set(20)
SETTINGS = tuple(
    Setting(plan=Plan(verifier=name, paths=1), temperature=temperature)
    for temperature in (0.5, 1.0)
    for name in ("block", "otbv")
)


@dataclass
class FakeLLM:
    """Answers every question with as many tokens as its plan's verifier has letters."""

    model_name: str = "target"
    drafter_name: str = "drafter"
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    pair: object = None
    fails: bool = False
    asked: list[tuple[str, int]] = field(default_factory=list)

    def generate(self, prompts: list, params: list, *, plan: Plan) -> list[Completion]:
        self.asked.append((plan.verifier, len(prompts)))
        metrics = RequestMetrics(
            committed_tokens=len(plan.verifier),
            target_forwards=2,
            seconds={Phase.PREFILL: 5.0, Phase.VERIFY: 0.25, Phase.FORWARD: 1.0},
        )
        reason = FinishReason.ERROR if self.fails else FinishReason.LENGTH
        error = "too long" if self.fails else None
        return [Completion(finish_reason=reason, error=error, metrics=metrics) for _ in prompts]


def site(folder: Path, llm: Any, **options: Any) -> Site:
    return Site(folder, QUESTIONS, Options(**options), llm, counted)


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Stand-ins for reading texts and judging drafts; the names of the texts judged."""
    judged: list[tuple[str, ...]] = []

    def collect(_: object, questions, *, temperature, **rest) -> list[Text]:
        del rest
        judged.append((f"texts of T{temperature:g}", questions[0].id))
        return [Text(name=q.id, seed=0, prompt_ids=(1,), token_ids=(1, 2)) for q in questions]

    def judge(_: object, texts, settings, sampling: Sampling) -> list[Cell]:
        if len(judged) == 5:
            judged.append(())
            raise KeyboardInterrupt
        judged.append(tuple(text.name for text in texts))
        return [
            Cell(
                setting=s,
                tokens=tuple(len(s.plan.verifier) + s.temperature for _ in texts),
                steps=(sampling.places,) * len(texts),
                nodes=(0.0,) * len(texts),
            )
            for s in settings
        ]

    monkeypatch.setattr(module, "collect", collect)
    monkeypatch.setitem(module.AT_PLACES, Way.SAME_DRAFTS, judge)
    return judged


def test_a_killed_run_goes_on_where_it_stopped(tmp_path, drafts) -> None:
    here = site(tmp_path, FakeLLM(), places=3)

    def measure() -> list[Cell]:
        store = CellStore(here, "bv")
        cells = measure_cells(here, store, "sheet", Way.SAME_DRAFTS, SETTINGS)
        store.publish({"sheet": cells})
        return cells

    names = tuple(q.id for q in QUESTIONS.questions)
    with pytest.raises(KeyboardInterrupt):
        measure()
    # Texts are read part by part, and the third was not judged any more.
    assert drafts == [
        ("texts of T0.5", "q0"),
        names[:16],
        ("texts of T1", "q0"),
        names[:16],
        ("texts of T0.5", "q16"),
        (),
    ]
    # A line that a kill cut short is measured again.
    with (tmp_path / "parts.jsonl").open("ab") as file:
        file.write(b'{"sheet": "sh')
    cells = measure()
    assert drafts[6:] == [names[16:], ("texts of T1", "q16"), names[16:]]
    assert [cell.setting for cell in cells] == list(SETTINGS)
    for cell in cells:
        plan, temperature = cell.setting.plan, cell.setting.temperature
        assert cell.tokens == (len(plan.verifier) + temperature,) * 20
        assert cell.steps == (3,) * 20
    assert measure() == cells
    assert len(drafts) == 9
    found = msgspec.json.decode((tmp_path / "cells.json").read_bytes(), type=Measured)
    assert found.sheets == {"sheet": cells}
    assert found.run.paper == "bv"
    assert found.run.questions_sha256 == QUESTIONS.sha256
    assert found.environment.versions["torch"]


@pytest.mark.parametrize(("way", "together"), [(Way.ENGINE, 16), (Way.TIMED, 1)])
def test_engines_answer_every_question_in_every_setting(tmp_path, way, together) -> None:
    llm = FakeLLM()
    here = site(tmp_path, llm, engine_questions=18)
    cells = measure_cells(here, CellStore(here, "bv"), "sheet", way, SETTINGS)
    assert sum(count for _, count in llm.asked) == 18 * len(SETTINGS)
    assert max(count for _, count in llm.asked) == together
    # The setting that begins changes.
    assert llm.asked[0][0] != llm.asked[len(SETTINGS)][0]
    for cell in cells:
        assert cell.tokens == (float(len(cell.setting.plan.verifier)),) * 18
        assert cell.steps == (2,) * 18
        assert Phase.PREFILL not in cell.seconds
        assert cell.seconds[Phase.VERIFY] == (0.25,) * 18
        assert cell.seconds[Phase.DRAFT] == (0.0,) * 18
    asked = len(llm.asked)
    again = measure_cells(here, CellStore(here, "bv"), "sheet", way, SETTINGS)
    assert again == cells
    assert len(llm.asked) == asked


def test_a_question_that_is_not_answered_is_an_error(tmp_path: Path) -> None:
    here = site(tmp_path, FakeLLM(fails=True))
    with pytest.raises(EagleGBVError, match="q0: too long"):
        measure_cells(here, CellStore(here, "bv"), "sheet", Way.TIMED, SETTINGS)


# --- papers as sheets: which directions are tested in which cells, and what is printed
COUNT = 8
RUN = Run(
    paper="gbv",
    options=Options(),
    model="/models/tiny",
    drafter="eagle3",
    dtype="float32",
    suite="mt-bench",
    origin="here",
    question_ids=("a", "b"),
)
SHEETS = [(name, sheet) for name, paper in PAPERS.items() for sheet in paper.sheets]


def cell(setting: Setting, tokens: float, *, verify: float = 1.0, draft: float = 1.0) -> Cell:
    """A cell of ``tokens`` a step, harder questions having fewer steps."""
    steps = tuple(10 + question for question in range(COUNT))
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
    return [cell(one, tokens(one), verify=1e-4, draft=1e-4) for one in sheet.settings]


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
    found = sheets.findings(sheet, cells)
    # gbv against four and otbv against six at every K and T, and two trends at every T.
    assert len(found) == 5 * (4 * 4 + 6 * 4 + 2)
    assert {one.verdict for one in found} == {AGREES}
    statements = [one.statement for one in found]
    assert len(set(statements)) == len(statements)
    assert "otbv K3 L8 T0.2 at least block K1 L8 T0.2" in statements
    assert "otbv K4 L8 at least otbv K1 L8" in statements
    against = sheets.findings(sheet, measured(sheet, lambda one: 9 - rank(one)))
    assert {one.verdict for one in against} == {AGAINST}
    report = GBV.report({"grid": measured(sheet, lambda one: 9 - rank(one))}, RUN)
    assert report.exceptions == tuple(against)
    assert GBV.report({}, RUN) == sheets.Report(tables=(), notes=(RUN.summary, *GBV.notes))
    assert "Target tiny, drafter eagle3, float32; 2 questions of mt-bench" in RUN.summary
    assert "5 places of each, 4 judgements of each tree" in RUN.summary


@pytest.mark.parametrize(("paper", "sheet"), SHEETS, ids=[f"{p}-{s.name}" for p, s in SHEETS])
def test_every_direction_and_quote_of_a_paper_finds_its_cells(paper: str, sheet: Sheet) -> None:
    del paper
    cells = measured(sheet, rank)
    for direction in sheet.directions:
        one = replace(sheet, directions=(direction,))
        if isinstance(direction, Order) and direction.better == direction.worse:
            pytest.fail("an order of one verifier")
        if isinstance(direction, Order) and direction.worse == "global_resolution":
            continue  # measured in one sheet only
        assert sheets.findings(one, cells), direction
        assert all(found.source for found in sheets.findings(one, cells))
    tables = sheets.sheet_tables(sheet, cells)
    assert all(len({len(row) for row in table.rows}) == 1 for table in tables)
    quoted = [row for table in tables if "at hand" in table.title for row in table.rows[1:]]
    assert [row[1] for row in quoted] == [quote.text for quote in sheet.quotes]
    best = [(row[0], row[1], row[-1]) for table in tables for row in table.rows[1:]]
    for limit, figures in sheet.limits.items():
        assert all((f"{limit:g}", *figure) in best for figure in figures.items())
    notes = [note for table in tables for note in table.notes]
    assert sum(sheets.NOT_AT_HAND in note for note in notes) == 1


def test_figures_of_a_cell() -> None:
    fast = cell(setting("otbv"), 3.0, verify=0.5, draft=0.5)
    slow = cell(setting("spectr"), 2.0, verify=2.0, draft=2.0)
    assert fast.over(slow).value == pytest.approx(1.5)
    assert fast.over(slow, Figure.TOKENS_A_SECOND).value == pytest.approx(3 / 1 / (2 / 4))
    assert fast.over(slow, Figure.VERIFYING).value == pytest.approx((3 / 0.5) / (2 / 2))
    assert fast.over(slow, Figure.STEPS_A_SECOND).value == pytest.approx(4)
    untimed = Cell(setting=setting("otbv"), tokens=(1.0,), steps=(1,))
    with pytest.raises(InvalidArgument, match="timed"):
        untimed.over(untimed, Figure.TOKENS_A_SECOND)
    joined = Cell.joined([fast, fast])
    assert joined.steps == fast.steps * 2
    assert joined.seconds[Phase.VERIFY] == fast.seconds[Phase.VERIFY] * 2
    assert joined.estimate().value == pytest.approx(3.0)
    # What a solver refused in one part is refused.
    refused = msgspec.structs.replace(fast, tokens=(), steps=(), seconds={})
    assert Cell.joined([refused, fast]) == refused


def test_quotes_stand_beside_ours() -> None:
    settings = sheets.cells_of(("token", "block"), depths=(4,), temperatures=(1.0,))
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
    tables = sheets.sheet_tables(sheet, [cell(settings[0], 2.0), cell(settings[1], 2.5)])
    rows = [["tokens a step", "L = 4"], ["token K1", "2.000"], ["block K1", "2.500"]]
    assert tables[0].rows == rows
    [row] = tables[-1].rows[1:]
    assert row[:3] == ["block / token, tokens a step", "1.083", "large models"]
    assert row[3:] == ["1.250", "block K1 L4"]
    assert "a summary" in tables[-1].notes[0]
    timed = Sheet("s", "Title", Way.TIMED, settings[:1])
    assert sheets.sheet_tables(timed, [cell(settings[0], 2.0, verify=0.5, draft=1.5)])[1].rows == [
        ["milliseconds a token", "draft", "verify", "all", "verify / all"],
        ["token K1 L4", "750.000", "250.000", "1000.000", "25.0%"],
    ]


def test_what_cannot_be_told_apart_is_said() -> None:
    def finding(ratio: Estimate | None) -> Finding:
        return Finding(statement="x", source="y", ratio=ratio)

    # Two solvers at one optimum differ by their tolerances: rounding tells nothing apart.
    rounded = Estimate(1 - 1e-9, 1 - 2e-9, 1 - 1e-10)
    ratios = (None, Estimate(1.0, 1.0, 1.0), Estimate(1.1, 0.9, 1.2), rounded)
    assert {finding(ratio).verdict for ratio in ratios} == {OPEN}
    assert finding(Estimate(1.1, 1.05, 1.2)).verdict == AGREES
    assert sheets.findings_table([finding(Estimate(0.9, 0.85, 0.95)), finding(None)]) == [
        ["should be", "ratio", "measured"],
        ["x", "0.900 [0.850, 0.950]", AGAINST],
        ["x", "-", OPEN],
    ]


# --- papers on one node: solvers and draft samplings on distributions of a pair of tables
VOCAB = 8


@pytest.fixture
def table_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    questions = question_set(6)
    texts = random_texts(VOCAB, count=len(questions.questions), length=9)
    monkeypatch.setattr(module, "collect", lambda *_, **__: texts)
    return replace(site(tmp_path, FakeLLM(pair=table_pair(VOCAB)), places=4), questions=questions)


def on_tables(own: Site, *wanted: Sheet) -> tuple[sheets.Report, dict[str, list[Cell]]]:
    report = Paper("small", "t", wanted).measure(own).report
    content = (own.folder / "cells.json").read_bytes()
    return report, msgspec.json.decode(content, type=Measured).sheets


def test_the_solvers_paper_end_to_end(table_site: Site) -> None:
    solvers, sizes = tuple(map(str, Solver)), ((4, 2), (VOCAB, 3))
    own, _ = GR_SOLVERS.sheets
    sheet = Sheet(
        "s", "t", Way.SOLVERS, nodes_of(solvers, sizes), own.directions, limits={1e6: {"lp": "82%"}}
    )
    report, found = on_tables(table_site, sheet)
    best = {(c.setting.plan.draft_width, c.setting.plan.verifier): c.mean for c in found["s"]}
    for cell in found["s"]:
        plan = cell.setting.plan
        assert cell.steps == (1,) * 10
        assert cell.mean == pytest.approx(best[plan.draft_width, "exact"], abs=1e-3)
    accepted, _, times, within = report.tables
    assert len(accepted.rows) == len(times.rows) == 1 + len(solvers)
    # All are in time, so each takes the size it accepts most at: the whole distribution, three
    # drafts.
    assert {line[3] for line in within.rows[1:]} == {
        f"exact K3 L1 W{VOCAB}".replace("exact", s) for s in solvers
    }
    assert [line[-1] for line in within.rows if line[1] == "lp"] == ["82%"]
    speeds = [f.statement for f in report.findings if "nodes a second" in f.statement]
    assert sum(one.startswith("exact") for one in speeds) == 2 * 3


def test_a_node_too_large_for_a_solver_leaves_its_cell_empty(
    table_site, monkeypatch, request
) -> None:
    solve.cache_clear()  # other tests solve the same nodes, by another limit
    request.addfinalizer(solve.cache_clear)
    monkeypatch.setattr("eaglegbv.verifiers.global_resolution.MOST_SETS", 1)
    own, _ = GR_SOLVERS.sheets
    sheet = Sheet("s", "t", Way.SOLVERS, nodes_of(("exact", "lp"), ((4, 2),)), own.directions)
    report, found = on_tables(table_site, sheet)
    assert [len(cell.steps) for cell in found["s"]] == [10, 0]
    assert report.tables[0].rows[1][0] == "exact K2"
    assert len(report.tables[0].rows) == 2
    assert report.findings == ()


def test_the_draft_distributions_paper_end_to_end(table_site: Site) -> None:
    heats, drafts, _ = MDSD.sheets
    temperatures = nodes_of(tuple(RULES), ((VOCAB, 3),), (0.4, 0.7))
    numbers = nodes_of(tuple(RULES), ((VOCAB, 2), (VOCAB, 4)), (0.7,))
    lead = sheets.Rise("greedy", "temperature", "notes", 0.7, 0.4, over="optimum")
    plan = Plan(verifier="greedy_draft", draft_sampling=DraftSampling.GREEDY, paths=2, depth=2)
    report, found = on_tables(
        table_site,
        Sheet("a", "By temperature", Way.NODES, temperatures, (*heats.directions[:5], lead)),
        Sheet("b", "By number", Way.NODES, numbers, drafts.directions),
        Sheet("c", "Trees", Way.SAME_DRAFTS, (Setting(plan=plan, temperature=0.7),)),
    )
    for cell in [*found["a"], *found["b"]]:
        assert cell.steps == (4,) * 6
        assert 0 < cell.mean <= 1 + 1e-12
    theorem = [f for f in report.findings if f.source.startswith("a theorem")]
    assert len(theorem) == 4 * 3
    assert all(f.ratio is not None and f.ratio.value >= 0.99 for f in theorem)
    verdicts = {f.statement: f.verdict for f in report.findings}
    assert verdicts["optimum w/o K3 L1 W8 T0.7 at least optimum K3 L1 W8 T0.7"] == AGREES
    means = {c.setting.name: c.mean for c in found["a"]}
    [leads] = [f for f in report.findings if f.source == "notes"]
    assert leads.ratio.value == pytest.approx(
        (means["greedy K3 L1 W8 T0.4"] / means["optimum K3 L1 W8 T0.4"])
        / (means["greedy K3 L1 W8 T0.7"] / means["optimum K3 L1 W8 T0.7"])
    )
    by_temperature, by_number, trees = report.tables
    assert [table.rows[0] for table in (by_temperature, by_number)] == [
        ["acceptance", "T = 0.4", "T = 0.7"],
        ["acceptance", "K = 2", "K = 4"],
    ]
    assert [len(t.rows) for t in (by_temperature, by_number)] == [1 + len(RULES)] * 2
    assert trees.rows[1][0] == "greedy_draft greedy K2"
