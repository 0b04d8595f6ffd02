"""Papers on one node: solvers and draft samplings on distributions of a pair of tables."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.table_pairs import counted, question_set, random_texts, table_pair

from eaglegbv.config import Plan
from eaglegbv.eval.collect_probs import Harvest
from eaglegbv.eval.node_acceptance import NodeProbs
from eaglegbv.eval.papers import base, cells, global_resolution, mdsd
from eaglegbv.eval.papers.base import AGAINST, AGREES, OPEN, Options, Site
from eaglegbv.eval.papers.mdsd import (
    MDSD,
    ORDERS,
    Accepted,
    NodePaper,
    accepted,
    order_findings,
)
from eaglegbv.eval.records import Setting
from eaglegbv.eval.solvers import Answer, Row
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
    for module in (base, cells):
        monkeypatch.setattr(module, "collect", lambda *_, **__: texts)
    llm: Any = TableLLM(table_pair(VOCAB))
    return Site(tmp_path, QUESTIONS, Options(places=4), lambda: llm, counted)


def test_the_solvers_paper_end_to_end(site: Site) -> None:
    paper = global_resolution.SolverPaper(
        name="gr-small",
        title="t",
        temperature=1.0,
        sizes=((4, 2), (VOCAB, 3)),
        nodes=5,
        limits=(1e6,),
    )
    report = paper.measure(site)
    written = json.loads((site.folder / "solvers.json").read_bytes())
    assert (written["model"], written["questions"]) == ("target", len(QUESTIONS.questions))
    rows = msgspec.convert(written["rows"], list[Row])
    assert {(r.width, r.drafts, r.solver) for r in rows} == {
        (k, n, str(solver)) for k, n in ((4, 2), (VOCAB, 3)) for solver in Solver
    }
    for row in rows:
        assert row.instances == 5
        assert row.success == 1
        assert row.deviation is not None
        assert row.deviation < 1e-12
        assert row.acceptance == pytest.approx(row.optimum, abs=1e-3)
    times, within, optima = report.tables
    assert len(times.rows) == 1 + 2 * len(Solver)
    # All are in time, so each takes the size it accepts most at: the whole distribution, three
    # drafts.
    assert {line[3] for line in within.rows[1:]} == {f"k = {VOCAB}, n = 3"}
    assert len(optima.rows) == 1 + 2 * 2
    [wider] = [f for f in report.findings if f"k = {VOCAB} at least" in f.statement]
    assert wider.ratio is not None
    exactly = [f for f in report.findings if "as exact" in f.statement]
    assert len(exactly) == 2 * 4


def solved(acceptance: float, mean_ms: float, refused: int = 0) -> global_resolution.Solved:
    row = Row(
        vocab=5,
        drafts=2,
        width=4,
        solver="convex",
        instances=2,
        median_ms=mean_ms,
        mean_ms=mean_ms,
        success=1.0,
        refused=refused,
        fallbacks=0,
        late=0,
        deviation=0.0,
        acceptance=acceptance,
        optimum=1.0,
        shortfall=0.0,
    )
    answer = Answer(mean_ms / 1e3, np.array([acceptance]), np.array([0.0]), 0.0)
    return global_resolution.Solved(row, (answer, answer))


def some_places(vocab: int = 1000) -> Harvest:
    generator = torch.Generator().manual_seed(1)
    q, p = torch.rand((2, 12, vocab), generator=generator, dtype=torch.float64) ** 3
    q, p = q / q.sum(dim=1, keepdim=True), p / p.sum(dim=1, keepdim=True)
    dists = NodeProbs.of(torch.arange(vocab).expand(12, -1), q, p)
    return Harvest(dists, np.arange(12))


def test_the_paper_s_figures_stand_beside_ours_where_they_were_read() -> None:
    """Every figure belongs to a size and a solver that are measured, and is printed there."""
    assert set(global_resolution.TIMES) <= set(global_resolution.GR_SOLVERS.sizes)
    assert set(global_resolution.BEST) <= set(global_resolution.GR_SOLVERS.limits)
    own = dict.fromkeys(
        global_resolution.GR_SOLVERS.sizes, dict.fromkeys(map(str, Solver), solved(0.8, 1.0))
    )
    times, within, _ = global_resolution.GR_SOLVERS.report(own, some_places()).tables
    printed = {(int(k), int(n), name): last for k, n, name, *_, last in times.rows[1:]}
    for (k, n), figures in global_resolution.TIMES.items():
        for name, figure in figures.items():
            assert printed[k, n, name] == figure
    for limit, figures in global_resolution.BEST.items():
        for name, figure in figures.items():
            assert figure in [row[-1] for row in within.rows if row[:2] == [f"{limit:g}", name]]


SMALL = NodePaper(
    name="mdsd-small",
    title="t",
    temperatures=(0.4, mdsd.USUAL_TEMPERATURE),
    drafts=(2, 3),
    width=VOCAB,
    trees=(
        Setting(
            plan=Plan(
                verifier="greedy_draft", draft_sampling=DraftSampling.GREEDY, paths=2, depth=2
            ),
            temperature=mdsd.USUAL_TEMPERATURE,
        ),
    ),
)


def test_the_draft_distributions_paper_end_to_end(site: Site) -> None:
    assert mdsd.USUAL_TEMPERATURE in MDSD.temperatures
    assert mdsd.USUAL_DRAFTS in MDSD.drafts
    assert {rule for order in ORDERS for rule in order[:2]} <= set(mdsd.RULES)
    report = SMALL.measure(site)
    nodes = json.loads((site.folder / "nodes.json").read_bytes())
    assert nodes["places"] == {"0.4": 24, "0.7": 24}
    means = {
        (c["temperature"], c["drafts"], c["rule"]): c["acceptance"]["value"] for c in nodes["cells"]
    }
    # At the usual temperature for two and for three drafts, at the other for three.
    assert len(means) == 3 * len(mdsd.RULES)
    for (_, _, rule), mean in means.items():
        assert 0 < mean <= 1 + 1e-12, rule
    exact_orders = [f for f in report.findings if f.source.startswith("a theorem")]
    assert len(exact_orders) == 3 * 3
    assert all(f.ratio is not None and f.ratio.value >= 0.99 for f in exact_orders)
    assert (
        msgspec.json.decode((site.folder / "cells.json").read_bytes(), type=cells.Measured)
        .sheets["trees"][0]
        .tokens
    )
    by_temperature, by_drafts, trees = report.tables
    assert [len(t.rows) for t in (by_temperature, by_drafts)] == [1 + len(mdsd.RULES)] * 2
    assert trees.rows[1][:4] == ["greedy_draft", "greedy", "2", "2"]


def test_directions_follow_the_places() -> None:
    """A planted reversal is against; equal values cannot be told apart."""
    found = accepted(some_places(16), [2])
    verdicts = {f.statement.split(",")[0]: f.verdict for f in order_findings(found, 0.7, 2)}
    assert verdicts["optimum at least RRS"] == AGREES
    assert verdicts["optimum at least K-SEQ"] == AGREES
    assert verdicts["optimum w/o at least optimum"] == AGREES
    planted = dict(found.by_rule)
    planted["optimum w/o", 2] = planted["optimum", 2] - 0.1
    planted["RRS", 2] = planted["optimum", 2]
    wrong = replace(found, by_rule=planted)
    assert isinstance(wrong, Accepted)
    verdicts = {f.statement.split(",")[0]: f.verdict for f in order_findings(wrong, 0.7, 2)}
    assert verdicts["optimum w/o at least optimum"] == AGAINST
    assert verdicts["optimum at least RRS"] == OPEN
