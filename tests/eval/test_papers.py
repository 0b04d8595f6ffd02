import pytest
from support.runs import ENVIRONMENT, record, run_settings

from eaglegbv.config import Plan
from eaglegbv.eval.estimates import Estimate
from eaglegbv.eval.grid import grid
from eaglegbv.eval.papers import AGAINST, AGREES, OPEN, PAPERS, Finding, Order, findings, table
from eaglegbv.eval.records import Results, Setting

QUESTIONS = 6


def run_of(name: str, committed) -> Results:
    """A run of a paper's settings; ``committed(setting, question)`` tokens in 100 forwards."""
    paper = PAPERS[name]
    settings = grid(
        paper.verifiers, paper.paths, paper.depths, paper.temperatures, base=Plan()
    ).settings
    records = [
        record(s, f"q{q}", 0, forwards=100, committed=committed(s, q), decode_seconds=1.0)
        for s in settings
        for q in range(QUESTIONS)
    ]
    return Results(
        settings=run_settings(settings=settings, repeats=1),
        environment=ENVIRONMENT,
        records=records,
    )


def rank(setting: Setting, question: int) -> int:
    """As the papers say: otbv, then gbv, then the rest; more with more paths and depth."""
    plan = setting.plan
    own = {"otbv": 60, "gbv": 40, "block": 20}.get(plan.verifier, 0)
    return 200 + own + 5 * plan.paths + 5 * plan.depth + 50 * question


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_a_run_as_the_paper_says_agrees_in_every_cell(name: str) -> None:
    found = findings(PAPERS[name], run_of(name, rank))
    assert found
    assert {one.verdict for one in found} == {AGREES}
    against = findings(PAPERS[name], run_of(name, lambda s, q: 900 - rank(s, q)))
    assert {one.verdict for one in against} == {AGAINST}


def test_every_cell_of_a_paper_has_its_finding() -> None:
    bv = [one.statement for one in findings(PAPERS["bv"], run_of("bv", rank))]
    assert bv == [
        "block K1 L4 at least token K1 L4",
        "block K1 L6 at least token K1 L6",
        "block K1 L8 at least token K1 L8",
        "token K1 L8 at least token K1 L4",
        "block K1 L8 at least block K1 L4",
    ]
    paths = findings(PAPERS["gbv-paths"], run_of("gbv-paths", rank))
    # gbv against block at every K, otbv against five at every K, and two trends.
    assert len(paths) == 4 + 5 * 4 + 2
    assert "gbv K4 L8 at least block K1 L8" in [one.statement for one in paths]
    warm = findings(PAPERS["gbv-temperatures"], run_of("gbv-temperatures", rank))
    assert len(warm) == 5 * (1 + 5)
    assert "otbv K3 L8 T0.2 at least gbv K3 L8 T0.2" in [one.statement for one in warm]


def test_what_cannot_be_told_apart_is_said() -> None:
    found = findings(PAPERS["bv"], run_of("bv", lambda s, q: 300))
    assert {one.verdict for one in found} == {OPEN}
    assert Finding(statement="", source="", ratio=None).verdict == OPEN
    rows = table([*found, Finding(statement="x", source="", ratio=None)])
    assert rows[1] == ["block K1 L4 at least token K1 L4", "1.000 [1.000, 1.000]", OPEN]
    assert rows[-1] == ["x", "-", OPEN]
    assert Finding(statement="", source="", ratio=Estimate(1.1, 1.05, 1.2)).verdict == AGREES


def test_orders_name_verifiers_that_run() -> None:
    for paper in PAPERS.values():
        named = {v for o in paper.orders for v in (o.better, o.worse)}
        assert named | {r.verifier for r in paper.rises} <= set(paper.verifiers)
        assert all(isinstance(order, Order) and order.source for order in paper.orders)
