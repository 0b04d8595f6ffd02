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


def rounds_by_plan() -> Counter[str]:
    """Return Prometheus' rounds of all of an engine's processes, which has metrics."""
    from prometheus_client import CollectorRegistry, multiprocess  # SGLang sets its folder first

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    rounds: Counter[str] = Counter()
    for metric in registry.collect():
        if metric.name == "eaglegbv:rounds":
            for sample in metric.samples:
                rounds[sample.labels["plan"]] += int(sample.value)
    return rounds


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
