"""LoRA on the target with a head that has none: every request follows its own adapter's target."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.sglang_engine import (
    NEEDS_SGLANG,
    PROMPT,
    pair_arguments,
    three_tokens,
    token_ids,
)
from support.sglang_engine import sglang_engine as start
from support.sglang_pair import SGLangPair
from transformers import LlamaForCausalLM

pytestmark = NEEDS_SGLANG

RANK, ALPHA = 4, 8
ADAPTED = ("q_proj", "v_proj")
EACH = 480  # texts with the adapter, and as many without


def save_adapter(pair: SGLangPair, folder: Path) -> SGLangPair:
    """Write an adapter into ``folder / "adapter"``; return the pair with it in the target."""
    model = LlamaForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for number, layer in enumerate(model.model.layers):
        for name in ADAPTED:
            weight = getattr(layer.self_attn, name).weight
            down = torch.randn(RANK, weight.shape[1], generator=generator) * 0.2
            up = torch.randn(weight.shape[0], RANK, generator=generator) * 0.2
            prefix = f"base_model.model.model.layers.{number}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = down
            tensors[f"{prefix}.lora_B.weight"] = up
            weight.data += ALPHA / RANK * up @ down
    adapter = folder / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": [*ADAPTED]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, adapter / "adapter_model.safetensors")
    model.save_pretrained(folder / "merged")
    return replace(pair, target=folder / "merged")


@pytest.mark.parametrize(
    ("verifier", "head", "K", "L"), [("otbv", "eagle1", 3, 3), ("spectr_gbv", "eagle3", 2, 3)]
)
def test_adapted_and_other_requests_share_a_batch(verifier, head, K, L, pair, tmp_path):
    merged = save_adapter(pair, tmp_path)
    own = pair_arguments(pair, head, K, L)
    own |= {"lora_paths": [f"mine={tmp_path / 'adapter'}"], "lora_backend": "torch_native"}
    params = {"temperature": 1.0, "max_new_tokens": 5, "ignore_eos": True}
    adapted: list[list[int]] = []
    others: list[list[int]] = []
    with start({"EAGLEGBV_VERIFIER": verifier}, **own) as engine:
        while len(others) < EACH:
            names = ["mine", None] * 120
            answers = engine.generate(
                input_ids=[PROMPT] * len(names), sampling_params=params, lora_path=names
            )
            texts = token_ids(answers)
            adapted += texts[::2]
            others += texts[1::2]
        efficiency = [answer["meta_info"]["block_efficiency"] for answer in answers]
    assert three_tokens(merged, adapted).p_value > 1e-5
    assert three_tokens(pair, others).p_value > 1e-5
    assert three_tokens(pair, adapted).p_value < 1e-9  # the adapter is applied
    assert sum(efficiency) / len(efficiency) > 1.1
