"""Draft distributions as short lists: what is kept is what is drawn from."""

import math

import pytest
import torch

from eaglegbv.backends.sglang.short_probs import ShortProbs


def dists(logits: list[list[float]], *, temperature: float = 1.0, width: int = 8) -> ShortProbs:
    table = torch.tensor(logits)
    temperatures = torch.full((len(logits), 1), temperature)
    return ShortProbs.of_logits(table, temperatures, width=width, target_ids=None)


def test_keeps_the_most_likely_and_normalises_them() -> None:
    own = dists([[0.0, math.log(3), math.log(2), -5.0]], width=3)
    assert own.ids.tolist() == [[1, 2, 0]]
    torch.testing.assert_close(own.probs, torch.tensor([[3, 2, 1]]).double() / 6)
    assert own.probs.dtype == torch.float64


def test_tempers() -> None:
    own = dists([[0.0, math.log(4)]], temperature=2.0)
    torch.testing.assert_close(own.probs, torch.tensor([[2, 1]]).double() / 3)


def test_names_tokens_of_the_target() -> None:
    own = ShortProbs.of_logits(
        torch.tensor([[1.0, 3.0]]),
        torch.ones(1, 1),
        width=2,
        target_ids=torch.tensor([7, 40]),
    )
    assert own.ids.tolist() == [[40, 7]]


def test_a_broken_head_drafts_one_token_for_certain() -> None:
    own = dists([[math.nan, 0.0, 1.0], [0.0, 1.0, 2.0]])
    assert own.probs[0].tolist() == [1, 0, 0]
    assert own.probs[1].sum().item() == pytest.approx(1)
    assert 0 <= own.pick(torch.tensor([0.999, 0.0]))[0] < 3


def test_packing_keeps_every_bit() -> None:
    own = dists([[0.1, 0.2, 0.3]])
    again = ShortProbs.unpack(own.pack())
    assert torch.equal(again.ids, own.ids)
    assert torch.equal(again.probs, own.probs)


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.499999, 0.5, 0.75, 1 - 2**-53])
def test_picks_by_inverse_cdf(uniform: float) -> None:
    own = ShortProbs(torch.tensor([[5, 6, 7]]), torch.tensor([[0.5, 0.5, 0.0]]).double())
    token = own.pick(torch.tensor([uniform], dtype=torch.float64)).item()
    assert token == (5 if uniform < 0.5 else 6)


def test_picks_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0], dtype=torch.float64)
    draws = 20_000
    table = ShortProbs(torch.arange(5).expand(draws, -1), probs.expand(draws, -1))
    picked = table.pick((torch.arange(draws, dtype=torch.float64) + 0.5) / draws)
    shares = torch.bincount(picked, minlength=5).double() / draws
    torch.testing.assert_close(shares, probs, atol=1 / draws, rtol=0)


def test_paths_take_the_distribution_of_the_path_that_stands_for_them() -> None:
    rows = ShortProbs(torch.arange(12).view(6, 2), torch.arange(12).view(6, 2).double())
    own = rows.of_branches(torch.tensor([[0, 0, 2], [0, 1, 1]]))
    assert own.ids.tolist() == [[[0, 1], [0, 1], [4, 5]], [[6, 7], [8, 9], [8, 9]]]
