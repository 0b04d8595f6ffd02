"""SGLang's engine that changes plans by load: texts follow the target whatever rounds run."""

import json
import random

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

COSTS = {
    "batches": [8, 24, 64],
    "seconds": {"otbv 2x2": [1, 4, 9], "block 1x2": [3, 1, 3], "none": [9, 9, 0.2]},
}
"""Few requests draft trees, more of them single paths, and many decode plainly."""


@pytest.mark.parametrize("retract", [False, True])
def test_texts_are_the_targets_under_plans_that_change(retract, pair, plain_greedy, tmp_path):
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(COSTS))
    settings = {"EAGLEGBV_PLANS": "2x2,1x2,none", "EAGLEGBV_COSTS": str(costs)}
    if retract:
        settings |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "4"}
    arguments = pair_arguments(pair, "eagle1", 2, 2) | {"disable_cuda_graph": True}
    with start(settings, **arguments) as engine:
        answers = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        assert token_ids(answers) == plain_greedy
        seeded = SAMPLED | {"sampling_seed": 7}
        [alone] = token_ids(engine.generate(input_ids=[PROMPT], sampling_params=[seeded]))
        crowd = [seeded, *[SAMPLED] * 39]
        together = token_ids(engine.generate(input_ids=[PROMPT] * 40, sampling_params=crowd))
        assert retract or together[0] == alone
        lengths, texts = random.Random(1), []
        while len(texts) < 600:
            params = [
                SAMPLED | {"max_new_tokens": lengths.choice((4, 5, 9, 14))} for _ in range(60)
            ]
            params += [GREEDY | {"max_new_tokens": 6}] * 4
            answers = engine.generate(input_ids=[PROMPT] * 64, sampling_params=params)
            assert {tuple(ids) for ids in token_ids(answers[60:])} == {tuple(plain_greedy[0][:6])}
            texts += token_ids(answers[:60])
    outcome = three_tokens(pair, texts)
    assert outcome.p_value > 1e-5, outcome
