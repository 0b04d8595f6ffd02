"""Numbers of several judgements lie in different parts, and each judgement's alone are uniform."""

from math import nextafter

import torch
from scipy import stats

from eaglegbv.eval.audit_sampled import latin_hypercube
from eaglegbv.verifiers.base import VerifyUniforms

BATCH, LENGTH, PATHS = 3, 40, 5


def draws(count: int, seed: int = 0) -> list[VerifyUniforms]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    return [
        VerifyUniforms(
            selection=drawn(BATCH, LENGTH, PATHS, 2),
            acceptance=drawn(BATCH, LENGTH * PATHS),
            correction=drawn(BATCH),
        )
        for _ in range(count)
    ]


def numbers(own: VerifyUniforms) -> tuple[torch.Tensor, ...]:
    return own.selection, own.acceptance, own.correction


def columns(uniforms: list[VerifyUniforms]) -> torch.Tensor:
    """All numbers, ``[judgements, numbers]``."""
    return torch.stack([torch.cat([x.flatten() for x in numbers(own)]) for own in uniforms])


SEEDS = [[number, 7] for number in range(BATCH)]


def test_one_number_lies_in_each_part() -> None:
    spread = latin_hypercube(draws(4), SEEDS)
    places = (columns(spread) * 4).floor().sort(dim=0).values
    assert (places == torch.arange(4.0).unsqueeze(1)).all()
    assert [u.selection.shape for u in spread] == [(BATCH, LENGTH, PATHS, 2)] * 4
    assert [u.correction.shape for u in spread] == [(BATCH,)] * 4


def test_each_judgement_alone_is_uniform_and_independent() -> None:
    for own in columns(latin_hypercube(draws(4), SEEDS)):
        assert stats.kstest(own.numpy(), "uniform").pvalue > 1e-4
        assert stats.pearsonr(own[:-1].numpy(), own[1:].numpy()).pvalue > 1e-4


def test_the_order_is_the_seeds() -> None:
    first, again = (columns(latin_hypercube(draws(3), SEEDS)) for _ in range(2))
    assert torch.equal(first, again)
    other = columns(latin_hypercube(draws(3), [[number, 8] for number in range(BATCH)]))
    assert not torch.equal(first, other)
    [own] = draws(1)
    [kept] = latin_hypercube([own], SEEDS)  # a single judgement keeps its numbers
    assert torch.equal(kept.acceptance, own.acceptance)


def test_no_number_is_one() -> None:
    almost = nextafter(1.0, 0.0)
    full = [
        VerifyUniforms(*(torch.full_like(part, almost) for part in numbers(own)))
        for own in draws(3)
    ]
    assert columns(latin_hypercube(full, SEEDS)).max() < 1
