"""On a CPU no text depends on its company, or at temperature 0 on its plan, to the last bit."""

import pytest
import torch
from support.tiny_engine import TinyEngine, tiny_engine

from eaglegbv.config import PLAIN, Plan, Planning
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.sampling import SamplingParams

VOCAB = 48
PROMPTS = [[(7 * n + 3 * i) % VOCAB for i in range(2 + 5 * n)] for n in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PLANS: dict[str, Planning] = {
    "1x2": Plan(paths=1, depth=2),
    "3x4": Plan(paths=3, depth=4),
    "widths": Plan(widths=(3, 2, 1)),
    "a beam": Plan(paths=2, depth=5),
}


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def tiny(request: pytest.FixtureRequest) -> TinyEngine:
    engine = tiny_engine(vocab=VOCAB, dtype=request.param, sharpness=0.5, prefix_cache=False)
    assert engine.target.runs_by == "native"
    return engine


@pytest.fixture(scope="module")
def plain_texts(tiny: TinyEngine) -> list[list[int]]:
    """Greedy texts by plain decoding, each alone."""
    return [text for prompt in PROMPTS for text in tiny.tokens([prompt], GREEDY, PLAIN)]


def test_plain_decoding_is_the_same_in_company(tiny, plain_texts):
    assert tiny.tokens(PROMPTS, GREEDY, PLAIN) == plain_texts


@pytest.mark.parametrize("name", PLANS)
def test_greedy_texts_of_any_plan_are_those_of_plain_decoding(tiny, plain_texts, name):
    assert tiny.tokens(PROMPTS, GREEDY, PLANS[name]) == plain_texts
    assert tiny.tokens(PROMPTS[2:3], GREEDY, PLANS[name]) == plain_texts[2:3]


def test_plans_may_be_mixed(tiny, plain_texts):
    plans = [PLAIN, *PLANS.values()]
    asked = [(prompt, GREEDY, plan) for prompt, plan in zip(PROMPTS, plans, strict=True)]
    assert tiny.texts(asked) == plain_texts


@pytest.mark.parametrize("name", PLANS)
def test_a_seed_gives_one_text_alone_and_among_others(tiny, name):
    plan, tokens = PLANS[name], 20
    params = [SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True) for seed in range(24)]
    prompts = [PROMPTS[seed % len(PROMPTS)] for seed in range(24)]
    asked = [(prompt, own, plan) for prompt, own in zip(prompts, params, strict=True)]
    among = tiny.texts(asked)
    for number in (0, 4, 13, 23):
        assert tiny.texts(asked[number : number + 1]) == among[number : number + 1]


def test_an_eagle1_heads_texts_too():
    sizes = {"vocab": VOCAB, "arch": Arch.EAGLE1, "dtype": torch.bfloat16}
    tiny = tiny_engine(**sizes, sharpness=0.5, prefix_cache=False)
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    others = [SamplingParams(max_tokens=20, seed=seed, ignore_eos=True) for seed in range(6)]
    plan = Plan(paths=3, depth=3)
    among = tiny.texts([(PROMPTS[0], own, plan) for own in (params, *others)])
    assert tiny.tokens(PROMPTS[:1], params, plan) == among[:1]
    assert tiny.tokens(PROMPTS, GREEDY, plan) == tiny.tokens(PROMPTS, GREEDY, PLAIN)
