"""Expected acceptance against exact values, formulas and linear programs."""

import itertools
from fractions import Fraction

import pytest
from support import tables
from support.tables import KINDS, Model, Shape, accepted_length, alpha_greedy, alpha_iid, alpha_wor

from eaglegbv.tree import DraftSampling
from eaglegbv.verifiers.proof.chooser import Number
from eaglegbv.verifiers.proof.enumeration import Problem, drafted_trees
from eaglegbv.verifiers.proof.lp import draft_sets_iid, lp_acceptance_length
from eaglegbv.verifiers.registry import ALL_VERIFIERS, REFERENCES, STATEFUL_VERIFIERS
from eaglegbv.verifiers.spectr import scale

IID, WOR, GREEDY, HUB, FIXED = DraftSampling
TOY = (tables.constant("1/3", "2/3"), tables.constant("2/3", "1/3"))
THREE = (tables.constant(".1", ".5", ".4"), tables.constant(".5", ".4", ".1"))
FOUR = (tables.constant(".4", ".3", ".2", ".1"), tables.constant(".1", ".2", ".3", ".4"))


TOY_LENGTHS = {  # by depth and paths
    "token": {(2, 1): "10/9", (3, 1): "38/27"},
    "block": {(2, 1): "11/9", (3, 1): "5/3", (4, 1): "166/81"},
    "greedy_block": {(2, 1): "12/9", (3, 1): "50/27"},
    "otbv": {(1, 2): "8/9", (2, 2): "131/81", (2, 3): "1238/675", (3, 2): "1621/729"},
    "gbv": {(1, 2): "8/9", (2, 2): "131/81", (2, 3): "1289/729", (3, 2): "1621/729"},
    "traversal": {(1, 2): "7/9", (2, 2): "115/81", (2, 3): "1136/729", (3, 2): "1415/729"},
}


@pytest.mark.parametrize("name", TOY_LENGTHS)
def test_toy(name: str) -> None:
    for (depth, paths), expected in TOY_LENGTHS[name].items():
        case = Problem(IID, *TOY, Shape(2, depth, paths))
        assert accepted_length(name, case) == Fraction(expected), (depth, paths)
        assert tables.max_error(REFERENCES[name], [case], depth + 1) == 0


ONE_STEP = [
    # distributions, n, alpha* iid, RRS, K-SEQ, rho, alpha* wor, RRS-wo, greedy
    (TOY, 2, "8/9", "7/9", 0.8114195153, 1.4342585459, "1", "1", "1"),
    (THREE, 2, "79/100", "37/50", 3 / 4, 3 / 2, "13/15", "39/50", "4/5"),
    (THREE, 3, "871/1000", "383/500", 0.7939499683, 1.9394996831, "1", "1", "1"),
    (FOUR, 2, "79/100", "18/25", 3 / 4, 3 / 2, "701/840", "107/140", "23/30"),
    (FOUR, 3, "871/1000", "96/125", 0.7939499683, 1.9394996831, "1", "14117/16800", "14/15"),
]


@pytest.mark.parametrize("row", ONE_STEP, ids=["toy-2", "three-2", "three-3", "four-2", "four-3"])
def test_one_step_table(row) -> None:
    (p, q), n, iid, rrs, k_seq, rho, wor, rrs_wor, greedy = row
    shape = Shape(len(p(())), 1, n)

    def exact(name: str, draft_sampling: DraftSampling) -> Number:
        return accepted_length(name, Problem(draft_sampling, p, q, shape))

    assert alpha_iid(p(()), q(()), n) == Fraction(iid)
    assert exact("otbv", IID) == Fraction(iid)
    assert exact("global_resolution", IID) == Fraction(iid)
    assert exact("specinfer", IID) == Fraction(rrs)
    assert exact("spectr", IID) == pytest.approx(k_seq, abs=1e-10)
    assert scale(p(()), q(()), n) == pytest.approx(rho, abs=1e-10)
    assert alpha_wor(p(()), q(()), n) == Fraction(wor)
    assert exact("specinfer", WOR) == Fraction(rrs_wor)
    assert alpha_greedy(p(()), q(()), n) == Fraction(greedy)
    assert exact("greedy_draft", GREEDY) == Fraction(greedy)
    assert exact("otbv", GREEDY) == Fraction(greedy)
    if n == 2:
        assert exact("spechub", HUB) == Fraction(greedy)


def draft_sets(case: Problem) -> dict[frozenset[int], Number]:
    sets: dict[frozenset[int], Number] = {}
    for (level, *_), mass in drafted_trees(case).items():
        key = frozenset(child[0] for child in level if child)
        sets[key] = sets.get(key, 0) + mass
    return sets


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, pytest.param(3, marks=pytest.mark.thorough)])
def test_optimal_acceptance_of_one_level(kind: str, n: int) -> None:
    """Closed forms, the transport linear program and the rules that attain it agree."""
    shape = Shape(4, 1, n)
    for seed in range(2):
        model = Model(4, kind, seed)
        p, q = model.p(()), model.q(())
        samplings = [own for own in DraftSampling if own is not HUB or n == 2]
        cases = {own: tables.problem(own, model, shape) for own in samplings}
        lp = tables.lp_acceptance
        optimum = {own: lp(p, draft_sets(case)) for own, case in cases.items()}
        assert lp(p, draft_sets_iid(q, n)) == pytest.approx(optimum[IID], abs=1e-9)
        for alpha, own in ((alpha_iid, IID), (alpha_wor, WOR), (alpha_greedy, GREEDY)):
            assert alpha(p, q, n) == pytest.approx(optimum[own], abs=1e-9)
        attained = [
            *(("otbv", own, 1e-9) for own in (IID, GREEDY, FIXED)),
            ("greedy_draft", GREEDY, 1e-9),
            ("target_only", FIXED, 1e-9),
            *([("spechub", HUB, 1e-9)] if n == 2 else []),
            ("global_resolution", IID, 1e-9),
        ]
        for name, own, tolerance in attained:
            assert accepted_length(name, cases[own]) == pytest.approx(
                optimum[own], abs=tolerance
            ), name
        for name, own in itertools.product(("specinfer", "traversal"), (IID, WOR)):
            assert accepted_length(name, cases[own]) <= optimum[own] + 1e-9


def test_k_seq_rounds_its_scale_up() -> None:
    for seed, n in itertools.product(range(40), (2, 3, 8)):
        model = Model(4, KINDS[seed % len(KINDS)], seed)
        p, q = model.p(()), model.q(())
        rho = scale(p, q, n)
        beta = sum(min(qx, px / rho) for px, qx in zip(p, q, strict=True))
        assert sum((1 - beta) ** k for k in range(n)) <= rho


@pytest.mark.parametrize("kind", KINDS)
def test_one_path(kind: str) -> None:
    """Block verification is optimal; the greedy rule reaches the ideal of one step."""
    for seed in range(2):
        model = Model(3, kind, seed)
        case = tables.problem(IID, model, Shape(3, 2, 1))
        optimum = lp_acceptance_length(model.p, 3, drafted_trees(case))
        assert accepted_length("block", case) == pytest.approx(optimum, abs=1e-9)
        ideal = tables.ideal_length(model.p, model.q, 2)
        assert accepted_length("greedy_block", case) == pytest.approx(ideal, abs=1e-12)
        assert accepted_length("token", case) <= optimum + 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_trees_have_no_better_rule_than_sampling_the_target(kind: str) -> None:
    for seed in range(2):
        model = Model(3, kind, seed)
        case = tables.problem(FIXED, model, Shape(3, 2, 2))
        optimum = lp_acceptance_length(model.p, 3, drafted_trees(case))
        for name in ("target_only", "otbv"):
            assert accepted_length(name, case) == pytest.approx(optimum, abs=1e-9)


@pytest.mark.parametrize("name", [n for n, r in ALL_VERIFIERS.items() if IID in r.draft_samplings])
def test_no_lossless_rule_beats_the_linear_program(name: str) -> None:
    for seed in range(2):
        model = Model(3, KINDS[seed], seed)
        paths = ALL_VERIFIERS[name].max_paths or 2
        case = tables.problem(IID, model, Shape(3, 2, paths))
        if name not in STATEFUL_VERIFIERS:
            optimum = lp_acceptance_length(model.p, 3, drafted_trees(case))
            assert accepted_length(name, case) <= optimum + 1e-9
