"""The library's passes over rows of logits agree with the tensor operations."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eaglegbv import sampling
from eaglegbv.drafters import draft_probs
from eaglegbv.native import model
from eaglegbv.sampling import SamplingParams, WarpSettings

TEMPERATURES = (0.3, 1.0, 1.7)


def settings_of(*temperatures: float, **others: float) -> WarpSettings:
    params = [SamplingParams(temperature=t, **others) for t in temperatures]
    return WarpSettings.of(params, [1] * len(params))


def logits_of(vocab: int, seed: int, *, levels: int | None = None) -> torch.Tensor:
    """Random logits of three rows, in so few levels that many are equal if any are given."""
    generator = torch.Generator().manual_seed(seed)
    logits = 8 * torch.randn((3, vocab), generator=generator)
    return logits if levels is None else (logits / 8 * levels).round()


@given(st.integers(1, 70), st.integers(0, 100))
def test_warped_rows_are_those_of_the_tensor_operations(vocab, seed):
    logits, settings = logits_of(vocab, seed), settings_of(*TEMPERATURES)
    assert model.takes_rows(logits, settings)
    warped, normalisers = model.warped_rows(logits, settings)
    plain, expected = sampling.warped_rows(logits, settings)
    assert torch.equal(warped, plain)
    torch.testing.assert_close(normalisers, expected, atol=1e-6, rtol=1e-6)


@given(st.integers(2, 70), st.integers(0, 100), st.sampled_from([None, 2]))
def test_candidates_are_those_of_the_tensor_operations(vocab, seed, levels):
    logits, settings = logits_of(vocab, seed, levels=levels), settings_of(*TEMPERATURES)
    width = 1 + seed % (vocab - 1)
    places, probs = model.candidates(logits, settings, width)
    assert bool((places[:, 1:] > places[:, :-1]).all())
    kept = logits.gather(1, places)
    assert torch.equal(kept.sort(1).values, logits.topk(width, dim=1).values.sort(1).values)
    expected = sampling.warp(kept, settings).softmax(dim=1, dtype=torch.float64)
    torch.testing.assert_close(probs, expected, atol=1e-12, rtol=1e-12)


def test_of_equal_candidates_the_first_are_kept():
    places, _ = model.candidates(torch.tensor([[1.0, 0.0, 1.0, 1.0]]), settings_of(1.0), 2)
    assert places.tolist() == [[0, 2]]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 5, 40])
def test_what_is_no_number_is_noticed(broken, place):
    logits = logits_of(41, 0)
    logits[1, place] = broken
    normalisers = model.warped_rows(logits, settings_of(*TEMPERATURES))[1]
    assert normalisers.isfinite().tolist() == [True, False, True]
    places, probs = model.candidates(logits, settings_of(*TEMPERATURES), 3)
    assert place in places[1].tolist()
    assert not probs[1].isfinite().all()


def test_excluded_tokens_keep_probability_0():
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    warped, normalisers = model.warped_rows(logits, settings_of(1.0))
    assert (warped - normalisers).exp().tolist()[0][1] == 0


def test_other_settings_are_left_to_tensor_operations():
    logits = torch.zeros((1, 8))
    for others in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}):
        assert not model.takes_rows(logits, settings_of(1.0, **others))
    assert not model.takes_rows(logits, settings_of(0.0))
    assert not model.takes_rows(logits.bfloat16(), settings_of(1.0))


def test_drafts_have_the_same_candidates_without_the_library(monkeypatch):
    logits, settings = logits_of(64, 1), settings_of(*TEMPERATURES)
    ids = torch.arange(64) * 2
    ours = draft_probs.draft_probs(logits, settings, width=5, draft_to_target=ids)
    monkeypatch.setattr(model, "native_library", lambda: None)
    plain = draft_probs.draft_probs(logits, settings, width=5, draft_to_target=ids)
    assert torch.equal(ours.ids, plain.ids)
    torch.testing.assert_close(ours.probs, plain.probs, atol=1e-12, rtol=1e-12)
