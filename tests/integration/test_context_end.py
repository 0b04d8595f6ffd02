"""Near the end of the context, or of the pool, drafts get shorter; all is served and lossless."""

import pytest
from support.g_test import g_test
from support.tiny_engine import TinyEngine, cells_of, tiny_engine

from eaglegbv.config import AUTO, EAGLE1_SHAPE, PLAIN, Plan, Planning
from eaglegbv.cuda_graphs import GraphMode
from eaglegbv.errors import InvalidArgument
from eaglegbv.sampling import SamplingParams

CONTEXT = 40
GREEDY = SamplingParams(temperature=0, max_tokens=None)
PROMPTS = [[1 + i % 3 for i in range(CONTEXT - left)] for left in (1, 2, 3, 6, 18)]
STATEFUL = [
    Plan(verifier="greedy_block", paths=1, depth=3),
    Plan(verifier="spectr_gbv", paths=2, depth=3),
]
PLANS: list[Planning] = [
    Plan(),
    Plan(paths=8, depth=16),
    Plan(draft_sampling="fixed", verifier="target_only", beam=3, nodes=12),
    Plan(draft_sampling="fixed", verifier="target_only", depth=5, shape=EAGLE1_SHAPE),
    Plan(source="lookup", draft_sampling="fixed", verifier="target_only", paths=1, depth=8),
    *STATEFUL,
    AUTO,
]


def limited(context: int, **settings: object) -> TinyEngine:
    made = tiny_engine(prefix_cache=False, **settings)  # type: ignore[arg-type]
    made.target.max_context = context
    return made


@pytest.fixture(scope="module", params=[GraphMode.OFF, GraphMode.EAGER])
def tiny(request: pytest.FixtureRequest) -> TinyEngine:
    return limited(CONTEXT, graphs=request.param)


@pytest.fixture(scope="module")
def expected(tiny: TinyEngine) -> list[list[int]]:
    texts = tiny.tokens(PROMPTS, GREEDY, PLAIN)
    assert [len(text) for text in texts] == [1, 2, 3, 6, 18]
    return texts


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_texts_end_with_the_context(tiny, expected, plan):
    assert tiny.tokens(PROMPTS, GREEDY, plan) == expected
    sampled = tiny.tokens(PROMPTS, SamplingParams(max_tokens=None, seed=1), plan)
    assert [len(text) for text in sampled] == [1, 2, 3, 6, 18]
    with pytest.raises(InvalidArgument, match=r"at most 39 tokens, by the model's context"):
        tiny.engine.add([1] * CONTEXT, GREEDY, plan)


@pytest.mark.parametrize("plan", [p for p in PLANS if p not in STATEFUL], ids=str)
def test_texts_fill_a_pool_that_holds_no_more_than_them(plan):
    tiny = limited(CONTEXT, slots=CONTEXT + 1)
    expected = tiny.tokens(PROMPTS, GREEDY, PLAIN)
    assert [len(text) for text in expected] == [1, 2, 3, 6, 18]
    assert tiny.tokens(PROMPTS, GREEDY, plan) == expected


@pytest.mark.thorough
def test_the_distribution_is_the_targets_to_the_last_token():
    vocab, context, prompt = 4, 5, [2]
    tiny = limited(context, vocab=vocab, slots=1 << 16, max_batch=1024)
    wor = Plan(paths=2, depth=2, draft_sampling="wor", verifier="traversal")
    plans = [*STATEFUL, Plan(paths=3), wor]
    requests = tiny.sample(prompt, SamplingParams(max_tokens=None), plans, 4_000)
    cells, dist = cells_of(requests, vocab), tiny.joint_probs(prompt, context - len(prompt))
    for observed in (cells, *(cells[n::4] for n in range(4))):
        result = g_test(observed, dist)
        assert result.p_value > 1e-4, result
