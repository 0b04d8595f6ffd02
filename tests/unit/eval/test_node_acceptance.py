"""Acceptance at one node against enumeration, oracles and tabled values."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from support.acceptance import alpha_greedy, alpha_iid, alpha_wor, inside_wor_race
from support.tables import KINDS, Model, Shape, acceptance_length, iterate, problem

from eaglegbv.eval.node_acceptance import RULES, NodeProbs, optimum_wor, rejection_wor
from eaglegbv.tree import DraftSampling
from eaglegbv.verifiers.proof.enumeration import Problem
from eaglegbv.verifiers.registry import REFERENCES
from eaglegbv.verifiers.transport import ranked

TABLE = [
    # p, q, n, optimum, RRS, K-SEQ, optimum w/o, RRS w/o, greedy: exact values
    ((1 / 3, 2 / 3), (2 / 3, 1 / 3), 2, 8 / 9, 7 / 9, 0.8114195153, 1, 1, 1),
    ((0.1, 0.5, 0.4), (0.5, 0.4, 0.1), 2, 0.79, 37 / 50, 0.75, 13 / 15, 39 / 50, 0.8),
    ((0.1, 0.5, 0.4), (0.5, 0.4, 0.1), 3, 0.871, 383 / 500, 0.7939499683, 1, 1, 1),
    (
        (0.4, 0.3, 0.2, 0.1),
        (0.1, 0.2, 0.3, 0.4),
        *(3, 0.871, 96 / 125, 0.7939499683, 1, 14117 / 16800, 14 / 15),
    ),
]


def probs_of(p: Sequence[float], q: Sequence[float]) -> NodeProbs:
    ids = [x for x in range(len(q)) if q[x] > 0]
    return NodeProbs.of(
        torch.tensor([ids]),
        torch.tensor([[float(q[x]) for x in ids]], dtype=torch.float64),
        torch.tensor([[float(p[x]) for x in ids]], dtype=torch.float64),
    )


def exact_length(name: str, case: Problem) -> float:
    """The chance that a draft of one level is accepted, over all drafts and decisions."""
    dist: dict = {}
    for state, mass in iterate(REFERENCES[name], [case], 2).items():
        dist[state.context] = dist.get(state.context, 0) + mass
    return float(acceptance_length(dist))


@pytest.mark.parametrize("row", TABLE, ids=["two-2", "three-2", "three-3", "four-3"])
def test_tabled_values(row) -> None:
    p, q, n, optimum, rrs, k_seq, optimum_without, rrs_without, greedy = row
    dists = probs_of(p, q)
    expected = {
        "RRS": rrs,
        "K-SEQ": k_seq,
        "optimum": optimum,
        "optimum w/o": optimum_without,
        "greedy": greedy,
    }
    for name, value in expected.items():
        assert RULES[name](dists, n).item() == pytest.approx(value, abs=1e-9), name
    assert rejection_wor(dists, n, chains=20_000).item() == pytest.approx(rrs_without, abs=5e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_rules_against_enumeration(kind: str, n: int) -> None:
    """Every rule's reference, run over all of its drafts and decisions."""
    shape = Shape(4, 1, n)
    for seed in range(4):
        model = Model(4, kind, seed)
        p, q = model.p(()), model.q(())
        dists = probs_of([float(x) for x in p], [float(x) for x in q])
        found = {name: rule(dists, n).item() for name, rule in RULES.items()}
        iid, wor = (
            problem(DraftSampling.IID, model, shape),
            problem(DraftSampling.WOR, model, shape),
        )
        assert found["one draft"] == pytest.approx(float(alpha_iid(p, q, 1)), abs=1e-12)
        assert found["RRS"] == pytest.approx(exact_length("specinfer", iid), abs=1e-9)
        assert found["K-SEQ"] == pytest.approx(exact_length("spectr", iid), abs=1e-9)
        assert found["optimum"] == pytest.approx(float(alpha_iid(p, q, n)), abs=1e-12)
        assert found["optimum w/o"] == pytest.approx(float(alpha_wor(p, q, n)), abs=1e-12)
        assert found["greedy"] == pytest.approx(float(alpha_greedy(p, q, n)), abs=1e-12)
        many = rejection_wor(dists, n, chains=20_000).item()
        assert many == pytest.approx(exact_length("specinfer", wor), abs=5e-3)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("sharpness", [1.0, 2.5])
def test_the_optimum_without_replacement_at_many_tokens(n: int, sharpness: float) -> None:
    """Prefix by prefix, by an adaptive quadrature."""
    rng = np.random.default_rng(n)
    q = np.exp(sharpness * rng.standard_normal(40))
    p = q * np.exp(rng.standard_normal(40))
    q, p = q / q.sum(), p / p.sum()
    order = ranked(tuple(p.tolist()), tuple(q.tolist()))
    least = min(
        p[list(order[:size])].sum() - inside_wor_race(tuple(q.tolist()), order[:size], n)
        for size in range(1, 40)
    )
    found = optimum_wor(probs_of(p.tolist(), q.tolist()), n).item()
    assert found == pytest.approx(1 + min(0.0, least), abs=1e-9)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_optimum_without_replacement_of_rare_tokens(n: int) -> None:
    """Rates of 1e-14: the second draft is drawn among tokens the first all but never is."""
    rare = (1e-14, 3e-14, 2e-9, 1e-3)
    q = (1 - sum(rare), *rare)
    p = (0.3, 0.4, 0.05, 0.2, 0.05)
    found = optimum_wor(probs_of(p, q), n).item()
    assert found == pytest.approx(
        float(alpha_wor(tuple(map(Fraction, p)), tuple(map(Fraction, q)), n)), abs=1e-12
    )


def test_nodes_of_different_supports_stand_side_by_side() -> None:
    """Padding changes nothing, nor do neighbours of smaller rates."""
    wide = probs_of((0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4))
    narrow = probs_of((0.9, 0.1), (1 - 1e-9, 1e-9))
    pad = torch.nn.functional.pad
    both = NodeProbs(
        torch.cat([wide.ids, pad(narrow.ids, (0, 2), value=3)]),
        torch.cat([wide.draft, pad(narrow.draft, (0, 2))]),
        torch.cat([wide.target, pad(narrow.target, (0, 2))]),
    )
    for name, rule in RULES.items():
        if name == "RRS w/o":
            continue
        apart = torch.cat([rule(wide, 2), rule(narrow, 2)])
        torch.testing.assert_close(rule(both, 2), apart, rtol=0, atol=1e-12)


def test_top_keeps_the_most_likely_tokens_as_a_distribution() -> None:
    dists = probs_of((0.1, 0.5, 0.4), (0.5, 0.1, 0.4)).top(2)
    assert dists.ids.tolist() == [[0, 2]]
    assert dists.draft.tolist() == [[pytest.approx(5 / 9), pytest.approx(4 / 9)]]
    assert dists.target.tolist() == [[0.1, 0.4]]
