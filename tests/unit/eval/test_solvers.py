import itertools

import numpy as np
import pytest

from eaglegbv.eval import solvers
from eaglegbv.eval.solvers import Setting, compare, exact, nodes, optimal_acceptance, settings_of
from eaglegbv.verifiers import global_resolution
from eaglegbv.verifiers.global_resolution import Solver, count_draft_sets, weighted_selection
from eaglegbv.verifiers.proof.lp import draft_sets_iid

TINY = Setting(vocab=4, drafts=3, width=4)
SIZES = [s for s in settings_of() if s.width <= 64][::3]


@pytest.mark.parametrize("setting", SIZES, ids=str)
def test_exact_never_fails_and_deviates_by_rounding_only(setting: Setting) -> None:
    row = compare([setting], [Solver.EXACT], instances=3, time_limit=60).rows[0]
    assert row.success == 1
    assert (row.refused, row.fallbacks, row.late) == (0, 0, 0)
    assert row.deviation < 1e-12
    assert row.acceptance == pytest.approx(row.optimum, abs=1e-12)


def test_a_deviation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: drafts are relabelled by another rule than the distribution b belongs to."""
    node = next(nodes(Setting(vocab=10, drafts=3, width=10), 1, 0))
    assert exact(node).deviation(node) < 1e-12
    monkeypatch.setattr(solvers, "_probs_by_labels", lambda plan, n: plan.highest.ravel())
    assert exact(node).deviation(node) > 1e-3


@pytest.mark.parametrize("solver", [Solver.CONVEX, Solver.MAX_FLOW, Solver.LP])
def test_a_plan_is_lossless_and_within_its_bound(solver: Solver) -> None:
    for node in nodes(Setting(vocab=8, drafts=3, width=8), 3, 1):
        answer = solvers.planned(node, solver, 1e-3)
        assert answer.deviation(node) < 1e-12
        lost = optimal_acceptance(node) - answer.accepted.sum()
        assert -1e-12 <= lost <= answer.shortfall + 1e-12


@pytest.mark.parametrize(("width", "limit"), [(4, 12), (5, 10**6)])
def test_a_selection_has_the_distribution_it_says(monkeypatch, width, limit) -> None:
    """Over all draws, with and without truncation; its shortfall is what it loses."""
    monkeypatch.setattr(global_resolution, "MOST_MULTISETS", limit)
    for node in nodes(Setting(vocab=8, drafts=3, width=width), 6, 2):
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
            assert found.shortfall <= global_resolution.GRADIENT_TOLERANCE * width
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
    assert count_draft_sets(100, 2) > global_resolution.MOST_SETS
    row = compare([Setting(vocab=100, drafts=2, width=100)], [Solver.LP], instances=3).rows[0]
    assert (row.refused, row.success) == (3, 0)
    assert row.median_ms is row.acceptance is row.deviation is row.optimum is row.shortfall is None


def test_a_fall_back_to_k_seq_is_counted_and_lossless() -> None:
    setting = Setting(vocab=10, drafts=3, width=10)
    failing, exact_row = compare(
        [setting], [Solver.CONVEX, Solver.EXACT], instances=3, tolerance=-1.0
    ).rows
    assert (failing.fallbacks, failing.success, failing.refused) == (3, 0, 0)
    assert failing.shortfall is None
    assert failing.deviation < 1e-12
    assert failing.acceptance < exact_row.acceptance - 1e-3


def test_a_node_past_the_time_limit_is_not_solved() -> None:
    row = compare([TINY], [Solver.EXACT], instances=3, time_limit=1e-9).rows[0]
    assert (row.late, row.success, row.fallbacks) == (3, 0, 0)


def test_a_width_beyond_the_vocabulary_is_the_whole_of_it() -> None:
    found = settings_of([(10, 2), (4, 3)], [None, 8, 9])
    sizes = [(s.vocab, s.drafts, s.width) for s in found]
    assert sizes == [(10, 2, 10), (10, 2, 8), (10, 2, 9), (4, 3, 4)]
