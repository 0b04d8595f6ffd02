"""SGLang's engine under pressure, and its own EAGLE: what both answer is as it should be."""

import asyncio

import pytest
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

pytestmark = NEEDS_SGLANG


@pytest.mark.parametrize(
    ("verifier", "head", "K", "L"),
    [
        ("otbv", "eagle1", 3, 3),
        ("gbv", "eagle3", 3, 3),
        ("block", "eagle1", 1, 3),
        ("spectr_gbv", "eagle1", 3, 3),
    ],
)
def test_retracted_chunked_and_aborted_requests(verifier, head, K, L, pair, plain_greedy):
    """Every few steps requests lose their memory and read all again, prompts come in parts."""
    settings = {
        "EAGLEGBV_VERIFIER": verifier,
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "4",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    }
    own = pair_arguments(pair, head, K, L) | {"chunked_prefill_size": 16}
    with start(settings, **own) as engine:
        answers = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        assert token_ids(answers) == plain_greedy
        many = [PROMPT, [4] * 30] * 20
        answers = engine.generate(input_ids=many, sampling_params=SAMPLED)
        assert [len(ids) for ids in token_ids(answers)] == [24] * 40
        # Tokens after re-read texts follow the distribution too, however modified the target.
        texts = token_ids(engine.generate(input_ids=[PROMPT] * 240, sampling_params=SAMPLED))
        assert three_tokens(pair, texts).p_value > 1e-5
        assert len({tuple(ids) for ids in token_ids(answers)}) > 30

        async def leave_early() -> None:
            endless = SAMPLED | {"max_new_tokens": 220}
            streams = [
                await engine.async_generate(input_ids=PROMPT, sampling_params=endless, stream=True)
                for _ in range(4)
            ]
            for stream in streams:
                await anext(stream)
            engine.tokenizer_manager.abort_request(abort_all=True)
            for stream in streams:
                async for answer in stream:
                    last = answer
                assert last["meta_info"]["finish_reason"]["type"] == "abort"

        engine.loop.run_until_complete(asyncio.wait_for(leave_early(), 600))
        assert token_ids(engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)) == plain_greedy


def test_sglangs_own_eagle_samples_the_same_distribution(pair, plain_greedy):
    """With the stand-in kernel."""
    own = pair_arguments(pair, "eagle1", 3, 3)
    own |= {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 10}
    params = {"temperature": 1.0, "max_new_tokens": 5, "ignore_eos": True}
    with start({"EAGLE_SAMPLES": "1"}, **own) as engine:
        assert token_ids(engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)) == plain_greedy
        texts = token_ids(engine.generate(input_ids=[PROMPT] * 960, sampling_params=params))
    outcome = three_tokens(pair, texts)
    assert outcome.p_value > 1e-5, outcome
    assert len({tuple(text) for text in texts}) > 500
