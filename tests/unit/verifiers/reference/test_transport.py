import itertools
from fractions import Fraction

import numpy as np
import pytest
from support.tables import KINDS, PAIRS, as_probs

from eaglegbv.verifiers.proof.chooser import Probs, exact_probs, support
from eaglegbv.verifiers.proof.tree import draft_iid
from eaglegbv.verifiers.transport import exact_transport, multiplicity_probs, ranked, select_draft


def pair(kind: str, vocab: int, seed: int) -> tuple[Probs, Probs]:
    p, q = PAIRS[kind](np.random.default_rng([seed, vocab]), vocab)
    return as_probs(p), as_probs(q)


def exact_pair(vocab: int, seed: int, total: int = 12) -> tuple[Probs, Probs]:
    """Twelfths: zeros and ties abound, and everything is exact."""
    rng = np.random.default_rng([seed, vocab])

    def dist() -> Probs:
        counts = np.bincount(rng.integers(vocab, size=total), minlength=vocab)
        return tuple(Fraction(int(c), total) for c in counts)

    return dist(), dist()


def optimal_acceptance(p: Probs, q: Probs, n: int) -> float | Fraction:
    """1 + min over all token sets H of p(H) - q(H)^n, by brute force."""
    subsets = itertools.chain.from_iterable(
        itertools.combinations(range(len(p)), size) for size in range(len(p) + 1)
    )
    return 1 + min(sum(p[x] for x in H) - sum(q[x] for x in H) ** n for H in subsets)


def selected(p: Probs, q: Probs, n: int):
    """The exact joint distribution of (selected token, number of drafts on it)."""
    node = exact_transport(p, q, n)

    def run(chooser):
        drafts = {k: path[0] for k, path in enumerate(draft_iid(lambda _: q, n, 1, chooser))}
        token = select_draft(node, drafts, 0, n, chooser)
        return token, list(drafts.values()).count(token)

    return exact_probs(run)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_b_is_a_distribution_that_attains_the_optimum(kind: str, n: int) -> None:
    for seed in range(20):
        p, q = pair(kind, 5, seed)
        node = exact_transport(p, q, n)
        assert min(node.probs) >= 0
        assert sum(node.probs) == pytest.approx(1, abs=1e-14)
        assert all(node.probs[x] == 0 for x in range(5) if q[x] == 0)
        assert node.acceptance(p) == pytest.approx(optimal_acceptance(p, q, n), abs=1e-14)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_optimum_is_attained_exactly_in_rationals(n: int) -> None:
    for seed in range(40):
        p, q = exact_pair(4, seed)
        node = exact_transport(p, q, n)
        assert sum(node.probs) == 1
        assert node.acceptance(p) == optimal_acceptance(p, q, n)


@pytest.mark.parametrize(("vocab", "n", "seeds"), [(2, 2, 20), (4, 2, 30), (3, 3, 20), (4, 3, 8)])
def test_selection_has_distribution_b_and_the_multiplicity_distribution(
    vocab: int, n: int, seeds: int
) -> None:
    """Exact equality of rationals: no tolerance."""
    for seed in range(seeds):
        p, q = exact_pair(vocab, seed)
        node = exact_transport(p, q, n)
        joint = selected(p, q, n)
        for x in support(q):
            assert sum(joint.get((x, m), 0) for m in range(1, n + 1)) == node.probs[x]
            for m, share in enumerate(multiplicity_probs(node, x), start=1):
                assert joint.get((x, m), 0) == share * node.probs[x]


@pytest.mark.parametrize("kind", KINDS)
def test_selection_and_multiplicity_in_floating_point(kind: str) -> None:
    for seed in range(6):
        p, q = pair(kind, 4, seed)
        node = exact_transport(p, q, 3)
        joint = selected(p, q, 3)
        for x in support(q):
            for m, share in enumerate(multiplicity_probs(node, x), start=1):
                assert joint.get((x, m), 0) == pytest.approx(share * node.probs[x], abs=1e-14)


def test_labels_keep_q_stationary() -> None:
    for seed in range(40):
        p, q = exact_pair(5, seed)
        for n in (2, 3, 4):
            node = exact_transport(p, q, n)
            labelled = [Fraction(0)] * len(node.order)
            for rank, mass in enumerate(node.q):
                for label, share in node.label_probs(rank).items():
                    assert 0 <= share <= 1
                    labelled[label] += mass * share
            assert labelled == list(node.q)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_floating_point_agrees_with_rationals_on_a_long_vocabulary(n: int) -> None:
    rng = np.random.default_rng(n)
    p, q = (as_probs(rng.dirichlet(np.full(300, 0.1))) for _ in range(2))
    exact_p, exact_q = (tuple(Fraction(x) for x in dist) for dist in (p, q))
    rounded, exact = exact_transport(p, q, n), exact_transport(exact_p, exact_q, n)
    assert rounded.order == exact.order
    errors = [abs(a - float(b)) for a, b in zip(rounded.b, exact.b, strict=True)]
    assert max(errors) < 1e-15
    rank = max(range(len(exact.order)), key=lambda r: exact.b[r])
    a, b = (multiplicity_probs(node, node.order[rank]) for node in (rounded, exact))
    assert a == pytest.approx([float(x) for x in b], abs=1e-12)


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


def test_a_token_too_rare_to_move_the_cumulative_distribution() -> None:
    q = (0.6, 1e-19, 0.4)
    node = exact_transport((0.2, 0.5, 0.3), q, 3)
    assert sum(node.probs) == pytest.approx(1, abs=1e-15)
    dist = multiplicity_probs(node, 1)
    assert dist[0] == pytest.approx(1, abs=1e-15)


def test_fractions_and_floats_are_kept_apart() -> None:
    """Equal numbers of two kinds: neither is answered by what was worked out for the other."""
    exact = (Fraction(1, 4), Fraction(3, 4)), (Fraction(5, 8), Fraction(3, 8))
    rounded = tuple(tuple(float(x) for x in dist) for dist in exact)
    assert rounded == exact
    assert {type(b) for b in exact_transport(*exact, 2).b} == {Fraction}
    assert {type(b) for b in exact_transport(*rounded, 2).b} == {float}
