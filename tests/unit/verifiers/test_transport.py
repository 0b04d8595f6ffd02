"""The exact transport: it attains the optimum, and the batched one is the readable one's."""

from fractions import Fraction
from itertools import count

import numpy as np
import pytest
import torch
from support.tables import KINDS, PAIRS, alpha_iid

from eaglegbv.eval.audit.problems import as_probs
from eaglegbv.verifiers import transport as transports
from eaglegbv.verifiers.proof.chooser import Probs, exact_probs, support
from eaglegbv.verifiers.proof.tree import draw_iid
from eaglegbv.verifiers.transport import RankedProbs, exact_transport, multiplicity_probs, ranked


def exact_pair(vocab: int, seed: int) -> tuple[Probs, Probs]:
    """Twelfths: zeros and ties abound, and everything is exact."""
    rng = np.random.default_rng([seed, vocab])

    def dist() -> Probs:
        counts = np.bincount(rng.integers(vocab, size=12), minlength=vocab)
        return tuple(Fraction(int(c), 12) for c in counts)

    return dist(), dist()


def selected(p: Probs, q: Probs, n: int):
    """The exact joint distribution of (selected token, number of drafts on it)."""
    node = exact_transport(p, q, n)

    def run(chooser):
        drafts = dict(enumerate(draw_iid(q, n, chooser, count())))
        token = transports.select_draft(node, drafts, 0, n, chooser)
        return token, list(drafts.values()).count(token)

    return exact_probs(run)


@pytest.mark.parametrize(("vocab", "n", "seeds"), [(4, 2, 10), (3, 3, 10)])
def test_selection_has_distribution_b_and_the_multiplicity_distribution(vocab, n, seeds) -> None:
    """Exact equality of rationals: no tolerance."""
    for seed in range(seeds):
        p, q = exact_pair(vocab, seed)
        node = exact_transport(p, q, n)
        joint = selected(p, q, n)
        for x in support(q):
            assert sum(joint.get((x, m), 0) for m in range(1, n + 1)) == node.probs[x]
            for m, share in enumerate(multiplicity_probs(node, x), start=1):
                assert joint.get((x, m), 0) == share * node.probs[x]


def test_b_is_not_computed_by_a_cancelling_difference() -> None:
    """A tiny token's b keeps its relative precision; a difference of sums near 1 loses it all."""
    p = (1 - 1e-17, 1e-17, 0.0)
    q = (0.5, 1e-17, 0.5 - 1e-17)
    node = exact_transport(p, q, 2)
    exact = exact_transport(*(tuple(Fraction(x) for x in dist) for dist in (p, q)), 2)
    rank = exact.order.index(1)
    assert node.b[rank] == pytest.approx(float(exact.b[rank]), rel=1e-9)


def test_ranking_breaks_ties_by_token_id() -> None:
    p = (Fraction(1, 4), Fraction(0), Fraction(1, 2), Fraction(0), Fraction(1, 4))
    q = (Fraction(1, 8), Fraction(1, 4), Fraction(1, 4), Fraction(1, 4), Fraction(1, 8))
    assert ranked(p, q) == (1, 3, 0, 2, 4)


def test_fractions_and_floats_are_kept_apart() -> None:
    """Equal numbers of two kinds: neither is answered by what was worked out for the other."""
    exact = (Fraction(1, 4), Fraction(3, 4)), (Fraction(5, 8), Fraction(3, 8))
    rounded = tuple(tuple(float(x) for x in dist) for dist in exact)
    assert rounded == exact
    assert {type(b) for b in exact_transport(*exact, 2).b} == {Fraction}
    assert {type(b) for b in exact_transport(*rounded, 2).b} == {float}


# --- in tensors
def batched(p: list, q: list, n: int) -> tuple[RankedProbs, torch.Tensor, torch.Tensor]:
    ids = torch.arange(len(p)).flip(0)
    found = RankedProbs.of(
        ids, torch.tensor(q, dtype=torch.float64)[ids], torch.tensor(p, dtype=torch.float64)[ids]
    )
    plan = transports.transport(found, torch.tensor(n))
    return found, plan.selected, plan.highest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 3, 5, 16])
def test_distribution_is_the_reference_distribution_and_attains_the_optimum(kind, n) -> None:
    rng = np.random.default_rng(n)
    for vocab in (2, 5, 64):
        for _ in range(4):
            p, q = (as_probs(x) for x in PAIRS[kind](rng, vocab))
            expected = exact_transport(p, q, n)
            found, b, v = batched(p, q, n)
            size = len(expected.order)
            assert expected.acceptance(p) == pytest.approx(alpha_iid(p, q, n), abs=1e-13)
            assert all(expected.probs[x] == 0 for x in range(vocab) if q[x] == 0)
            assert min(expected.probs) >= 0
            assert tuple(found.ids[:size].tolist()) == expected.order
            np.testing.assert_allclose(b[:size], expected.b, rtol=1e-9, atol=1e-15)
            np.testing.assert_allclose(v[:size], expected.v, rtol=1e-12, atol=1e-300)
            assert float(b[size:].abs().sum()) == 0
            assert float(b.sum()) == pytest.approx(1, abs=1e-13)


def test_highest_draft_keeps_its_digits_in_a_long_tail() -> None:
    """The plain difference of powers is exactly zero for many of these tokens."""
    q = np.full(4096, 1e-18)
    q[0] = 1 - q[1:].sum()
    p = np.full(4096, 1 / 4096)
    _, b, v = batched(p.tolist(), q.tolist(), 4)
    assert float(v.min()) > 3.9e-18
    assert bool((b > 0).all())
