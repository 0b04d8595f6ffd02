"""The batched exact transport against the readable one, and against known values."""

import numpy as np
import pytest
import torch
from support.tables import KINDS, PAIRS, as_probs

from eaglegbv.verifiers import transport as reference
from eaglegbv.verifiers.transport import RankedProbs, transport


def batched(p: list, q: list, n: int) -> tuple[RankedProbs, torch.Tensor, torch.Tensor]:
    ids = torch.arange(len(p)).flip(0)
    ranked = RankedProbs.of(
        ids, torch.tensor(q, dtype=torch.float64)[ids], torch.tensor(p, dtype=torch.float64)[ids]
    )
    plan = transport(ranked, torch.tensor(n))
    return ranked, plan.selected, plan.highest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 3, 5, 16])
def test_distribution_is_the_reference_distribution(kind: str, n: int) -> None:
    rng = np.random.default_rng(n)
    for vocab in (2, 3, 8, 64):
        for _ in range(10):
            p, q = (as_probs(x) for x in PAIRS[kind](rng, vocab))
            expected = reference.exact_transport(p, q, n)
            ranked, b, v = batched(p, q, n)
            size = len(expected.order)
            assert tuple(ranked.ids[:size].tolist()) == expected.order
            np.testing.assert_allclose(b[:size], expected.b, rtol=1e-9, atol=1e-15)
            np.testing.assert_allclose(v[:size], expected.v, rtol=1e-12, atol=1e-300)
            assert float(b[size:].abs().sum()) == 0
            assert float(b.sum()) == pytest.approx(1, abs=1e-13)


@pytest.mark.parametrize(
    ("p", "q", "n", "alpha"),
    [
        ((1 / 3, 2 / 3), (2 / 3, 1 / 3), 2, 8 / 9),
        ((0.1, 0.5, 0.4), (0.5, 0.4, 0.1), 2, 79 / 100),
        ((0.1, 0.5, 0.4), (0.5, 0.4, 0.1), 3, 871 / 1000),
        ((0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4), 2, 79 / 100),
        ((0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4), 3, 871 / 1000),
    ],
)
def test_optimal_acceptance(p: tuple, q: tuple, n: int, alpha: float) -> None:
    ranked, b, _ = batched(list(p), list(q), n)
    assert float(torch.minimum(ranked.target, b).sum()) == pytest.approx(alpha, abs=1e-14)


def test_highest_draft_keeps_its_digits_in_a_long_tail() -> None:
    """The plain difference of powers is exactly zero for many of these tokens."""
    q = np.full(4096, 1e-18)
    q[0] = 1 - q[1:].sum()
    p = np.full(4096, 1 / 4096)
    _, b, v = batched(p.tolist(), q.tolist(), 4)
    assert float(v.min()) > 3.9e-18
    assert bool((b > 0).all())


def test_one_draft_keeps_the_draft_distribution() -> None:
    rng = np.random.default_rng(0)
    p, q = as_probs(rng.random(8)), as_probs(rng.random(8))
    ranked, b, _ = batched(list(p), list(q), 1)
    assert torch.equal(b, ranked.draft)
