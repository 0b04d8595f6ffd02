import pickle

import msgspec
import numpy as np
import pytest
import torch
import transformers
from support.pretend_device import PretendDevice

from eaglegbv.errors import InvalidArgument
from eaglegbv.sampling import SamplingParams, WarpSettings, penalise, warp
from eaglegbv.tree import WarpedLogits


# --- sampling parameters; what is refused, test_config.py says
def test_settings_may_be_spelled_as_other_engines_do():
    for everything in (0, -1):
        assert SamplingParams(top_k=everything) == SamplingParams()
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


def test_settings_are_frozen_hashable_and_survive_a_round_trip():
    params = SamplingParams(temperature=0.5, stop="x", seed=2**64 - 1)
    with pytest.raises(AttributeError):
        params.temperature = 1.0
    assert hash(params) == hash(SamplingParams(temperature=0.5, stop=["x"], seed=2**64 - 1))
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params
    assert pickle.loads(pickle.dumps(params)) == params


def test_an_error_survives_pickling_between_processes():
    error = pickle.loads(pickle.dumps(InvalidArgument("top_k", 0, "an integer of at least 1")))
    assert isinstance(error, InvalidArgument)
    assert str(error) == "top_k=0: expected an integer of at least 1"
    assert isinstance(error, ValueError)


# Warping against transformers' logits processors, against cases worked by hand, and its edges.
#
# Tolerances: probabilities in float32 are compared at 1e-6 absolute: p = exp(x) is off by about
# p * |x| * 6e-8, and where p > 1e-6 matters |x| is at most 14. Sets of kept tokens are compared
# exactly, on random logits whose gaps are far above rounding.


ATOL = 1e-6

SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(top_k=1),
    SamplingParams(top_k=1000),
    SamplingParams(top_p=0.7),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.5),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=0.6, top_k=7),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.1),
]


def name_of(params):
    values = {n: getattr(params, n) for n in ("temperature", "top_k", "top_p", "min_p")}
    default = SamplingParams()
    changed = [f"{n}={value}" for n, value in values.items() if value != getattr(default, n)]
    return ",".join(changed) or "plain"


def random_logits(rows, vocab, seed=0):
    return 3 * torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed))


def transformers_probs(logits, params):
    """What transformers' ``generate`` samples from, with its processors in its order."""
    if params.greedy:
        return torch.nn.functional.one_hot(logits.argmax(1), logits.shape[1]).double()
    steps = transformers.LogitsProcessorList()
    if params.temperature != 1:
        steps.append(transformers.TemperatureLogitsWarper(params.temperature))
    if params.top_k is not None:
        steps.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(transformers.TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        steps.append(transformers.MinPLogitsWarper(params.min_p))
    ids = torch.zeros((logits.shape[0], 1), dtype=torch.int64)
    return steps(ids, logits.clone()).double().softmax(1)


def dist(logits, params):
    warped = warp(logits, WarpSettings.of([params], [logits.shape[0]]))
    assert warped.dtype == torch.float32  # whatever comes in
    return warped.double().softmax(1)


@pytest.mark.parametrize("params", SETTINGS, ids=name_of)
@pytest.mark.parametrize(
    ("vocab", "dtype"), [(1, torch.bfloat16), (6, torch.float32), (200, torch.float64)]
)
def test_every_setting_gives_the_distribution_transformers_gives(params, vocab, dtype):
    logits = random_logits(40, vocab, seed=vocab).to(dtype)
    before, expected = logits.clone(), transformers_probs(logits.float(), params)
    got = dist(logits, params)
    assert torch.equal(logits, before)  # the caller's logits are left alone
    assert torch.equal(got > 0, expected > 0)
    torch.testing.assert_close(got, expected, atol=ATOL, rtol=0)


def test_mixed_settings_give_every_row_what_it_gets_alone():
    order, rows_each = SETTINGS, [1 + i % 3 for i in range(len(SETTINGS))]
    logits = random_logits(sum(rows_each), 50)
    together = warp(logits, WarpSettings.of(order, rows_each))
    alone = [
        warp(part, WarpSettings.of([params], [len(part)]))
        for params, part in zip(order, logits.split(rows_each), strict=True)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_ties_are_broken_as_documented():
    logits = torch.zeros(1, 5)
    assert (dist(logits, SamplingParams(top_k=2)) > 0).all()  # all five are the most likely
    assert (dist(logits, SamplingParams(top_p=0.5))[0] > 0).tolist() == [True] * 3 + [False] * 2
    # A mass of exactly top_p is enough; many ties are still taken in order.
    for size in (4, 64, 4096):
        kept = (dist(torch.zeros(1, size), SamplingParams(top_p=0.5))[0] > 0).nonzero().flatten()
        assert torch.equal(kept, torch.arange(size // 2))
    assert (dist(logits, SamplingParams(min_p=1.0)) > 0).all()
    assert dist(logits, SamplingParams(temperature=0)).tolist() == [[1, 0, 0, 0, 0]]
    swapped = torch.tensor([[1.0, 3.0, 0.0, 3.0]])
    assert dist(swapped, SamplingParams(temperature=0)).tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize("params", SETTINGS, ids=name_of)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_logits_stay_visible_and_touch_no_other_row(params, bad):
    logits = random_logits(3, 20)
    broken = logits.clone()
    broken[1, 7] = bad
    settings = WarpSettings.of([params], [3])
    got, expected = warp(broken, settings), warp(logits, settings)
    normaliser = WarpedLogits.of(got, torch.arange(3).unsqueeze(1)).log_normaliser
    assert normaliser.isfinite().tolist() == [True, False, True]
    assert torch.equal(got[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("params", SETTINGS, ids=name_of)
def test_tokens_a_model_rules_out_stay_ruled_out(params):
    logits = random_logits(3, 20)
    logits[:, ::2] = -torch.inf
    got = dist(logits, params)
    assert (got[:, ::2] == 0).all()
    torch.testing.assert_close(got, transformers_probs(logits, params), atol=ATOL, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 1e-3, 1e-37])
@pytest.mark.parametrize("level", [0.0, 100.0, -1000.0])
def test_distributions_are_exact_at_low_temperature_and_any_level(temperature, level):
    # Logits are given in float32, so their softmax in float64 is the measure. A sum of probs is
    # off by the rounding of a logsumexp that is at most log 1000 = 7: about 7 * 6e-8 relative.
    logits = random_logits(8, 1000) + level
    logits[0, :2] = logits[0].max()  # a tie is a tie at every temperature
    settings = WarpSettings.of([SamplingParams(temperature=temperature)], [8])
    target = WarpedLogits.of(warp(logits, settings), torch.arange(8).unsqueeze(1))
    probs = target.probs_of(torch.zeros(8, dtype=torch.int64))
    exact = logits.double()
    exact = (exact - exact.max(1, keepdim=True).values) / np.float32(temperature).item()
    torch.testing.assert_close(probs, exact.softmax(1), atol=2e-6, rtol=0)
    assert (probs.sum(1) - 1).abs().max() < 5e-7


# --- penalties
def test_repetition_penalty_is_that_of_transformers():
    prompt, answer = [3, 5, 5], [7, 9]
    logits = random_logits(1, 12)
    in_prompt = torch.zeros((1, 12), dtype=torch.bool)
    in_prompt[0, prompt] = True
    generated = torch.bincount(torch.tensor(answer), minlength=12).unsqueeze(0)
    for penalty in (0.5, 1.0, 1.3, 2.0):
        params = SamplingParams(repetition_penalty=penalty)
        got = penalise(logits, in_prompt, generated, [params], [1])
        processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
        expected = processor(torch.tensor([prompt + answer]), logits.clone())
        assert torch.equal(got, expected)


def test_all_penalties_together_by_hand():
    logits = torch.tensor([[4.0, -4.0, 4.0, -4.0, 4.0]])
    in_prompt = torch.tensor([[True, True, False, False, False]])
    generated = torch.tensor([[0, 0, 2, 1, 0]])
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=-0.5)
    got = penalise(logits, in_prompt, generated, [params], [1])
    # repetition first (4 / 2, -4 * 2), then - count * -0.5, then - 1 where generated
    assert got.tolist() == [[2.0, -8.0, 2.0 + 1.0 - 1.0, -8.0 + 0.5 - 1.0, 4.0]]


def test_penalties_are_each_rows_own():
    params = [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(presence_penalty=0.5, frequency_penalty=0.25),
    ]
    rows_each = [2, 1, 3]
    generator = torch.Generator().manual_seed(0)
    logits = random_logits(6, 9)
    in_prompt = torch.rand((6, 9), generator=generator) < 0.4
    generated = torch.randint(0, 3, (6, 9), generator=generator)
    together = penalise(logits, in_prompt, generated, params, rows_each)
    parts = (given.split(rows_each) for given in (logits, in_prompt, generated))
    everyone = zip(params, rows_each, *parts, strict=True)
    alone = [penalise(*own, [one], [count]) for one, count, *own in everyone]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together[:2], logits[:2])  # no penalty changes nothing
    assert not torch.equal(together[2:], logits[2:])


def sorted_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Top-p by its definition: in order of logits, then of indices, until the mass is reached."""
    values, order = logits.sort(dim=1, descending=True, stable=True)
    probs = values.double().softmax(dim=1)
    drop = (probs.cumsum(dim=1) - probs >= top_p.unsqueeze(1)) & (top_p < 1).unsqueeze(1)
    drop[:, 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
@pytest.mark.parametrize("change", ["none", "ties", "excluded"])
def test_top_p_of_a_large_vocabulary_keeps_what_sorting_every_row_would(where, scale, change):
    """Among the largest, by sorting a row after all, or by a search that waits for nothing."""
    generator = torch.Generator().manual_seed(7)
    tokens, top_p = 9000, (0.1, 0.5, 0.9, 0.999, 1.0)
    logits = torch.randn((5, tokens), generator=generator) * scale
    if change == "ties":
        logits = (2 * logits / scale).round() / 2
    if change == "excluded":
        logits[:, torch.randperm(tokens, generator=generator)[: tokens // 2]] = -torch.inf
    params = [SamplingParams(top_p=p) for p in top_p]
    expected = sorted_top_p(
        logits - logits.amax(dim=1, keepdim=True), torch.tensor(top_p, dtype=torch.float64)
    )
    if where == "host":
        found = warp(logits, WarpSettings.of(params, [1] * 5))
    else:
        with PretendDevice() as device:
            settings = WarpSettings.of(params, [1] * 5, device="cuda")
            away = logits.to("cuda")
            device.blocking.clear()
            found = warp(away, settings)
            assert (device.reads, device.blocking) == ([], [])
            found = found.to("cpu")
    assert torch.equal(found, expected)


def test_a_large_row_with_a_nan_stays_broken():
    logits = torch.zeros((2, 9000))
    logits[1, 5] = torch.nan
    found = warp(logits, WarpSettings.of([SamplingParams(top_p=0.5)], [2]))
    assert found.isnan().all(dim=1).tolist() == [False, True]
