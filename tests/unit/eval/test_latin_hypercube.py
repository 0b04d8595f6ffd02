"""Numbers of several judgements lie in different parts, and each judgement's alone are uniform."""

from collections.abc import Sequence

import torch
from scipy import stats

from eaglegbv.eval.paired_comparison import latin_hypercube

BATCH, LENGTH, PATHS = 3, 40, 5


def columns(
    count: int, seeds: Sequence[tuple[int, ...]] = ((0, 7), (1, 7), (2, 7))
) -> torch.Tensor:
    """All numbers, ``[judgements, numbers]``, of the right shapes."""
    found = latin_hypercube(seeds, count, paths=PATHS, length=LENGTH)
    parts = [(own.selection, own.acceptance, own.correction) for own in found]
    shapes = [(BATCH, LENGTH, PATHS, 2), (BATCH, LENGTH * PATHS), (BATCH,)]
    assert [[x.shape for x in own] for own in parts] == [shapes] * count
    return torch.stack([torch.cat([x.flatten() for x in own]) for own in parts])


def test_one_number_lies_in_each_part() -> None:
    places = (columns(4) * 4).floor().sort(dim=0).values
    assert (places == torch.arange(4.0).unsqueeze(1)).all()


def test_each_judgement_alone_is_uniform_and_independent() -> None:
    for own in columns(4):
        assert ((own >= 0) & (own < 1)).all()
        assert stats.kstest(own.numpy(), "uniform").pvalue > 1e-4
        assert stats.pearsonr(own[:-1].numpy(), own[1:].numpy()).pvalue > 1e-4


def test_the_order_is_the_seeds() -> None:
    assert torch.equal(columns(3), columns(3))
    assert not torch.equal(columns(3), columns(3, [(n, 8) for n in range(BATCH)]))
