"""SGLang's own engine serving with our drafts and verifiers, on a CPU.

The compiled CPU operations are those of ``stand_in``; scheduler, workers, memory pools, sampler and
grammars are SGLang's. Its memory check runs whenever it is idle, and ends it if a slot is missing.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.g_test import g_test, joint_probs
from support.sglang_engine import (
    GREEDY,
    NEEDS_SGLANG,
    PROMPT,
    PROMPTS,
    SAMPLED,
    pair_arguments,
    three_tokens,
    token_ids,
)
from support.sglang_engine import sglang_engine as start
from support.sglang_pair import EOS, VOCAB, SGLangPair

pytestmark = NEEDS_SGLANG

LAW_SAMPLES = int(os.environ.get("EAGLEGBV_SGLANG_SAMPLES", "480"))


@pytest.fixture(
    scope="module",
    params=[
        ("otbv", "eagle1", 3, 3),
        ("gbv", "eagle3", 2, 2),
        ("block", "eagle1", 1, 3),
        ("greedy_block", "eagle1", 1, 3),
        ("spectr_gbv", "eagle3", 2, 3),
    ],
    ids=lambda config: "-".join(map(str, config)),
)
def engine(
    request: pytest.FixtureRequest, pair: SGLangPair, plain_greedy: list[list[int]]
) -> Iterator[Any]:
    del plain_greedy  # its engine must have ended before this one starts
    verifier, head, K, L = request.param
    settings = {"EAGLEGBV_VERIFIER": verifier, "EAGLEGBV_SEED": "3"}
    with start(settings, **pair_arguments(pair, head, K, L)) as started:
        started.paths, started.depth = K, L
        yield started
        # Still there: the memory check has not ended it.
        assert started.generate(input_ids=[PROMPT], sampling_params=GREEDY)[0]["output_ids"]


def test_greedy_text_is_sglangs_own(engine, plain_greedy):
    assert token_ids(engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)) == plain_greedy


def test_greedy_and_sampled_requests_share_a_batch(engine, plain_greedy):
    params = [GREEDY] * len(PROMPTS) + [SAMPLED] * 10
    answers = engine.generate(input_ids=[*PROMPTS, *[PROMPT] * 10], sampling_params=params)
    assert token_ids(answers[: len(PROMPTS)]) == plain_greedy
    assert len({tuple(ids) for ids in token_ids(answers[len(PROMPTS) :])}) == 10


def test_a_seed_fixes_the_answer_in_any_company(engine):
    seeded = SAMPLED | {"sampling_seed": 2**63 - 5}
    [alone] = token_ids(engine.generate(input_ids=[PROMPT], sampling_params=[seeded]))
    params = [SAMPLED, seeded, GREEDY, SAMPLED | {"sampling_seed": 8}]
    crowd = token_ids(engine.generate(input_ids=[PROMPT] * 4, sampling_params=params))
    assert crowd[1] == alone
    assert crowd[0] != alone
    assert crowd[3] != alone


def test_distribution_of_three_tokens(engine, pair):
    for params in ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}):
        texts: list[list[int]] = []
        own = params | {"max_new_tokens": 5, "ignore_eos": True}
        while len(texts) < LAW_SAMPLES:
            texts += token_ids(engine.generate(input_ids=[PROMPT] * 240, sampling_params=own))
        outcome = three_tokens(pair, texts, **params)
        assert outcome.p_value > 1e-5, outcome


PENALTIES = {
    "frequency": {"frequency_penalty": -1.5},
    "presence": {"presence_penalty": 1.0},
    "repetition": {"repetition_penalty": 1.4},
    "all": {"frequency_penalty": 0.7, "presence_penalty": -1.0, "repetition_penalty": 0.8},
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_count_every_token_before(engine, pair, name):
    """The joint distribution of three tokens, the last two from trees, as of plain decoding."""
    own = {"temperature": 1.0, "max_new_tokens": 3, "ignore_eos": True} | PENALTIES[name]
    texts: list[list[int]] = []
    while len(texts) < LAW_SAMPLES:
        texts += token_ids(engine.generate(input_ids=[PROMPT] * 240, sampling_params=own))
    dist = joint_probs(penalised(pair, **PENALTIES[name]), PROMPT, 3)
    outcome = g_test([(a * VOCAB + b) * VOCAB + c for a, b, c in texts], dist)
    assert outcome.p_value > 1e-5, outcome


def penalised(
    pair: SGLangPair,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
) -> Callable[[list[list[int]]], NDArray[np.float64]]:
    """Return the next tokens' distributions under penalties on what followed the prompt."""
    plain = pair.next_logits()

    def after(sequences: list[list[int]]) -> NDArray[np.float64]:
        logits = plain(sequences)
        for row, sequence in zip(logits, sequences, strict=True):
            counts = np.bincount(sequence[len(PROMPT) :], minlength=VOCAB)
            row -= frequency_penalty * counts + presence_penalty * (counts > 0)
            factors = np.where(counts > 0, repetition_penalty, 1.0)
            row[:] = np.where(row < 0, row * factors, row / factors)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

    return after


def test_a_prompt_seen_before_comes_from_the_prefix_cache(engine):
    seeded = SAMPLED | {"sampling_seed": 6}
    first, again = (
        engine.generate(input_ids=[[7] * 40], sampling_params=[seeded])[0] for _ in range(2)
    )
    assert first["meta_info"]["cached_tokens"] < 2
    assert again["meta_info"]["cached_tokens"] > 30
    assert again["output_ids"] == first["output_ids"]


def test_min_p_is_applied(engine, pair):
    """At min_p 1 only the most likely token is left, at every node."""
    params = SAMPLED | {"min_p": 1.0, "max_new_tokens": 12}
    greedy = token_ids(engine.generate(input_ids=[PROMPT], sampling_params=GREEDY))[0]
    answers = token_ids(engine.generate(input_ids=[PROMPT] * 4, sampling_params=params))
    assert answers == [greedy[:12]] * 4


def test_metrics_say_what_was_accepted(engine):
    [answer] = engine.generate(
        input_ids=[PROMPT], sampling_params=[SAMPLED | {"max_new_tokens": 60}]
    )
    about = answer["meta_info"]
    histogram = about["spec_correct_drafts_histogram"]
    forwards, accepted = sum(histogram), sum(i * n for i, n in enumerate(histogram))
    assert len(histogram) <= engine.depth + 1
    assert about["spec_verify_ct"] == forwards
    # All but the prompt's own token come from verifications; what the last adds may be cut.
    assert 59 <= accepted + forwards <= 59 + engine.depth
    assert about["block_efficiency"] == pytest.approx(59 / forwards)
    kept = accepted - max(0, accepted + forwards - 59 - 1)
    assert about["acceptance_length"] == pytest.approx(kept / forwards)
    # SGLang's own fields keep their meaning.
    assert about["spec_accept_length"] == pytest.approx(60 / forwards)
    nodes = engine.paths * engine.depth
    assert about["spec_accept_rate"] == pytest.approx(accepted / forwards / nodes)


def test_texts_end_where_they_should(engine):
    free = {"temperature": 1.0, "max_new_tokens": 200}
    answers = engine.generate(input_ids=[PROMPT] * 12, sampling_params=free)
    ended = [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
    assert ended
    assert all(a["output_ids"].index(EOS) == len(a["output_ids"]) - 1 for a in ended)
    stopped = engine.generate(
        input_ids=[PROMPT] * 6, sampling_params=free | {"stop_token_ids": [8, 9]}
    )
    for answer in stopped:
        ids = answer["output_ids"]
        assert not {8, 9, EOS} & set(ids[:-1])
    cut = engine.generate(input_ids=[PROMPT] * 3, sampling_params=SAMPLED | {"max_new_tokens": 7})
    assert [len(ids) for ids in token_ids(cut)] == [7, 7, 7]


def test_logprobs_are_those_of_the_tokens(engine, pair):
    params = SAMPLED | {"max_new_tokens": 10}
    [answer] = engine.generate(input_ids=[PROMPT], sampling_params=[params], return_logprob=True)
    dists, text = pair.next_probs(1.0, 1.0), list(PROMPT)
    for logprob, token, _ in answer["meta_info"]["output_token_logprobs"]:
        assert logprob == pytest.approx(np.log(dists([text])[0, token]), abs=1e-4)
        text.append(token)
    assert text[len(PROMPT) :] == answer["output_ids"]
