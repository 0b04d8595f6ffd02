"""Top-k, top-p and min-p on probabilities, against the same on logits."""

import pytest
import torch

from eaglegbv.backends.sglang.renormalisation import keep_min_p, keep_top_k, keep_top_p
from eaglegbv.sampling import SamplingParams, WarpSettings, warp

ROWS = torch.randn(50, 30, generator=torch.Generator().manual_seed(0)) * 2


def warped(**params: float) -> torch.Tensor:
    own = [SamplingParams(**params)]  # type: ignore[arg-type]
    return warp(ROWS, WarpSettings.of(own, [len(ROWS)])).softmax(dim=1)


@pytest.mark.parametrize("top_k", [1, 2, 7, 30])
def test_top_k(top_k: int) -> None:
    kept = keep_top_k(ROWS.softmax(1), torch.full((len(ROWS),), top_k, dtype=torch.int32))
    torch.testing.assert_close(kept, warped(top_k=top_k))


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    kept = keep_top_k(ROWS.softmax(1), torch.full((len(ROWS),), 2**30, dtype=torch.int32))
    torch.testing.assert_close(kept, ROWS.softmax(1))


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 1.0])
def test_top_p(top_p: float) -> None:
    kept = keep_top_p(ROWS.softmax(1), torch.full((len(ROWS),), top_p))
    torch.testing.assert_close(kept, warped(top_p=top_p))


@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_min_p(min_p: float) -> None:
    kept = keep_min_p(ROWS.softmax(1), torch.full((len(ROWS),), min_p))
    torch.testing.assert_close(kept, warped(min_p=min_p))
