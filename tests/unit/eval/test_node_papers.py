"""Papers on one node: solvers and draft samplings on distributions of a pair of tables."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.table_pairs import counted, question_set, random_texts, table_pair

from eaglegbv.config import Plan
from eaglegbv.eval.node_acceptance import RULES
from eaglegbv.eval.paired_comparison import Cell
from eaglegbv.eval.papers import cells
from eaglegbv.eval.papers.cells import Options, Site, Way
from eaglegbv.eval.papers.grids import GR_SOLVERS, MDSD, nodes_of
from eaglegbv.eval.papers.sheets import AGREES, Paper, Report, Rise, Sheet
from eaglegbv.eval.records import Setting
from eaglegbv.loading import Pair
from eaglegbv.tree import DraftSampling
from eaglegbv.verifiers.global_resolution import Solver

VOCAB = 8
QUESTIONS = question_set(6)


@dataclass
class TableLLM:
    """What a paper asks of an LLM, on tables."""

    pair: Pair
    model_name: str = "target"
    drafter_name: str = "table"
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    texts = random_texts(VOCAB, count=len(QUESTIONS.questions), length=9)
    monkeypatch.setattr(cells, "collect", lambda *_, **__: texts)
    llm: Any = TableLLM(table_pair(VOCAB))
    return Site(tmp_path, QUESTIONS, Options(places=4), lambda: llm, counted)


def measured(site: Site, *sheets: Sheet) -> tuple[Report, dict[str, list[Cell]]]:
    report = Paper("small", "t", sheets).measure(site).report
    content = (site.folder / "cells.json").read_bytes()
    return report, msgspec.json.decode(content, type=cells.Measured).sheets


def test_the_solvers_paper_end_to_end(site: Site) -> None:
    solvers, sizes = tuple(map(str, Solver)), ((4, 2), (VOCAB, 3))
    own, _ = GR_SOLVERS.sheets
    sheet = Sheet(
        "s", "t", Way.SOLVERS, nodes_of(solvers, sizes), own.directions, limits={1e6: {"lp": "82%"}}
    )
    report, found = measured(site, sheet)
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
    assert sum(one.startswith("exact") for one in speeds) == 2 * 4


def test_a_node_too_large_for_a_solver_leaves_its_cell_empty(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eaglegbv.verifiers.global_resolution.MOST_SETS", 1)
    own, _ = GR_SOLVERS.sheets
    sheet = Sheet("s", "t", Way.SOLVERS, nodes_of(("exact", "lp"), ((4, 2),)), own.directions)
    report, found = measured(site, sheet)
    assert [len(cell.steps) for cell in found["s"]] == [10, 0]
    assert report.tables[0].rows[1][0] == "exact K2"
    assert len(report.tables[0].rows) == 2
    assert report.findings == ()


def test_the_draft_distributions_paper_end_to_end(site: Site) -> None:
    heats, drafts, _ = MDSD.sheets
    temperatures = nodes_of(tuple(RULES), ((VOCAB, 3),), (0.4, 0.7))
    numbers = nodes_of(tuple(RULES), ((VOCAB, 2), (VOCAB, 4)), (0.7,))
    lead = Rise("greedy", "temperature", "notes", 0.7, 0.4, over="optimum")
    plan = Plan(verifier="greedy_draft", draft_sampling=DraftSampling.GREEDY, paths=2, depth=2)
    report, found = measured(
        site,
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
    assert leads.ratio is not None
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
