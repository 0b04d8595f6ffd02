import pytest

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.figures import Sums
from eaglegbv.eval.tables import by_setting
from eaglegbv.eval.ways import solvers
from eaglegbv.eval.ways.solvers import (
    SOLVER_COLUMNS,
    STANDARD,
    RandomNodes,
    Solver,
    count_draft_sets,
    exact,
    optimal_acceptance,
    published,
    random_nodes,
    random_settings,
)
from eaglegbv.verifiers.proof.lp import draft_sets_iid

SIZES = [size for size in STANDARD if size[0] <= 1000][::3]


def row(solver: Solver, vocab: int, drafts: int, time_limit: float = 60) -> dict[str, str]:
    """The table's row of a solver on random nodes."""
    [setting] = random_settings([solver], [(vocab, drafts)], [64])
    nodes = RandomNodes(instances=3, time_limit=1e3 * time_limit)
    sums = Sums(nodes.measure(setting))
    return dict(zip(*by_setting(sums, [setting], SOLVER_COLUMNS).texts, strict=True))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_exact_never_fails_and_deviates_by_rounding_only(size: tuple[int, int]) -> None:
    found = row(Solver.EXACT, *size)
    assert found["success, %"] == "100"
    assert [found[name] for name in ("too large", "fall-backs", "late")] == ["0", "0", "0"]
    assert float(found["L1 deviation"]) < 1e-12
    assert found["acceptance"] == found["optimum"]


@pytest.mark.parametrize("solver", [Solver.MAX_FLOW, Solver.OPTIMISED, Solver.LP])
def test_a_plan_is_lossless_and_optimal(solver: Solver) -> None:
    for node in random_nodes(8, 3, 8, 3, 1):
        [answer] = solvers.solve_all(solver, [node])
        assert answer is not None
        assert answer.deviation(node) < 1e-12
        assert answer.acceptance == pytest.approx(optimal_acceptance(node), abs=1e-7)
        assert answer.shortfall == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("solver", [Solver.LOOSER, Solver.TIGHTER])
@pytest.mark.parametrize(("vocab", "drafts"), [(10, 2), (10, 3), (6, 4)])
def test_the_published_algorithm_is_within_its_tolerance_or_fails(solver, vocab, drafts) -> None:
    """It is biased, as its paper says: by no more than the tolerance in L1."""
    epsilon = solvers.EPSILONS[solver]
    answers = [
        (node, published(node, epsilon)) for node in random_nodes(vocab, drafts, vocab, 8, 3)
    ]
    solved = [(node, answer) for node, answer in answers if answer.shortfall is not None]
    assert len(solved) >= 5
    assert any(answer.deviation(node) > 1e-6 for node, answer in solved)
    for node, answer in solved:
        assert answer.deviation(node) <= epsilon
        assert abs(answer.acceptance - optimal_acceptance(node)) <= epsilon


def test_what_the_published_algorithm_gives_up_is_drawn_from_p() -> None:
    node = next(random_nodes(100, 3, 100, 1, 1))
    answer = published(node, 1e-3)
    assert (answer.shortfall, answer.acceptance) == (None, 0)
    assert answer.deviation(node) < 1e-12


def test_chances_of_sets_of_tokens_follow_from_inclusion_and_exclusion() -> None:
    """As from listing all drafts, of all tokens and of some with the rest."""
    node = next(random_nodes(5, 3, 5, 1, 4))
    sets = draft_sets_iid(tuple(node.draft.tolist()), 3)
    listed: dict[frozenset[int], float] = {}
    for members, chances in solvers._terms(node.draft, 0.0, 3):
        for drawn, chance in zip(members.tolist(), chances.tolist(), strict=True):
            listed[frozenset(drawn)] = chance
    assert listed == pytest.approx(sets)
    for members, chances in solvers._terms(node.draft[:3], float(node.draft[3:].sum()), 3):
        for drawn, chance in zip(members.tolist(), chances.tolist(), strict=True):
            of_others = (m for tokens, m in sets.items() if tokens - {3, 4} == frozenset(drawn))
            assert chance == pytest.approx(sum(map(float, of_others)))


def test_draft_sets_are_counted_right() -> None:
    for width, drafts in ((3, 2), (4, 3), (5, 5), (2, 4)):
        sets = draft_sets_iid((1 / width,) * width, drafts)
        assert count_draft_sets(width, drafts) == len(sets)


def test_what_is_too_large_is_refused_and_counted() -> None:
    assert count_draft_sets(100, 2) > solvers.MOST_SETS[Solver.LP]
    found = row(Solver.LP, 100, 2)
    assert (found["too large"], found["success, %"]) == ("3", "0")
    assert found["ms/token"] == found["acceptance"] == found["bound"] == "-"


def test_a_fall_back_to_k_seq_is_counted_and_lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    node = next(random_nodes(10, 3, 10, 1, 0))
    [answer] = solvers.solve_all(Solver.LP, [node], tolerance=-1.0)
    assert answer is not None
    assert answer.shortfall is None
    assert answer.deviation(node) < 1e-12
    assert answer.acceptance < exact(node).acceptance - 1e-3
    monkeypatch.setattr(solvers, "solve_all", lambda _, given: [answer for _ in given])
    found = row(Solver.LP, 10, 3)
    assert (found["fall-backs"], found["success, %"]) == ("3", "0")


def test_a_node_past_the_time_limit_is_not_solved() -> None:
    found = row(Solver.EXACT, 4, 3, time_limit=1e-9)
    assert (found["late"], found["success, %"], found["fall-backs"]) == ("3", "0", "0")


def test_a_width_beyond_the_vocabulary_is_the_whole_of_it() -> None:
    found = random_settings([Solver.EXACT], [(10, 2), (4, 3)], [None, 8, 9])
    sizes = [(s.context, s.plan.paths, s.plan.draft_width) for s in found]
    assert sizes == [(10, 2, 10), (10, 2, 8), (10, 2, 9), (4, 3, 4)]
    with pytest.raises(InvalidArgument, match="drafts"):
        random_settings([Solver.EXACT], [(10, 1)], [None])
