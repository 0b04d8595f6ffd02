"""Papers: their figures, what is measured for them, directions, and tables beside theirs."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.runs import ENVIRONMENT, SETUP
from support.table_pairs import counted, question_set, random_texts, table_pair

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval import papers
from eaglegbv.eval.claims import AGREES, BOTH, FEW, OPEN, OPPOSITE, SAME_WAY, UNDECIDED, Finding
from eaglegbv.eval.experiment import Experiment, Sheet, measure, open_run, report
from eaglegbv.eval.figures import Estimate, Sums
from eaglegbv.eval.observations import Observation, Run
from eaglegbv.eval.page import counts, findings_table, report_text
from eaglegbv.eval.papers import PAPERS, choose, number, paper, paper_tables, toy_acceptance
from eaglegbv.eval.settings import Setting, nodes
from eaglegbv.eval.ways import solvers
from eaglegbv.eval.ways.nodes import RULES, node_acceptance
from eaglegbv.eval.ways.places import AtPlaces, Sampling
from eaglegbv.eval.ways.solvers import Solver, timed_solvers

NUMBERS = Path(__file__).parents[4] / "shared" / "data" / "paper_numbers.json"
NOTES = {"note", "settings", "truncation", "figures"}
NAMES = ("bv", "gbv", "gr", "mdsd", "spectr-gbv")


def leaves(content: Any) -> Iterator[Any]:
    if isinstance(content, dict):
        for name, value in content.items():
            if name not in NOTES:
                yield from leaves(value)
    elif isinstance(content, list):
        for value in content:
            yield from leaves(value)
    else:
        yield content


@pytest.mark.skipif(not NUMBERS.is_file(), reason="the papers' figures are not here")
def test_every_figure_of_the_papers_is_in_a_table() -> None:
    theirs = Counter(map(str, leaves(json.loads(NUMBERS.read_text("utf-8")))))
    ours = Counter(
        str(cell)
        for name, tables in paper_tables().items()
        for table in tables
        if (name, table.name) != ("mdsd", "3")  # the file lacks it
        for row in table.cells
        for cell in row
        if cell is not None
    )
    assert ours == theirs
    assert ours.total() == 929
    assert sum("." in text or text.isdigit() for text in ours if number(text)) > 100


def test_tables_are_whole_and_say_why_cells_are_empty() -> None:
    for table in (table for tables in paper_tables().values() for table in tables):
        assert len(table.cells) == len(table.rows), table.name
        assert all(len(row) == len(table.columns) for row in table.cells)
        empty = any(cell is None for row in table.cells for cell in row)
        assert bool(table.reason) == empty
        for _, _, at in table.places():
            assert at["figure"] in papers.MEASURES


def test_what_is_measured_stands_once_and_plain_decoding_in_every_timed_sheet() -> None:
    for name in NAMES:
        chosen = choose(name)
        for way, settings in chosen.settings(also=True).items():
            assert len({one.name for one in settings}) == len(settings)
            loads = {(one.temperature, one.batch) for one in settings}
            plain = {(one.temperature, one.batch) for one in settings if one.plain}
            assert way != papers.TIME or loads == plain
    # A cell that stands in two tables is measured once.
    one, both = (choose("gbv", names).settings(also=False) for names in (["3"], ["1", "3"]))
    assert one == both
    assert choose("gbv", ["3"], engine=True).settings(also=False).keys() == {papers.ENGINE}
    assert [sheet.name for sheet in paper("gr-steps").sheets] == [papers.DRAFTS, papers.TIME]
    for wrong in (("nope", None), ("gbv", ["9"])):
        with pytest.raises(InvalidArgument):
            choose(*wrong)


def test_the_toy_of_block_verification_is_exact() -> None:
    token, block = toy_acceptance("token", 10), toy_acceptance("block", 10)
    assert token == pytest.approx([(2 / 3) ** i for i in range(1, 11)])
    expected = [2 / 3, 5 / 9, 4 / 9, 31 / 81, 26 / 81, 205 / 729, 176 / 729]
    expected += [1403 / 6561, 1222 / 6561, 9817 / 59049]
    assert block == pytest.approx(expected)
    assert sum(token) == pytest.approx(1.9653, abs=1e-4)


@pytest.mark.parametrize(
    ("ratio", "paper_s", "expected", "verdict"),
    [
        (Estimate(1.1, 1.05, 1.2), "", 1, AGREES),
        (Estimate(1 - 1e-9, 1 - 2e-9, 1 - 1e-10), "", 1, OPEN),
        (None, "", 1, OPEN),
        (Estimate(1.1, 1.05, 1.2), "1.2", 1, SAME_WAY),
        (Estimate(1.1, 1.05, 1.2), "0.8", -1, OPPOSITE),
        (Estimate(0.9, 0.8, 0.95), "0.8", -1, SAME_WAY),
        (Estimate(1.0, 0.9, 1.1), "0.8", -1, UNDECIDED),
        (Estimate(1.1, 1.05, 1.2), "0.8 to 1.2", 0, BOTH),
        (Estimate(1.1, 1.05, 1.2, 3), "1.2", 1, FEW),
    ],
)
def test_verdicts(ratio, paper_s: str, expected: int, verdict: str) -> None:
    found = Finding(statement="x", source="y", ratio=ratio, paper=paper_s, expected=expected)
    assert found.verdict == verdict
    assert findings_table([found]).texts[1][3] == verdict
    assert len(counts([found])) == 1


# --- a paper's directions and tables, on made sums


def observed(
    settings: tuple[Setting, ...], tokens: Callable[[Setting], float], questions: int = 9
) -> Sums:
    """Sums of tokens a step; a step takes a second for each node."""
    return Sums(
        Observation(
            setting=own.name,
            unit=str(n),
            sums={
                "tokens": tokens(own) * (10 + n),
                "steps": 10.0 + n,
                "seconds": (10.0 + n) * own.plan.paths,
                "nodes": 8.0 * own.plan.paths * (10 + n),
            },
        )
        for own in settings
        for n in range(questions)
    )


def gbv(tokens: Callable[[Setting], float], *tables: str, **setup: object) -> Any:
    chosen = choose("gbv", tables)
    sums = {way: observed(own, tokens) for way, own in chosen.settings(also=False).items()}
    facts = {**SETUP, "hardware": "a processor", **setup}
    shown = [papers.table_beside(chosen, table, sums, facts) for table in chosen.tables]
    return shown, {one.statement: one for one in papers.directions(chosen, sums)}


def test_directions_are_computed_from_the_paper_s_own_figures() -> None:
    """Block efficiency falls with K at T = 1 on two pairs of the paper, and rises on the others."""
    _, found = gbv(lambda own: 2 + own.plan.paths / 10, "1", "3")
    by_models = {
        statement.partition(" in ")[2]: one
        for statement, one in found.items()
        if statement.startswith("gbv 3x8 over gbv 1x8")
    }
    assert {models: one.verdict for models, one in by_models.items()} == {
        "OPT6.7B/350M": SAME_WAY,
        "OPT6.7B/125M": SAME_WAY,
        "Qwen3-32B/0.6B": OPPOSITE,
        "Llama3-70B/8B": OPPOSITE,
    }
    assert by_models["OPT6.7B/350M"].paper == "1.174 to 1.207"
    _, found = gbv(lambda own: 2.0, "7")
    [one] = [
        one for name, one in found.items() if name.startswith("traversal 2x8 over gbv 2x8, BE")
    ]
    assert (one.paper, one.expected, one.verdict) == ("1.074", 1, UNDECIDED)
    [cold] = [
        one
        for name, one in found.items()
        if name.startswith("traversal 3x8 T0.2 over gbv 3x8 T0.2, BE")
    ]
    assert cold.expected == 1  # its text says the opposite


def test_differences_of_a_last_digit_are_no_direction() -> None:
    chosen = choose("mdsd", ["1"])
    found = [one.statement for one in papers.directions(chosen, {})]
    assert "greedy 3x1 W1024 T0.7 over RRS 3x1 W1024 T0.7, alpha: higher in OPT-125M/6.7B" in found
    assert not any("greedy" in one and "over greedy" in one for one in found)
    table = paper_tables()["gr"][0]
    pairs = [(a["rule"], b["rule"], a["k"], a["n"]) for a, b, _ in papers._pairs(table)]
    assert ("GR, looser", "max-flow", 10, 3) in pairs
    assert number("4000+") == 4000
    assert number("17.35 (98%)") == 17.35
    assert number("OOM") is number(None) is None


def test_a_table_is_laid_out_as_the_paper_s_with_ours_beside() -> None:
    [table], _ = gbv(lambda own: 2 + own.plan.paths / 10, "5", suite="gsm8k")
    assert table.texts[0] == ["K", "T", "BE", "tok/s", "ms"]
    assert table.texts[1][:3] == ["1", "0.2", "2.10 (3.867)"]
    assert table.texts[6][:4] == ["3", "0.2", "2.30 (4.219)", "0.8 (11.661)"]
    nodes_note, deviations = table.notes
    assert "gbv 3x8 24.0" in nodes_note
    assert "ours: target with drafter, float32" in deviations
    assert "a processor" in deviations
    # Ours stands beside the rows of our own questions, or beside all if the paper has none of them.
    [ours], _ = gbv(lambda own: 2.0, "3", suite="gsm8k")
    assert [row[2].startswith("2.00") for row in ours.texts[1:]] == [
        *(True, False, False, False, False, True, False)
    ]
    [every], _ = gbv(lambda own: 2.0, "3", suite="mt-bench")
    assert all(row[2].startswith("2.00 (") for row in every.texts[1:])


def test_of_few_questions_there_is_no_verdict() -> None:
    chosen = choose("bv", ["4"])
    [(way, settings)] = chosen.settings(also=False).items()
    found = papers.directions(chosen, {way: observed(settings, lambda own: 2.0, questions=3)})
    assert found
    assert {one.verdict for one in found} == {FEW}


# --- papers on one node: solvers and draft samplings on distributions of a pair of tables
VOCAB = 8


def measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge: Any, settings: tuple[Setting, ...]
) -> tuple[Run, Sums]:
    texts = random_texts(VOCAB, count=6, length=9)
    monkeypatch.setattr("eaglegbv.eval.ways.places.collect", lambda *_, **__: texts)

    class Fake:
        pair = table_pair(VOCAB)

    way = AtPlaces(
        llms={"": Fake()},
        questions=question_set(6).questions,
        judge=judge,
        sampling=Sampling(places=4),
        folder=tmp_path,
    )
    sheet = Sheet(name="s", settings=settings, tables=lambda *_: [])
    experiment = Experiment(name="small", sheets=(sheet,))
    run = open_run(experiment, SETUP, ENVIRONMENT, tmp_path)
    measure(experiment, run, {"s": way}, counted)
    assert report_text(report(experiment, run)) == ""
    return run, Sums(run.observations("s"))


def test_solvers_accept_as_much_as_the_exact_one(tmp_path, monkeypatch) -> None:
    """The published one is within its tolerance, or accepts nothing."""
    settings = nodes(tuple(map(str, Solver)), ((4, 2), (VOCAB, 3)))
    _, sums = measured(tmp_path, monkeypatch, timed_solvers, settings)
    best = {own.plan.draft_width: 0.0 for own in settings}
    for own in settings:
        assert sums.total(own.name, "steps") == 10
        value = sums.total(own.name, "tokens") / 10
        if own.rule == "exact":
            best[own.plan.draft_width] = value
        slack = solvers.EPSILONS.get(Solver(own.rule), 1e-3)
        if not sums.total(own.name, "fallbacks"):
            assert value == pytest.approx(best[own.plan.draft_width], abs=slack)
    text = papers._best_alpha(choose("gr", ["2"]), {"limit": 1e9, "rule": "LP", "T": 1.0}, sums)
    assert text == "none in time"  # of the sizes of the paper none is measured


def test_a_node_too_large_for_a_solver_is_said_to_be_so(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(solvers, "MOST_SETS", {Solver.LP: 1})
    settings = nodes(("exact", "lp"), ((10, 2),))
    _, sums = measured(tmp_path, monkeypatch, timed_solvers, settings)
    at = {"figure": "node ms", "rule": "LP", "k": 10, "n": 2, "T": 1}
    assert papers._ours(choose("gr", ["1"]), at, sums) == "too large"


def test_no_rule_is_above_its_drafts_optimum(tmp_path, monkeypatch) -> None:
    settings = nodes(tuple(RULES), ((VOCAB, 2), (VOCAB, 3)), (0.4, 0.7))
    _, sums = measured(tmp_path, monkeypatch, node_acceptance, settings)
    findings = [
        one
        for claim in PAPERS["mdsd"].claims[papers.NODE]
        for one in claim.findings(sums, settings)
    ]
    assert len(findings) == 3 * 4
    assert all(one.ratio is not None and one.ratio.value >= 0.99 for one in findings)


def test_a_biased_rule_is_marked_where_it_is_timed() -> None:
    [sheet] = paper("spectr-gbv").sheets
    names = ("spectr_gbv_published 3x4 T0.4", "otbv 3x4 T0.4")
    timed = [own for own in sheet.settings if own.name in names]
    sums = {"tokens": 2.0, "steps": 1.0, "seconds": 1.0}
    observed = Sums(Observation(setting=own.name, unit="q", sums=sums) for own in timed)
    [table] = sheet.tables(observed, timed)
    assert [row[0] for row in table.texts[1:]] == [names[1], f"{names[0]} (biased)"]
