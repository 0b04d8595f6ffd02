"""Heads against a plain computation, position by position, from the papers' formulas."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eaglegbv.drafters.eagle_head import (
    Arch,
    Eagle1Head,
    Eagle3Head,
    EagleHead,
    EagleHeadConfig,
    default_feature_layers,
)
from eaglegbv.errors import DrafterMismatch

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config_of(arch: Arch, **changes: object) -> EagleHeadConfig:
    eagle3 = arch is Arch.EAGLE3
    config = EagleHeadConfig(
        arch=arch,
        hidden_size=24,
        target_hidden_size=24,
        intermediate_size=40,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        vocab_size=30,
        draft_vocab_size=12 if eagle3 else 30,
        feature_layers=(2, 4, 5) if eagle3 else (),
        rms_norm_eps=1e-5,
    )
    return replace(config, **changes)


def make_head(config: EagleHeadConfig, seed: int = 0) -> EagleHead:
    torch.manual_seed(seed)
    embedding = torch.randn(config.vocab_size, config.hidden_size)
    head: EagleHead
    if config.arch is Arch.EAGLE1:
        head = Eagle1Head(config, embedding, torch.randn_like(embedding))
    else:
        ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
        head = Eagle3Head(config, embedding, ids)
    for parameter in head.parameters():  # norms start at one, which would hide a missing one
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return head.double().requires_grad_(False)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over ``[tokens, heads, head_dim]``, one query and head at a time."""
    out = torch.zeros_like(q)
    shared = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        for h in range(q.shape[1]):
            keys, values = k[: i + 1, h // shared], v[: i + 1, h // shared]
            weights = torch.softmax(keys @ q[i, h] / math.sqrt(q.shape[2]), dim=0)
            out[i, h] = weights @ values
    return out


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean() + 1e-5)


def rotate(x: Tensor, position: int) -> Tensor:
    """Rotate ``[heads, head_dim]``: entries j and j + head_dim / 2 are a complex number."""
    half = x.shape[-1] // 2
    angles = position * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        angles.new_ones(half), angles
    )
    return torch.cat((turned.real, turned.imag), dim=-1)


def plain_forward(head: EagleHead, token_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states and logits of a text, written out for one position after another."""
    w = dict(head.state_dict())
    attention = {n: w[f"layer.self_attn.{n}_proj.weight"] for n in "qkvo"}
    inputs, residuals, hidden = [], [], []
    for token, feature in zip(token_ids.tolist(), features, strict=True):
        embedded = head.embedding[token]
        if head.config.arch is Arch.EAGLE1:
            x = w["fc.weight"] @ torch.cat((embedded, feature))
            inputs.append(x)
            residuals.append(x)
        else:
            fused = w["fc.weight"] @ feature
            inputs.append(
                torch.cat(
                    (
                        norm(embedded, w["layer.input_layernorm.weight"]),
                        norm(fused, w["layer.hidden_norm.weight"]),
                    )
                )
            )
            residuals.append(fused)
    q, k, v = (
        torch.stack([(attention[n] @ x).view(-1, head.config.head_dim) for x in inputs])
        for n in "qkv"
    )
    q, k = (torch.stack([rotate(row, i) for i, row in enumerate(x)]) for x in (q, k))
    for x, attended in zip(residuals, causal(q, k, v), strict=True):
        x = x + attention["o"] @ attended.flatten()
        normed = norm(x, w["layer.post_attention_layernorm.weight"])
        gate = w["layer.mlp.gate_proj.weight"] @ normed
        up = w["layer.mlp.up_proj.weight"] @ normed
        hidden.append(x + w["layer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))
    if head.config.arch is Arch.EAGLE1:
        logits = [head.target_lm_head @ x for x in hidden]
    else:
        logits = [w["lm_head.weight"] @ norm(x, w["norm.weight"]) for x in hidden]
    return torch.stack(hidden), torch.stack(logits)


@pytest.mark.parametrize("arch", list(Arch))
def test_forward_equals_the_formulas(arch: Arch) -> None:
    head = make_head(config_of(arch))
    token_ids = torch.randint(30, (7,))
    features = torch.randn(7, head.config.feature_size, dtype=torch.float64)

    hidden = head(token_ids, head.fuse(features), torch.arange(7), causal)

    expected_hidden, expected_logits = plain_forward(head, token_ids, features)
    torch.testing.assert_close(hidden, expected_hidden, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.logits(hidden), expected_logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arch", list(Arch))
def test_biases_take_part(arch: Arch) -> None:
    token_ids, positions = torch.arange(3), torch.arange(3)
    config = config_of(arch, fc_bias=True, qkv_bias=True)
    head = make_head(config)
    names = [n for n in head.state_dict() if n.endswith(".bias")]
    assert names == ["fc.bias", *(f"layer.self_attn.{n}_proj.bias" for n in "qkv")]
    features = torch.randn(3, config.feature_size, dtype=torch.float64)
    before = head(token_ids, head.fuse(features), positions, causal)
    for name in names:
        head.get_parameter(name).zero_()
        after = head(token_ids, head.fuse(features), positions, causal)
        assert not torch.allclose(before, after)
        before = after


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e4}, LLAMA3_ROPE])
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


def test_weights_exclude_what_belongs_to_the_target() -> None:
    names = set(make_head(config_of(Arch.EAGLE1)).state_dict())
    assert not names & {"embedding", "target_lm_head", "draft_to_target", "rotary.frequencies"}


def test_default_feature_layers_of_a_32_layer_target() -> None:
    assert default_feature_layers(32) == (2, 16, 29)


@pytest.mark.parametrize(
    ("arch", "changes", "named"),
    [
        (Arch.EAGLE1, {"target_hidden_size": 16}, "hidden_size"),
        (Arch.EAGLE1, {"draft_vocab_size": 10}, "draft_vocab_size"),
        (Arch.EAGLE1, {"feature_layers": (1, 2, 3)}, "feature_layers"),
        (Arch.EAGLE3, {"draft_vocab_size": 31}, "draft_vocab_size"),
        (Arch.EAGLE3, {"num_kv_heads": 3}, "num_kv_heads"),
        (Arch.EAGLE3, {"rope_parameters": {"rope_type": "longrope"}}, "rope_type"),
    ],
)
def test_impossible_sizes_are_refused(arch: Arch, changes: dict[str, object], named: str) -> None:
    with pytest.raises(DrafterMismatch, match=f"^{named}="):
        config_of(arch, **changes)
