"""Draft probs: the most likely candidates, warped like the target, and what a number selects."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eaglegbv.config import Plan
from eaglegbv.drafters.tree_growth import draft_params, draft_probs, log_probs, pick_places
from eaglegbv.sampling import COLDEST, HOTTEST, SamplingParams, WarpSettings, warp

VOCAB = 30
IDENTITY = torch.arange(VOCAB)


def random_logits(rows, seed=0):
    return 2 * torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed))


def settings(params, rows):
    return WarpSettings.of([params], [rows])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.5, top_k=9, top_p=0.9, min_p=0.02),
    ],
)
def test_at_full_width_a_distribution_is_the_warped_distribution_of_the_whole_vocabulary(params):
    logits = random_logits(8)
    dists = draft_probs(logits, settings(params, 8), width=VOCAB, draft_to_target=IDENTITY)
    whole = warp(logits, settings(params, 8)).double().softmax(1)
    got = torch.zeros_like(whole).scatter(1, dists.ids, dists.probs)
    # The same numbers summed in another order: float64.
    torch.testing.assert_close(got, whole, atol=1e-14, rtol=0)


def test_broken_logits_break_their_own_distribution_visibly():
    logits = random_logits(3)
    logits[1, 4] = torch.nan
    dists = draft_probs(logits, settings(SamplingParams(), 3), width=8, draft_to_target=IDENTITY)
    assert dists.probs.isnan().any(1).tolist() == [False, True, False]
    assert 0 <= pick_index(dists.probs[1], 0.5) < 8  # and the tree can still be built


def test_log_distributions_are_untempered_log_probabilities_best_first():
    logits = random_logits(5)
    best = log_probs(logits, width=4, draft_to_target=IDENTITY)
    expected = logits.double().log_softmax(1).sort(1, descending=True)
    assert torch.equal(best.ids, expected.indices[:, :4])
    assert best.probs.dtype == torch.float64
    torch.testing.assert_close(best.probs, expected.values[:, :4], atol=2e-6, rtol=0)  # float32


# --- what a number selects


def pick_index(probs, uniform: float) -> int:
    number = torch.tensor(uniform, dtype=torch.float64)
    return int(pick_places(torch.as_tensor(probs), number))


@given(
    weights=st.lists(
        st.sampled_from([0.0, 1e-300, 1e-20, 1e-3, 0.1, 1 / 3, 1.0]), min_size=1
    ).filter(any),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_whatever_the_rounding_a_possible_token_is_selected(weights, uniform):
    probs = np.array(weights) / np.sum(weights)
    choice = pick_index(probs, uniform)
    assert probs[choice] > 0
    # The interval of the choice holds the number, up to the rounding of a sum of at most 1.
    end = probs[: choice + 1].sum()
    slack = 1e-14
    assert end - probs[choice] - slack <= uniform * probs.sum() <= end + slack


@pytest.mark.parametrize(
    ("temperature", "multiple", "drafted"),
    [
        (0.8, 0.5, 0.4),
        (COLDEST, 0.05, COLDEST),
        (HOTTEST, 20.0, HOTTEST),
        (COLDEST, 2, 2 * COLDEST),
    ],
)
def test_a_draft_temperature_keeps_to_the_limits(temperature, multiple, drafted) -> None:
    params = SamplingParams(temperature=temperature, top_k=5)
    found = draft_params(params, Plan(paths=2, draft_temperature=multiple))
    assert (found.temperature, found.top_k) == (drafted, 5)
