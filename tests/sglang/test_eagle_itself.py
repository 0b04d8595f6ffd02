"""SGLang's own EAGLE with the stand-in kernel samples the same distribution as ours."""

from support.sglang_engine import (
    GREEDY,
    NEEDS_SGLANG,
    PROMPT,
    PROMPTS,
    pair_arguments,
    sglang_engine,
    three_tokens,
    token_ids,
)

pytestmark = NEEDS_SGLANG


def test_distribution_of_three_tokens(pair, plain_greedy):
    own = pair_arguments(pair, "eagle1", 3, 3)
    own |= {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 10}
    params = {"temperature": 1.0, "max_new_tokens": 5, "ignore_eos": True}
    with sglang_engine({"EAGLE_SAMPLES": "1"}, **own) as engine:
        assert token_ids(engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)) == plain_greedy
        texts = token_ids(engine.generate(input_ids=[PROMPT] * 960, sampling_params=params))
    outcome = three_tokens(pair, texts)
    assert outcome.p_value > 1e-5, outcome
    assert len({tuple(text) for text in texts}) > 500
