"""Heads against a plain computation, position by position, from the papers' formulas."""

from dataclasses import replace

import pytest
import torch
from support.drafting import causal
from support.published_heads import LLAMA3_ROPE
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eaglegbv.drafters import eagle_model
from eaglegbv.drafters.eagle_model import Arch, Eagle1Head, EagleHead, EagleHeadConfig
from eaglegbv.drafters.training.heads import head_config_of
from eaglegbv.errors import DrafterMismatch
from eaglegbv.output_layer import OutputLayer


def config_of(arch: Arch, **changes: object) -> EagleHeadConfig:
    eagle3 = arch is Arch.EAGLE3
    target = LlamaConfig(
        vocab_size=30, hidden_size=24, intermediate_size=40, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5,
    )  # fmt: skip
    config = head_config_of(target, arch, draft_vocab=12 if eagle3 else 30)
    return replace(config, **({"feature_layers": (2, 4, 5)} if eagle3 else {}) | changes)


def make_head(config: EagleHeadConfig) -> EagleHead:
    """Return a head with random weights, norms too, in float64."""
    torch.manual_seed(0)
    embedding = torch.randn(config.vocab_size, config.hidden_size)
    head: EagleHead
    if config.arch is Arch.EAGLE1:
        head = Eagle1Head(config, embedding, OutputLayer(torch.randn_like(embedding)))
    else:
        ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
        head = eagle_model.Eagle3Head(config, embedding, ids)
    for parameter in head.parameters():  # norms start at one, which would hide a missing one
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return head.double().requires_grad_(False)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, x.shape[-1:], weight, 1e-5)


def rotate(x: Tensor, position: int, scale: float = 1.0) -> Tensor:
    """Rotate ``[heads, head_dim]``: entries j and j + head_dim / 2 are a complex number."""
    half = x.shape[-1] // 2
    angles = position / scale * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        angles.new_ones(half), angles
    )
    return torch.cat((turned.real, turned.imag), dim=-1)


def plain_fuse(head: EagleHead, feature: Tensor) -> Tensor:
    """Return the first hidden state of one position."""
    if head.config.arch is Arch.EAGLE1:
        return feature
    w = dict(head.state_dict())
    if head.config.norm_before_fc:
        feature = norm(feature, w["input_norm.weight"])
    if head.config.fc_norm:
        parts = feature.split(head.config.target_hidden_size)
        feature = torch.cat([norm(p, w[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)])
    return linear(w, "fc", feature)


def linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return w[f"{name}.weight"] @ x + w.get(f"{name}.bias", 0.0)


def plain_forward(head: EagleHead, token_ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states and logits of a text, written out for one position after another."""
    w, config = dict(head.state_dict()), head.config
    scale = config.rope_parameters.get("factor", 1.0)
    inputs, residuals, hidden = [], [], []
    for token, state in zip(token_ids.tolist(), states, strict=True):
        embedded = head.embedding[token]
        if config.arch is Arch.EAGLE1:
            x = linear(w, "fc", torch.cat((embedded, state)))
            inputs.append(x)
            residuals.append(x)
        else:
            normed = norm(state, w["layer.hidden_norm.weight"])
            both = (norm(embedded, w["layer.input_layernorm.weight"]), normed)
            inputs.append(torch.cat(both))
            residuals.append(normed if config.norm_before_residual else state)
    q, k, v = (
        [linear(w, f"layer.self_attn.{n}_proj", x).view(-1, config.head_dim) for x in inputs]
        for n in "qkv"
    )
    if config.qk_norm:
        q, k = (
            [torch.stack([norm(h, w[f"layer.self_attn.{n}_norm.weight"]) for h in x]) for x in xs]
            for n, xs in (("q", q), ("k", k))
        )
    q, k = ([rotate(row, i, scale) for i, row in enumerate(x)] for x in (q, k))
    attended = causal(torch.stack(q), torch.stack(k), torch.stack(v))
    for x, heads in zip(residuals, attended, strict=True):
        x = x + linear(w, "layer.self_attn.o_proj", heads.flatten())
        normed = norm(x, w["layer.post_attention_layernorm.weight"])
        gate = w["layer.mlp.gate_proj.weight"] @ normed
        up = w["layer.mlp.up_proj.weight"] @ normed
        hidden.append(x + w["layer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))
    if config.arch is Arch.EAGLE1:
        return torch.stack(hidden), torch.stack([head.target_output.weight @ x for x in hidden])
    normed_hidden = [norm(x, w["norm.weight"]) for x in hidden]
    logits = [w["lm_head.weight"] @ x for x in normed_hidden]
    fed_back = normed_hidden if config.norm_output else hidden
    return torch.stack(fed_back), torch.stack(logits)


FAMILIES = {
    "llama": {},
    "llama, one key head": {"num_kv_heads": 1},
    "llama, linear rope": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    },
    "qwen2": {"qkv_bias": True, "num_kv_heads": 4},
    "qwen3": {"qk_norm": True, "head_dim": 10},
    "mistral": {"head_dim": 8, "num_heads": 6, "num_kv_heads": 3},
    "all biases": {"fc_bias": True, "qkv_bias": True, "o_bias": True},
}
NORMS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
VARIANTS = {
    **{name: {name: True} for name in NORMS},
    "all norms": dict.fromkeys((*NORMS, "qk_norm"), True),
    "narrow": {"target_hidden_size": 32, "fc_norm": True},
    "four layers": {"feature_layers": (1, 2, 4, 5), "fc_norm": True},
}


CASES = [(arch, name) for arch in Arch for name in FAMILIES]


@pytest.mark.parametrize(("arch", "name"), CASES + [(Arch.EAGLE3, name) for name in VARIANTS])
def test_forward_equals_the_formulas(arch: Arch, name: str) -> None:
    head = make_head(config_of(arch, **(FAMILIES | VARIANTS)[name]))
    token_ids = torch.randint(30, (7,))
    features = torch.randn(7, head.config.feature_size, dtype=torch.float64)
    close = {"rtol": 1e-4, "atol": 1e-4}  # rotary angles are float32

    fused = head.fuse(features)
    hidden = head(token_ids, fused, torch.arange(7), causal)
    drafted = head(token_ids.flip(0), hidden, torch.arange(7), causal)

    expected = torch.stack([plain_fuse(head, feature) for feature in features])
    torch.testing.assert_close(fused, expected, **close)
    for result, token_row in ((hidden, token_ids), (drafted, token_ids.flip(0))):
        expected, logits = plain_forward(head, token_row, expected)
        torch.testing.assert_close(result, expected, **close)
        torch.testing.assert_close(head.logits(result), logits, **close)


@pytest.mark.parametrize(
    ("arch", "changes", "named"),
    [
        (Arch.EAGLE1, {"target_hidden_size": 16}, "hidden_size"),
        (Arch.EAGLE1, {"draft_vocab_size": 10}, "draft_vocab_size"),
        (Arch.EAGLE1, {"feature_layers": (1, 2, 3)}, "feature_layers"),
        (Arch.EAGLE1, {"norm_output": True}, "norm_output"),
        (Arch.EAGLE1, {"fc_norm": True}, "fc_norm"),
        (Arch.EAGLE3, {"draft_vocab_size": 31}, "draft_vocab_size"),
        (Arch.EAGLE3, {"num_kv_heads": 3}, "num_kv_heads"),
        (Arch.EAGLE3, {"rope_parameters": {"rope_type": "longrope"}}, "rope_type"),
        (
            Arch.EAGLE3,
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
    ],
)
def test_impossible_sizes_are_refused(arch: Arch, changes: dict[str, object], named: str) -> None:
    with pytest.raises(DrafterMismatch, match=f"^{named}="):
        config_of(arch, **changes)


# --- rotary embeddings against those of transformers
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
YARN_ROPE["original_max_position_embeddings"] = 64
LLAMA3 = LLAMA3_ROPE | {"rope_theta": 500000.0}


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e4}, LLAMA3, YARN_ROPE])
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
