"""Heads as they are published, loaded and put to work: lossless, whatever the format."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.published_heads import PUBLISHED, VOCAB, make_target

from eaglegbv.config import EngineConfig, Plan
from eaglegbv.drafters.eagle import EagleDrafter
from eaglegbv.engine import Engine
from eaglegbv.loading import load_pair
from eaglegbv.sampling import SamplingParams

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
TOKENS = 10
SLOTS = 512


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Saves a random target of a family once and returns its folder."""
    root = tmp_path_factory.mktemp("targets")

    def save(family: str) -> Path:
        if not (root / family).exists():
            make_target(family).save_pretrained(root / family)
        return root / family

    return save


@torch.inference_mode()
def greedy_text(family: str, prompt: list[int]) -> list[int]:
    """What the plain model says, one token after another."""
    model, tokens = make_target(family), list(prompt)
    for _ in range(TOKENS):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_head_drafts_and_the_text_is_the_targets(
    name: str, target: Callable[[str], Path], tmp_path: Path
) -> None:
    head = PUBLISHED[name]()
    folder = target(head.target)
    pair = load_pair(folder, head.write(tmp_path), slots=SLOTS, dtype=torch.float32, device="cpu")
    assert isinstance(pair.drafter, EagleDrafter)
    assert pair.target.features.layers == head.reads
    engine = Engine(pair.target, pair.drafter, EngineConfig(kv_slots=SLOTS))
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    sampled = SamplingParams(temperature=1.0, max_tokens=TOKENS, seed=4)
    plan = Plan(verifier="otbv", paths=2, depth=3)

    requests = [engine.add(p, params, plan) for params in (greedy, sampled) for p in PROMPTS]
    while engine.has_work:
        engine.step()

    found = [request.token_ids for request in requests]
    expected = [greedy_text(head.target, prompt) for prompt in PROMPTS]
    assert found[: len(PROMPTS)] == expected
    assert len({token for text in expected for token in text}) > 2
    assert [len(text) for text in found] == [TOKENS] * len(found)
    assert all(0 <= token < VOCAB for text in found for token in text)
    assert all(request.metrics.drafted_nodes > 0 for request in requests)
