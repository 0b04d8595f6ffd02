"""Draws by inverse CDF at the edges of floating point."""

import numpy as np
import pytest
import torch

from eaglegbv.tree import TargetProbs
from eaglegbv.verifiers.paths import Residual, correction_token, draw

LAST = 1 - 2**-53
"""The largest number below 1."""


@pytest.mark.parametrize("scale", [1e-300, 5e-324, 1e-16, 1.0, 1e300])
@pytest.mark.parametrize(("u", "expected"), [(0.0, 1), (LAST, 2), (1.0, 2)])
def test_scale_of_the_weights_does_not_matter(scale: float, u: float, expected: int) -> None:
    weights = torch.tensor([[0.0, scale, scale, 0.0]], dtype=torch.float64)
    assert int(draw(weights, torch.tensor([u], dtype=torch.float64))) == expected


@pytest.mark.parametrize("entries", [8191, 8192, 8193, 10_000, 12_288])
def test_large_vocabularies_are_drawn_from_alike(entries: int) -> None:
    """Two levels or one: the inverse CDF, never a weight of zero, also across empty blocks."""
    rng = np.random.default_rng(entries)
    weights = rng.exponential(size=(64, entries)) * (rng.random((64, entries)) < 0.3)
    weights[:, 600:3000] = 0
    weights[:, -700:] = 0
    uniforms = rng.random(64)
    uniforms[:3] = 0.0, LAST, 1.0
    drawn = draw(torch.from_numpy(weights), torch.from_numpy(uniforms))
    cumulative = weights.cumsum(axis=1)
    for row, u, x in zip(range(64), uniforms, drawn.tolist(), strict=True):
        assert weights[row, x] > 0
        last = int(np.flatnonzero(weights[row])[-1])
        expected = int(np.searchsorted(cumulative[row], u * cumulative[row, -1], side="right"))
        assert x == min(expected, last)


@pytest.mark.parametrize("u", [0.0, 0.4, LAST])
def test_residual_without_mass_draws_from_the_target(u: float) -> None:
    """Never token 0 by accident, never a token the target excludes."""
    probs = torch.tensor([[[0.0, 0.25, 0.75, 0.0]]], dtype=torch.float64)
    target = TargetProbs.of_probs(probs)
    everything = Residual(
        nodes=torch.tensor([0]),
        weight=torch.ones(1, dtype=torch.float64),
        ids=torch.tensor([[1, 2]]),
        draft=torch.tensor([[0.5, 0.8]], dtype=torch.float64),
    )
    token = correction_token(everything, target, torch.tensor([u], dtype=torch.float64))
    assert token.tolist() == [1 if u < 0.25 else 2]
