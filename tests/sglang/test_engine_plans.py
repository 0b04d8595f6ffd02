"""SGLang's engine that changes plans by load: texts follow the target whatever rounds run."""

import json
import random
from collections import Counter

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
from support.sglang_plans import arriving, changing_plans, rounds_by_plan

pytestmark = NEEDS_SGLANG


@pytest.mark.parametrize("way", ["alone", "retracting", "overlapping"])
def test_texts_are_the_targets_under_plans_that_change(way, pair, plain_greedy, tmp_path):
    retract, loops = way == "retracting", tmp_path / "loops"
    settings = changing_plans("otbv", 2, 2, tmp_path / "costs.json")
    if retract:
        settings |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "4"}
    if way == "overlapping":
        settings |= {"OVERLAP_ON_CPU": str(loops)}
    arguments = pair_arguments(pair, "eagle1", 2, 2) | {"disable_cuda_graph": True}
    with start(settings, enable_metrics=True, **arguments) as engine:
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
            answers = arriving(engine, PROMPT, params, seed=len(texts))
            assert {tuple(ids) for ids in token_ids(answers[60:])} == {tuple(plain_greedy[0][:6])}
            texts += token_ids(answers[:60])
        rounds = rounds_by_plan()
    outcome = three_tokens(pair, texts)
    assert outcome.p_value > 1e-5, outcome
    assert min(rounds.values()) > 0.1 * rounds.total(), rounds
    assert len(rounds) == 3
    assert loops.exists() == (way == "overlapping")


NAMES = ("otbv 6x6", "otbv 3x4", "block 1x4", "none")
LOADS = (1, 8, 24, 48)
LIKE_AN_H100 = {
    "batches": LOADS,
    "seconds": {
        "otbv 6x6": [0.0058, 0.0110, 0.0300, 0.0620],
        "otbv 3x4": [0.0056, 0.0058, 0.0105, 0.0210],
        "block 1x4": [0.0055, 0.0056, 0.0058, 0.0110],
        "none": [0.0048, 0.0049, 0.0051, 0.0053],
    },
}
"""Of a model of 8B and long contexts: a plan costs more where its rows exceed what is free."""


def test_rounds_follow_the_table_of_a_card(pair, tmp_path):
    """Large trees for one request, small ones for 8, single paths for 24, plain for 48."""
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(LIKE_AN_H100))
    settings = {"EAGLEGBV_PLANS": "6x6,3x4,1x4,none", "EAGLEGBV_COSTS": str(costs)}
    arguments = pair_arguments(pair, "eagle1", 6, 6) | {"disable_cuda_graph": True}
    with start(settings, enable_metrics=True, **arguments) as engine:
        before: Counter[str] = Counter()
        for load, name in zip(LOADS, NAMES, strict=True):
            params = SAMPLED | {"max_new_tokens": 48}
            engine.generate(input_ids=[PROMPT] * load, sampling_params=[params] * load)
            after = rounds_by_plan()
            followed = after - before
            before = after
            assert followed.most_common(1)[0][0] == name, (load, followed)
            assert followed[name] >= 0.6 * followed.total(), (load, followed)
