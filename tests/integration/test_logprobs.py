"""Log-probabilities are those of the tables, at every committed token and every prompt token."""

import math

import msgspec
import numpy as np
import pytest
from support.exact_engine import VOCAB, ExactEngine, exact_engine
from support.ruled import ruled_probs

from eaglegbv import verification
from eaglegbv.config import PLAIN, Plan
from eaglegbv.logprobs import TokenLogprobs
from eaglegbv.request import Request
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling

PROMPT = [3, 1, 4, 1, 5, 2, 6, 5, 3]
PLANS = {
    "plain": PLAIN,
    "otbv": Plan(paths=3, depth=3),
    "fixed": Plan(paths=2, depth=3, draft_sampling=DraftSampling.FIXED),
    "greedy_block": Plan(verifier="greedy_block", paths=1, depth=3),
}
PENALISED = {"temperature": 1.3, "frequency_penalty": 0.4, "min_tokens": 3, "stop_token_ids": (0,)}


def answered(engine: ExactEngine, plan: Plan, seeds: int = 4, **settings: object) -> list[Request]:
    params = [SamplingParams(max_tokens=9, seed=seed, **settings) for seed in range(seeds)]
    requests = [engine.engine.add(PROMPT, own, plan) for own in params]
    engine.run()
    assert not any(request.error for request in requests)
    return requests


def check(place: TokenLogprobs, token: int, probs: np.ndarray, count: int) -> None:
    """Compare one place with its exact distribution ``[vocab]``."""
    order = sorted(range(VOCAB), key=lambda x: -probs[x])
    assert next(iter(place)) == token
    assert set(place) == {token, *order[:count]}
    for x, known in place.items():
        assert known.rank == order.index(x) + 1
        assert known.logprob == pytest.approx(math.log(probs[x]), abs=1e-5)


def raw(engine: ExactEngine, text: list[int]) -> np.ndarray:
    return ruled_probs(engine.target, [], text, SamplingParams())


def check_all(engine: ExactEngine, requests: list[Request]) -> None:
    for request in requests:
        assert len(request.logprobs) == len(request.token_ids) == 9
        for n, (token, place) in enumerate(zip(request.token_ids, request.logprobs, strict=True)):
            check(place, token, raw(engine, [*PROMPT, *request.token_ids[:n]]), 2)


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_every_token_has_its_own(plan):
    engine = exact_engine(slots=2048)
    check_all(engine, answered(engine, plan, logprobs=2, temperature=1.3))


def test_a_place_beside_its_own_is_seen(monkeypatch):
    """A mistake: each token is scored where the one before it was drawn."""
    engine = exact_engine(slots=2048)
    right = verification.pad
    monkeypatch.setattr(verification, "pad", lambda nodes, sides: right(nodes, sides).roll(1, 1))
    requests = answered(engine, PLANS["otbv"], logprobs=2)
    with pytest.raises(AssertionError):
        check_all(engine, requests)


@pytest.mark.parametrize("plan", ["plain", "otbv"])
def test_processed_ones_are_after_the_settings(plan):
    engine = exact_engine(slots=2048)
    settings = {**PENALISED, "logprobs": 1, "logprobs_mode": "processed_logprobs"}
    for request in answered(engine, PLANS[plan], **settings):
        for n, (token, place) in enumerate(zip(request.token_ids, request.logprobs, strict=True)):
            exact = ruled_probs(engine.target, PROMPT, request.token_ids[:n], request.params)
            check(place, token, exact, 1)


def test_at_temperature_0_processed_ones_are_before_the_choice():
    engine = exact_engine(slots=2048)
    settings = {**PENALISED, "temperature": 0, "logprobs_mode": "processed_logprobs"}
    [request] = answered(engine, PLANS["otbv"], seeds=1, logprobs=3, **settings)
    warm = msgspec.structs.replace(request.params, temperature=1)
    for n, (token, place) in enumerate(zip(request.token_ids, request.logprobs, strict=True)):
        check(place, token, ruled_probs(engine.target, PROMPT, request.token_ids[:n], warm), 3)


def test_requests_that_ask_and_others_share_steps():
    engine = exact_engine(slots=2048)
    asking = [{}, {"logprobs": 0}, {"logprobs": -1}, {"prompt_logprobs": 1}]
    requests = [
        engine.engine.add(PROMPT, SamplingParams(max_tokens=5, seed=n, **own), PLANS["otbv"])
        for n, own in enumerate(asking)
    ]
    engine.run()
    counts = [[len(place) for place in request.logprobs] for request in requests]
    assert counts == [[], [1] * 5, [VOCAB] * 5, []]
    assert [len(request.prompt_logprobs) for request in requests] == [0, 0, 0, len(PROMPT)]


@pytest.mark.parametrize("prefill_tokens", [1, 4, 1024])
def test_a_prompt_is_scored_however_it_is_read(prefill_tokens):
    """In parts, and after the same prompt was read and kept."""
    engine = exact_engine(slots=2048, prefill_tokens=prefill_tokens)
    long = PROMPT * 4
    for settings in ({}, {"prompt_logprobs": 2}):
        request = engine.engine.add(long, SamplingParams(max_tokens=2, **settings), PLANS["otbv"])
        engine.run()
    assert request.metrics.cached_tokens == 0
    first, *others = request.prompt_logprobs
    assert first is None
    for n, place in enumerate(others, start=1):
        check(place, long[n], raw(engine, long[:n]), 2)
    assert len(others) == len(long) - 1


def test_a_prompt_of_one_token_has_none():
    engine = exact_engine(slots=2048)
    request = engine.engine.add([3], SamplingParams(max_tokens=2, prompt_logprobs=2), PLAIN)
    engine.run()
    assert request.prompt_logprobs == [None]
