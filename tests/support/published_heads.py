"""Small random heads with the names, shapes, types and keys of published ones.

Written out by hand, one function for each kind of file that is found in the wild, and so
independent of what the package writes.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from support.tiny_models import for_model, spread

VOCAB = 40
HIDDEN = 32
WIDE = 48
LAYERS = 8
DRAFT_VOCAB = 24
INPUTS = [2, 4, 5]
"""Layers whose inputs EAGLE-3 reads of a target of eight layers."""
OUTPUTS = [1, 3, 4]
"""The same, counted as outputs of layers."""
TABLE = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(8))
"""A target's embedding and output layer."""

_TARGET_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TARGETS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": for_model("llama", **_TARGET_SIZES),
    "llama3": for_model(
        "llama", **_TARGET_SIZES, rope_parameters={**LLAMA3_ROPE, "rope_theta": 500000.0}
    ),
    "qwen2": for_model("qwen2", **_TARGET_SIZES),
    "qwen3": for_model("qwen3", **_TARGET_SIZES, head_dim=16),
    "mistral": for_model("mistral", **_TARGET_SIZES, head_dim=12, sliding_window=None),
}


def make_target(family: str) -> PreTrainedModel:
    """A random target whose greedy text is not one token over and over."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return spread(AutoModelForCausalLM.from_config(TARGETS[family]()), 0.2)


@dataclass
class Published:
    """A head's files before they are written.

    Attributes:
        config: Content of config.json.
        tensors: By stored name.
        pickled: Whether ``torch.save`` writes them.
        target: Whose head it is, of :data:`TARGETS`.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    pickled: bool = False
    target: str = "llama"

    def write(self, folder: Path) -> Path:
        """Write the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.pickled:
            torch.save(self.tensors, folder / "pytorch_model.bin")
        else:
            save_file(self.tensors, folder / "model.safetensors")
        return folder


def _tensors(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    return {
        name: (
            1 + 0.2 * torch.randn(shape, generator=generator)
            if "norm" in name
            else 0.2 * torch.randn(shape, generator=generator)
        ).to(dtype)
        for name, shape in shapes.items()
    }


def _flat(**changes: Any) -> dict[str, Any]:
    """The keys all flat configurations share; None removes one."""
    keys = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": WIDE,
        "max_position_embeddings": 128,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.46.2",
        "use_cache": True,
        "vocab_size": VOCAB,
    } | changes
    return {key: value for key, value in keys.items() if value is not None}


def layer(
    prefix: str, inputs: int, *, hidden: int, kv: int, dim: int, wide: int = WIDE
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a decoder layer of four heads, by name."""
    return {
        f"{prefix}self_attn.q_proj.weight": (4 * dim, inputs),
        f"{prefix}self_attn.k_proj.weight": (kv * dim, inputs),
        f"{prefix}self_attn.v_proj.weight": (kv * dim, inputs),
        f"{prefix}self_attn.o_proj.weight": (hidden, 4 * dim),
        f"{prefix}mlp.gate_proj.weight": (wide, hidden),
        f"{prefix}mlp.up_proj.weight": (wide, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, wide),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }


def _eagle1(*, fc_bias: bool = False, kv: int = 2) -> dict[str, Tensor]:
    shapes = {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        **({"fc.bias": (HIDDEN,)} if fc_bias else {}),
        **layer("layers.0.", HIDDEN, hidden=HIDDEN, kv=kv, dim=8),
    }
    return _tensors(shapes, torch.float16)


def _maps(draft_vocab: int) -> dict[str, Tensor]:
    chosen = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:draft_vocab]
    chosen = chosen.sort().values
    members = torch.zeros(VOCAB, dtype=torch.bool)
    members[chosen] = True
    return {"d2t": chosen - torch.arange(draft_vocab), "t2d": members}


def _eagle3(
    prefix: str = "midlayer.",
    *,
    dtype: torch.dtype = torch.bfloat16,
    hidden: int = HIDDEN,
    kv: int = 2,
    dim: int = 8,
    draft_vocab: int = DRAFT_VOCAB,
    more: dict[str, tuple[int, ...]] | None = None,
) -> dict[str, Tensor]:
    shapes = {
        "fc.weight": (hidden, 3 * HIDDEN),
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}hidden_norm.weight": (hidden,),
        **layer(prefix, 2 * hidden, hidden=hidden, kv=kv, dim=dim),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
        **(more or {}),
    }
    return _tensors(shapes, dtype) | (_maps(draft_vocab) if draft_vocab < VOCAB else {})


def _speculators(
    *, layer: dict[str, Any] | None = None, ids: list[int] | None = None, **head: Any
) -> dict[str, Any]:
    kept = ("architectures", "torch_dtype", "transformers_version")
    sizes = {key: value for key, value in _flat().items() if key not in kept}
    return {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculators",
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1",
        "draft_vocab_size": DRAFT_VOCAB,
        "embed_requires_grad": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": ids,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {
                "architectures": ["LlamaForCausalLM"],
                "name_or_path": "meta-llama/Llama-3.1-8B-Instruct",
            },
        },
        "transformer_layer_config": {
            **sizes,
            "attention_bias": False,
            "mlp_bias": False,
            "head_dim": 8,
            **(layer or {}),
        },
    } | head


_EMBEDDING = {"embed_tokens.weight": (VOCAB, HIDDEN)}
_SGLANG3 = {"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "bfloat16"}
_FC_NORM = {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}


def _flat3(tensors: dict[str, Tensor] | None = None, **changes: Any) -> Published:
    """An EAGLE-3 head in a flat format, of the reduced vocabulary unless another is given."""
    target, pickled = changes.pop("target", "llama"), changes.pop("pickled", False)
    config = _flat(**{"draft_vocab_size": DRAFT_VOCAB} | changes)
    return Published(config, tensors or _eagle3(), pickled=pickled, target=target)


def _nested3(
    config: dict[str, Any],
    more: dict[str, Any] | None = None,
    *,
    target: str = "llama",
    dim: int = 8,
) -> Published:
    """An EAGLE-3 head in speculators' format, with its embedding."""
    tensors = _eagle3("layers.0.", dim=dim, more=_EMBEDDING | (more or {}))
    return Published(config, tensors, target=target)


def _biases(prefix: str, **widths: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}self_attn.{n}_proj.bias": (width,) for n, width in widths.items()}


def _ids(ids: list[int]) -> dict[str, Any]:
    return {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}


_OLD_ROPE = {"type": "llama3"} | {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_type"}
_QKV = _biases("layers.0.", q=32, k=16, v=16)
_FULL_MAPS = {
    "d2t": torch.zeros(VOCAB, dtype=torch.int64),
    "t2d": torch.ones(VOCAB, dtype=torch.bool),
}
_ZEROS = {"fc.bias": torch.zeros(HIDDEN, dtype=torch.float16)}
_INPUT_NORM = {"input_norm.weight": (3 * HIDDEN,)}
_NORMS = {f"layers.0.self_attn.{n}_norm.weight": (16,) for n in "qk"}
_AUX_NORMS = {f"aux_norm_{where}.weight": (HIDDEN,) for where in ("low", "mid", "high")}
_VERIFIER = {"verifier_norm.weight": (HIDDEN,), "verifier_lm_head.weight": (DRAFT_VOCAB, HIDDEN)}
_SGLANG1 = {"architectures": ["LlamaForCausalLMEagle"], "bias": False}

PUBLISHED: dict[str, Callable[[], Published]] = {
    # EAGLE repository: no key ``bias``, which means a bias, and no grouped heads.
    "eagle1_vicuna": lambda: Published(
        _flat(num_key_value_heads=None), _eagle1(fc_bias=True, kv=4), pickled=True
    ),
    # EAGLE repository: ``"bias": false``.
    "eagle1_llama3": lambda: Published(
        _flat(bias=False, rope_theta=500000.0), _eagle1(), pickled=True, target="llama3"
    ),
    # EAGLE repository: biases of queries, keys and values.
    "eagle1_qwen2": lambda: Published(
        _flat(qkv_bias=True), _eagle1(fc_bias=True) | _tensors(_QKV, torch.float16), target="qwen2"
    ),
    # EAGLE repository: no layer ids, no rope_theta, half precision, pickled.
    "eagle3_llama31": lambda: _flat3(_eagle3(dtype=torch.float16), pickled=True, target="llama3"),
    # EAGLE repository: full vocabulary, and the target's number of layers in the configuration.
    "eagle3_vicuna13b": lambda: _flat3(
        _eagle3(kv=4, draft_vocab=VOCAB),
        draft_vocab_size=VOCAB,
        num_hidden_layers=40,
        num_key_value_heads=None,
        pickled=True,
    ),
    # EAGLE repository, as for the 70B target: narrower than the target, with an embedding.
    "eagle3_narrow": lambda: _flat3(
        _eagle3(hidden=24, more={"embed_tokens.weight": (VOCAB, 24)}),
        hidden_size=24,
        target_hidden_size=HIDDEN,
        head_dim=8,
    ),
    # Layer ids for vLLM, which counts inputs.
    "eagle3_vllm": lambda: _flat3(eagle_config=_ids(INPUTS), target="mistral"),
    # The EAGLE repository's weights with SGLang's ``architectures``.
    "sglang_eagle1": lambda: Published(_flat(**_SGLANG1), _eagle1()),
    # Layer ids for SGLang, which counts outputs.
    "sglang_eagle3": lambda: _flat3(**_SGLANG3, eagle_config=_ids(OUTPUTS), target="qwen3"),
    # EAGLE-3.1: features normed one by one, normed state fed back.
    "sglang_eagle31": lambda: _flat3(
        _eagle3("layers.0.", more=_FC_NORM), **_SGLANG3, fc_norm=True, norm_output=True
    ),
    # The older names of EAGLE-3.1's norms.
    "sglang_aux_norms": lambda: _flat3(_eagle3(more=_AUX_NORMS), **_SGLANG3, use_aux_norm=True),
    # Features normed together, as for gpt-oss, the key inside ``eagle_config``.
    "sglang_norm_before_fc": lambda: _flat3(
        _eagle3(more=_INPUT_NORM), **_SGLANG3, eagle_config={"norm_before_fc": True}
    ),
    # EAGLE-1 without a bias, and zeros in its place for SGLang, which builds one always.
    "sglang_eagle1_zeros": lambda: Published(_flat(**_SGLANG1), _eagle1() | _ZEROS),
    # ``specforge export --to sglang``: no embedding, rotary scaling in the older spelling.
    "specforge_sglang": lambda: _flat3(
        **_SGLANG3, rope_theta=500000.0, rope_scaling=_OLD_ROPE, head_dim=8, target="llama3"
    ),
    # ``specforge export --to hf``: with the embedding, and maps of a full vocabulary.
    "specforge_hf": lambda: _flat3(
        _eagle3(draft_vocab=VOCAB, more=_EMBEDDING) | _FULL_MAPS,
        **_SGLANG3,
        draft_vocab_size=VOCAB,
        target="qwen2",
    ),
    # Converted from the EAGLE repository: no layer ids.
    "speculators_plain": lambda: _nested3(_speculators()),
    # Trained by speculators: ``norm_before_residual``, ids that count inputs.
    "speculators_residual": lambda: _nested3(
        _speculators(norm_before_residual=True, ids=INPUTS), target="mistral"
    ),
    # EAGLE-3.1 by speculators, and the target's own tensors that older files carry.
    "speculators_norms": lambda: _nested3(
        _speculators(norm_before_residual=True, fc_norm=True, norm_output=True),
        _FC_NORM | _VERIFIER,
    ),
    # Features normed together.
    "speculators_norm_before_fc": lambda: _nested3(_speculators(norm_before_fc=True), _INPUT_NORM),
    # A Qwen3 layer, which norms queries and keys.
    "speculators_qwen3": lambda: _nested3(
        _speculators(layer={"model_type": "qwen3", "head_dim": 16, "rope_theta": 1e6}),
        _NORMS,
        target="qwen3",
        dim=16,
    ),
    # Biases of all of attention, by one key.
    "speculators_biases": lambda: _nested3(
        _speculators(layer={"attention_bias": True}), _QKV | _biases("layers.0.", o=HIDDEN)
    ),
}
