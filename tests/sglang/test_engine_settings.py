"""SGLang's engine with settings of its own: several ranks, pages of several tokens."""

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
    "settings",
    [{"tp_size": 2}, {"page_size": 4}, {"page_size": 16}],
    ids=["two ranks", "pages of 4", "pages of 16"],
)
def test_texts_are_the_targets(settings, pair, plain_greedy):
    arguments = pair_arguments(pair, "eagle1", 3, 3) | settings
    with start({"EAGLEGBV_VERIFIER": "otbv"}, **arguments) as engine:
        assert token_ids(engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)) == plain_greedy
        seeded = [SAMPLED | {"sampling_seed": 7}, *[SAMPLED] * 7]
        one, two = (
            token_ids(engine.generate(input_ids=[PROMPT] * n, sampling_params=seeded[:n]))
            for n in (1, 8)
        )
        assert one[0] == two[0]
        short = SAMPLED | {"max_new_tokens": 5}
        texts = token_ids(engine.generate(input_ids=[PROMPT] * 480, sampling_params=short))
    outcome = three_tokens(pair, texts)
    assert outcome.p_value > 1e-5, outcome
    assert len({tuple(text) for text in texts}) > 250
