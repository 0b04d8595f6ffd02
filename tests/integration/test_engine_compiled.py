"""An engine whose verifiers are compiled commits what another does, token for token."""

import pytest
from support.tiny_engine import TinyEngine, tiny_engine
from torch._dynamo.config import patch

from eaglegbv.config import Plan
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling
from eaglegbv.verifiers.registry import checked_verifier

PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 7, 1], [8, 2, 8, 1, 8, 2, 8, 4, 5]]
PLANS = {
    "several paths": Plan(paths=2, depth=3),
    "one token": Plan(paths=1, depth=1),
    "early ends": Plan(paths=4, depth=5, min_confidence=0.05),
    "distributions of one token": Plan(paths=2, depth=3, draft_width=1),
    "narrow": Plan(paths=3, depth=2, draft_width=4),
    "block": Plan(verifier="block", paths=1, depth=2),
    "token": Plan(verifier="token", paths=1, depth=4),
    "another distribution": Plan(paths=2, depth=2, draft_sampling=DraftSampling.GREEDY),
}

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations


@pytest.fixture(scope="module")
def compiled() -> TinyEngine:
    return tiny_engine(compile_backend="eager", check_slots=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", PLANS)
def test_compiled_verifiers_commit_what_plain_ones_do(
    name: str, temperature: float, compiled: TinyEngine
) -> None:
    plan = PLANS[name]
    params = SamplingParams(max_tokens=14, seed=3, ignore_eos=True, temperature=temperature)
    expected = tiny_engine().tokens(PROMPTS, params, plan)
    compiled.engine.check_plan(plan)  # what is compiled is compiled now
    with patch(error_on_recompile=True):
        assert compiled.tokens(PROMPTS, params, plan) == expected
        alone = [compiled.tokens([prompt], params, plan)[0] for prompt in PROMPTS]
    assert alone == expected


def test_trees_are_verified_by_the_graphs(
    compiled: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=9, seed=3, ignore_eos=True)
    plan = PLANS["several paths"]
    compiled.engine.check_plan(plan)
    target = compiled.target
    checked = checked_verifier("otbv", "eager", target.vocab_size, target.device)
    graph, sizes = checked._compiled, []

    def counted(*args: object) -> object:
        sizes.append(args[0].batch)
        return graph(*args)

    monkeypatch.setattr(checked, "_compiled", counted)
    compiled.tokens(PROMPTS[:1], params, plan)
    assert set(sizes) == {1}
    compiled.tokens(PROMPTS, params, plan)
    assert 3 in sizes
