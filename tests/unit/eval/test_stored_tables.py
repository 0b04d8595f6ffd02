"""Tables and directions that a change of the code must not change, on stored and made sums."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from zlib import crc32

import pytest

from eaglegbv.config import Plan
from eaglegbv.eval.benches import declared
from eaglegbv.eval.experiment import report
from eaglegbv.eval.figures import Sums
from eaglegbv.eval.observations import Observation, Run
from eaglegbv.eval.papers import DRAFTS, SOLVE, TIME, paper
from eaglegbv.eval.settings import Setting
from eaglegbv.eval.study import StudySettings, study

STORED = Path(__file__).parents[3] / "docs" / "results"
EXPECTED = json.loads((Path(__file__).parent / "stored" / "expected.json").read_text("utf-8"))
QUESTIONS = 9
PROGRAMME = "published_tighter"
"""The paper's own programme, which stands where a convex one of another kind stood: its made
numbers, and the directions that follow, are those that the other one's name gave."""
OWN = ("this package's claim", "its acceptance is optimal", "arXiv 2403.10444, Theorem")
"""Sources of directions that are no paper's figures, which follow from these alone."""


def made(plan: Plan, temperature: float, what: str, question: int) -> float:
    """Return a number between 1 and 2 that follows from its names alone."""
    sizes = f"{plan.paths} {plan.depth} {plan.draft_width} {plan.draft_temperature} {plan.nodes}"
    sampling = str(plan.draft_sampling or "")
    rule = "convex" if plan.verifier == PROGRAMME else plan.verifier
    key = f"{rule} {sampling} {sizes} {temperature:g} {what} {question}"
    return 1 + crc32(key.encode()) % 1000 / 1000


def made_observations(setting: Setting, way: str) -> Iterator[Observation]:
    plan = setting.plan
    phases = {SOLVE: ["verify"], TIME: ["draft", "forward", "verify", "commit"]}.get(way, [])
    nodes = plan.nodes if plan.nodes is not None else plan.paths * plan.depth
    for question in range(QUESTIONS):
        spent = [made(plan, setting.temperature, phase, question) for phase in phases]
        tokens = made(plan, setting.temperature, "tokens", question)
        sums = {"tokens": tokens, "steps": 1.0, "nodes": float(nodes), "seconds": sum(spent)}
        yield Observation(setting=setting.name, unit=str(question), sums=sums)


def today(statement: str) -> str:
    """Return a statement with the names that settings have: sizes together, as plans have them."""
    return re.sub(r"K(\d+) L(\d+)", r"\1x\2", statement).replace("convex", PROGRAMME)


@pytest.mark.parametrize("name", ["bv", "gbv", "gr-solvers", "gr-steps", "spectr-gbv"])
def test_directions_that_are_no_figures_of_papers(name: str) -> None:
    found = {}
    for sheet in paper(name).sheets:
        observed = (one for own in sheet.settings for one in made_observations(own, sheet.name))
        sums = Sums(observed)
        for claim in sheet.claims:
            for one in claim.findings(sums, sheet.settings):
                found[one.statement, one.source] = one.ratio.value
    expected = [
        line.split(" | ")
        for lines in EXPECTED["directions"][name].values()
        for line in lines
        if any(source in line for source in OWN)
    ]
    assert expected
    for statement, source, ratio in expected:
        assert f"{found[today(statement), source]:.4f}" == ratio


def values(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return rows without intervals."""
    return [[re.sub(r" \[.*?\]", "", cell) for cell in row] for row in rows]


@pytest.mark.parametrize("name", ["mt-bench", "mt-bench-0", "mt-bench-0.6", "batch"])
def test_tables_of_runs(name: str) -> None:
    run = Run.read(STORED / f"{name}.json")
    found = values(report(declared(run.head), run).tables[0].texts)
    expected = [[today(cell) for cell in row] for row in EXPECTED["tables"][name]]
    if "setting" in expected[0]:
        expected[0][1] = "acceptance length"  # which had another name
    assert found == expected


def test_the_study_s_table() -> None:
    settings = StudySettings(temperatures=(0, 0.6), draft_temperatures=(1.0, 2.0)).settings(
        ["head"]
    )
    observed = (one for own in settings for one in made_observations(own, DRAFTS))
    sheet = study(settings)
    table, seen = sheet.tables(Sums(observed), settings)
    assert values(table.texts) == EXPECTED["tables"]["study"]
    # Which way an interval lies was told by another kind of interval.
    assert [_beginning(row) for (row,) in seen.rows[1:]] == list(map(_beginning, EXPECTED["study"]))


def _beginning(sentence: str) -> str:
    return sentence if "best of all" in sentence else sentence.rpartition(": ")[0]
