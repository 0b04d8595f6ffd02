"""Rotary embeddings against those of transformers."""

import pytest
import torch
from support.small_heads import config_of, make_head
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eaglegbv.drafters.eagle_model import Arch

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default", "rope_theta": 1e4}, LLAMA3_ROPE, YARN_ROPE]
)
def test_rotation_equals_transformers(rope: dict[str, object]) -> None:
    config = config_of(Arch.EAGLE1, rope_parameters=rope)
    positions = torch.tensor([[0, 1, 5, 300]])
    q, k = torch.randn(1, 4, 4, 6), torch.randn(1, 4, 2, 6)

    rotation = make_head(config).rotary(positions, torch.float32)

    llama = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=24, num_attention_heads=4, head_dim=6, rope_parameters=rope)
    )
    expected = apply_rotary_pos_emb(q, k, *llama(q, positions), unsqueeze_dim=2)
    torch.testing.assert_close((rotation(q), rotation(k)), expected)


def test_half_precision_keeps_exact_frequencies() -> None:
    head = make_head(config_of(Arch.EAGLE3))
    exact = head.rotary.frequencies.clone()

    head.to(torch.bfloat16)

    assert torch.equal(head.rotary.frequencies, exact)
    assert head.fc.weight.dtype == torch.bfloat16
