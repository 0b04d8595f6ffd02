"""Engines over models of random weights, which are what they are said to be."""

from math import sqrt

import pytest
import torch

from eaglegbv.config import PLAIN, Plan
from eaglegbv.drafters.eagle_model import Arch, EagleHeadConfig, RotaryEmbedding
from eaglegbv.errors import ModelNotSupported
from eaglegbv.eval.random_models import Shape, StepSetting, build_rig, random_head

CPU = torch.device("cpu")
SMALL = Shape(hidden=32, layers=4, heads=2, kv_heads=1, intermediate=48, vocab=64, draft_vocab=24)
HEAD = EagleHeadConfig(
    arch=Arch.EAGLE3,
    hidden_size=32,
    target_hidden_size=32,
    intermediate_size=48,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    vocab_size=64,
    draft_vocab_size=24,
    feature_layers=(1, 2, 3),
)


def test_a_deep_random_target_in_bfloat16_passes_for_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each layer magnifies rounding as one of width 4096 would.
    deep = Shape(
        hidden=256, layers=32, heads=2, kv_heads=1, intermediate=512, vocab=8000, draft_vocab=50
    )
    setting = StepSetting(plan=Plan(paths=2, depth=3), context=8, steps=1)
    assert build_rig(deep, setting, dtype=torch.bfloat16, device=CPU).target.vocab_size == 8000
    monkeypatch.setattr(
        "eaglegbv.eval.random_models._GAIN", 0.02 * sqrt(4096)
    )  # as transformers has it
    with pytest.raises(ModelNotSupported, match="of the plain model within"):
        build_rig(deep, setting, dtype=torch.bfloat16, device=CPU)


def test_all_of_a_random_head_is_on_the_device() -> None:
    embedding = torch.zeros(64, 32, device="meta", dtype=torch.bfloat16)
    head = random_head(HEAD, embedding)
    state = [*head.parameters(), *head.buffers()]
    assert {part.device.type for part in state} == {"meta"}
    assert {part.dtype for part in head.parameters()} == {torch.bfloat16}


def test_a_random_head_shares_the_embedding_and_rotates_exactly() -> None:
    embedding = torch.zeros(64, 32, dtype=torch.bfloat16)
    head = random_head(HEAD, embedding)
    assert head.embedding.data_ptr() == embedding.data_ptr()
    assert {part.dtype for part in head.parameters()} == {torch.bfloat16}
    assert head.rotary.frequencies.equal(RotaryEmbedding(HEAD).frequencies)
    assert head.rotary.frequencies.dtype is torch.float32


def test_weights_are_the_same_again_and_the_callers_random_numbers_go_on() -> None:
    setting = StepSetting(plan=PLAIN, context=8, steps=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        first, second = (
            build_rig(SMALL, setting, dtype=torch.float32, device=CPU) for _ in range(2)
        )
        assert torch.get_rng_state().equal(before)
    assert first.target.output_embeddings.equal(second.target.output_embeddings)
    heads = [rig.drafter.head.state_dict()["lm_head.weight"] for rig in (first, second)]
    assert heads[0].device == CPU
    assert heads[0].equal(heads[1])
