import itertools

import numpy as np
import pytest

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.figures import Sums
from eaglegbv.eval.ways import solvers
from eaglegbv.eval.ways.solvers import (
    STANDARD,
    RandomNodes,
    Solver,
    count_draft_sets,
    exact,
    optimal_acceptance,
    random_nodes,
    random_settings,
    solver_table,
    weighted_selection,
)
from eaglegbv.verifiers.proof.lp import draft_sets_iid

SIZES = [size for size in STANDARD if size[0] <= 1000][::3]


def row(solver: Solver, vocab: int, drafts: int, time_limit: float = 60) -> dict[str, str]:
    """The table's row of a solver on random nodes."""
    [setting] = random_settings([solver], [(vocab, drafts)], [64])
    parts = RandomNodes(3, 0, time_limit)([setting])
    sums = Sums(one for part in parts for one in part.measure())
    headings, cells = solver_table(sums, [setting])
    return dict(zip(headings, cells, strict=True))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_exact_never_fails_and_deviates_by_rounding_only(size: tuple[int, int]) -> None:
    found = row(Solver.EXACT, *size)
    assert found["success"] == "100%"
    assert [found[name] for name in ("too large", "fall-backs", "late")] == ["0", "0", "0"]
    assert float(found["L1 deviation"]) < 1e-12
    assert found["acceptance"] == found["optimum"]


def test_a_deviation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: drafts are relabelled by another rule than the distribution b belongs to."""
    node = next(random_nodes(10, 3, 10, 1, 0))
    assert exact(node).deviation(node) < 1e-12
    monkeypatch.setattr(solvers, "_probs_by_labels", lambda plan, n: plan.highest.ravel())
    assert exact(node).deviation(node) > 1e-3


@pytest.mark.parametrize("solver", [Solver.CONVEX, Solver.MAX_FLOW, Solver.LP])
def test_a_plan_is_lossless_and_within_its_bound(solver: Solver) -> None:
    for node in random_nodes(8, 3, 8, 3, 1):
        answer = solvers.planned(node, solver, 1e-3)
        assert answer.deviation(node) < 1e-12
        lost = optimal_acceptance(node) - answer.accepted.sum()
        assert -1e-12 <= lost <= answer.shortfall + 1e-12


@pytest.mark.parametrize(("width", "limit"), [(4, 12), (5, 10**6)])
def test_a_selection_has_the_distribution_it_says(monkeypatch, width, limit) -> None:
    """Over all draws, with and without truncation; its shortfall is what it loses."""
    monkeypatch.setattr(solvers, "MOST_MULTISETS", limit)
    for node in random_nodes(8, 3, width, 6, 2):
        found = weighted_selection(node.wanted, node.draft, 3)
        dist = np.zeros(width)
        for drawn in itertools.product(range(width), repeat=3):
            mass = node.draft[list(drawn)].prod()
            for x, chance in zip(drawn, found.chances(drawn), strict=True):
                dist[x] += mass * chance
        np.testing.assert_allclose(found.probs, dist, atol=1e-14)
        lost = optimal_acceptance(node) - np.minimum(node.wanted, dist).sum()
        assert found.shortfall == pytest.approx(lost, abs=1e-13)
        assert found.kept.all() == (limit == 10**6)
        truncated = 3 * node.draft[~found.kept].sum()
        if truncated == 0:
            assert found.shortfall <= solvers.GRADIENT_TOLERANCE * width
        off = np.where(found.low, node.wanted - dist, dist - node.wanted)[found.kept]
        assert found.shortfall <= np.maximum(off, 0).sum() + truncated + 1e-13


def test_weights_at_the_edges() -> None:
    """No mass of p, hardly any of q, distributions that coincide, and one token alone."""
    cases = [
        ([0.0, 1.0], [0.5, 0.5]),
        ([0.5, 0.5], [1e-300, 1.0]),
        ([0.25, 0.75], [0.25, 0.75]),
        ([1.0], [1.0]),
        ([0.0, 0.0, 0.0], [0.2, 0.3, 0.5]),
    ]
    for p, q in cases:
        found = weighted_selection(np.array(p), np.array(q), 3)
        assert found.probs.sum() == pytest.approx(1, abs=1e-14)
        assert found.shortfall < 1e-5


def test_draft_sets_are_counted_right() -> None:
    for width, drafts in ((3, 2), (4, 3), (5, 5), (2, 4)):
        sets = draft_sets_iid((1 / width,) * width, drafts)
        assert count_draft_sets(width, drafts) == len(sets)


def test_what_is_too_large_is_refused_and_counted() -> None:
    assert count_draft_sets(100, 2) > solvers.MOST_SETS
    found = row(Solver.LP, 100, 2)
    assert (found["too large"], found["success"]) == ("3", "0%")
    assert found["ms/token"] == found["acceptance"] == found["bound"] == "-"


def test_a_fall_back_to_k_seq_is_counted_and_lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    node = next(random_nodes(10, 3, 10, 1, 0))
    [answer] = solvers.solve_all(Solver.CONVEX, [node], tolerance=-1.0)
    assert answer is not None
    assert answer.shortfall is None
    assert answer.deviation(node) < 1e-12
    assert answer.acceptance < exact(node).acceptance - 1e-3
    monkeypatch.setattr(solvers, "solve_all", lambda _, given: [answer for _ in given])
    found = row(Solver.CONVEX, 10, 3)
    assert (found["fall-backs"], found["success"]) == ("3", "0%")


def test_a_node_past_the_time_limit_is_not_solved() -> None:
    found = row(Solver.EXACT, 4, 3, time_limit=1e-9)
    assert (found["late"], found["success"], found["fall-backs"]) == ("3", "0%", "0")


def test_a_width_beyond_the_vocabulary_is_the_whole_of_it() -> None:
    found = random_settings([Solver.EXACT], [(10, 2), (4, 3)], [None, 8, 9])
    sizes = [(s.context, s.plan.paths, s.plan.draft_width) for s in found]
    assert sizes == [(10, 2, 10), (10, 2, 8), (10, 2, 9), (4, 3, 4)]
    with pytest.raises(InvalidArgument, match="drafts"):
        random_settings([Solver.EXACT], [(10, 1)], [None])
