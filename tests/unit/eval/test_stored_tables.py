"""Tables and directions that must not change, on stored and on made observations."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import pytest

from eaglegbv.config import Plan
from eaglegbv.eval import study as studies
from eaglegbv.eval.paired_comparison import Cell
from eaglegbv.eval.papers.cells import Way
from eaglegbv.eval.papers.grids import PAPERS
from eaglegbv.eval.papers.sheets import findings
from eaglegbv.eval.records import Setting
from eaglegbv.eval.report import table
from eaglegbv.eval.results import BatchResults
from eaglegbv.eval.runner import read_results
from eaglegbv.eval.statistics import summarise
from eaglegbv.eval.throughput import rate_table
from eaglegbv.metrics import Phase
from eaglegbv.utils import decode_json

STORED = Path(__file__).parents[3] / "docs" / "results"
EXPECTED = json.loads((Path(__file__).parent / "stored" / "expected.json").read_text("utf-8"))
QUESTIONS = 9


def made(plan: Plan, temperature: float, what: str, question: int) -> float:
    """Return a number between 1 and 2 that follows from its names alone."""
    sizes = f"{plan.paths} {plan.depth} {plan.draft_width} {plan.draft_temperature} {plan.nodes}"
    sampling = str(plan.draft_sampling or "")
    key = f"{plan.verifier} {sampling} {sizes} {temperature:g} {what} {question}"
    return 1 + crc32(key.encode()) % 1000 / 1000


def made_cell(setting: Setting, way: Way) -> Cell:
    def numbers(what: str) -> tuple[float, ...]:
        return tuple(made(setting.plan, setting.temperature, what, n) for n in range(QUESTIONS))

    phases = [Phase.VERIFY] if way is Way.SOLVERS else [p for p in Phase if p != Phase.PREFILL]
    return Cell(
        setting=setting,
        tokens=numbers("tokens"),
        steps=(1,) * QUESTIONS,
        nodes=tuple(setting.plan.paths * setting.plan.depth for _ in range(QUESTIONS)),
        seconds={p: numbers(p) for p in phases} if way in (Way.TIMED, Way.SOLVERS) else {},
    )


@pytest.mark.parametrize("name", PAPERS)
def test_directions_of_papers(name: str) -> None:
    found = {
        sheet.name: [
            f"{one.statement} | {one.source} | {one.ratio.value:.4f}"
            for one in findings(sheet, [made_cell(own, sheet.way) for own in sheet.settings])
            if one.ratio is not None
        ]
        for sheet in PAPERS[name].sheets
    }
    assert found == EXPECTED["directions"][name]


def values(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return rows without intervals."""
    return [[re.sub(r" \[.*?\]", "", cell) for cell in row] for row in rows]


@pytest.mark.parametrize("name", ["mt-bench", "mt-bench-0", "mt-bench-0.6"])
def test_tables_of_conversations(name: str) -> None:
    rows = table(summarise(read_results(STORED / f"{name}.json")))
    assert values(rows) == EXPECTED["tables"][name]


def test_the_table_by_batch() -> None:
    content = (STORED / "batch.json").read_bytes()
    stored = decode_json(content, BatchResults, argument="stored", place="batch.json")
    assert values(rate_table(stored.timings)) == EXPECTED["tables"]["batch"]


def test_the_study_s_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(pair, texts, settings, sampling, *, on_texts) -> list[Cell]:
        return [made_study_cell(setting) for setting in settings]

    monkeypatch.setattr(studies, "same_drafts", judged)
    settings = studies.StudySettings(temperatures=(0, 0.6), draft_temperatures=(1.0, 2.0))
    cells = [studies.study_cells("head", None, (), t, settings) for t in settings.temperatures]
    study = studies.Study(
        model="",
        drafters=("head",),
        questions=(),
        suite="",
        settings=settings,
        environment=read_results(STORED / "mt-bench.json").environment,
        sampled=tuple(cell for sampled, _ in cells for cell in sampled),
        fixed=tuple(cell for _, fixed in cells for cell in fixed),
    )
    assert values(studies.study_table(study)) == EXPECTED["tables"]["study"]
    sentences = studies.tree_findings(study) + studies.temperature_findings(study)
    assert sentences == EXPECTED["study"]


def made_study_cell(setting: Setting) -> Cell:
    """Return a cell whose nodes are those that its plan allows."""
    plan = setting.plan
    nodes = plan.nodes if plan.nodes is not None else plan.paths * plan.depth
    numbers = (made(plan, setting.temperature, "tokens", n) for n in range(QUESTIONS))
    return Cell(
        setting=setting,
        tokens=tuple(numbers),
        steps=(1,) * QUESTIONS,
        nodes=(float(nodes),) * QUESTIONS,
    )
