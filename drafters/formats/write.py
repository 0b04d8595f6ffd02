"""Writing a head's folder in a format."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eaglegbv.devices import dtype_name
from eaglegbv.drafters.eagle_model import Arch, EagleHeadConfig, HeadConfig
from eaglegbv.drafters.formats.names import FC_BIAS, LAYER
from eaglegbv.drafters.formats.read import (
    FORMATS,
    LAYER_IDS,
    LAYER_SECTION,
    NUMBERING,
    SAFETENSORS,
    VARIANTS,
    Format,
    FormatName,
)
from eaglegbv.errors import DrafterMismatch
from eaglegbv.utils import replacing, write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a config.json is written from."""

    config: HeadConfig  # the head's configuration
    # Target layers whose inputs a head reads; None where the file leaves them to the default.
    layers: tuple[int, ...] | None
    dtype: torch.dtype  # type of the tensors
    passed_on: Mapping[str, Any]  # keys that only other engines use
    verifier: str | None = None  # name or path of the target, where it is known
    verifier_architectures: tuple[str, ...] = ()  # its class names


def write_head(
    folder: Path, kind: Format, contents: Contents, tensors: Mapping[str, Tensor]
) -> None:
    """Write ``config.json`` and ``model.safetensors`` into a folder, which need not exist.

    Tensors, by their names inside this package, are written unchanged; an EAGLE-1 head without a
    bias gets one of zeros for SGLang, which would start a random one.

    Raises:
        DrafterMismatch: The format cannot express the head.
    """
    config = contents.config
    assert isinstance(config, EagleHeadConfig)
    check_holds(kind.name, config)
    if kind.name is FormatName.SGLANG and config.arch is Arch.EAGLE1 and not config.fc_bias:
        tensors = {**tensors, FC_BIAS: torch.zeros(config.hidden_size, dtype=contents.dtype)}
    prefix = "layers.0." if config.arch is Arch.EAGLE1 else kind.eagle3_layer
    stored = {
        prefix + name.removeprefix(LAYER) if name.startswith(LAYER) else name: tensor.contiguous()
        for name, tensor in tensors.items()
    }
    keys = _nested(kind, config, contents) if kind.nested else _flat(kind, config, contents)
    write_files(folder, keys, stored)


def write_files(folder: Path, keys: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors`` into a folder, which need not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / SAFETENSORS) as partial:
        save_file(dict(tensors), partial, metadata={"format": "pt"})
    write_whole(folder / "config.json", f"{json.dumps(keys, indent=2)}\n".encode())


def check_holds(name: FormatName, config: EagleHeadConfig) -> None:
    """Raise :class:`DrafterMismatch` where the format's readers would lose part of a head."""

    def refuse(expected: str) -> None:
        raise DrafterMismatch("format", str(name), f"a format {expected}")

    if name not in FORMATS:
        refuse(f"that holds an {config.kind}")
    kind = FORMATS[name]
    if config.arch not in kind.variants:
        refuse(f"that holds {config.arch}")
    for variant in sorted(VARIANTS - kind.variants[config.arch]):
        if getattr(config, variant):
            refuse(f"whose readers honour {variant}, which this head needs")
    if kind.nested and config.qkv_bias != config.o_bias:
        refuse("that tells biases of q, k, v from one of o, as this head needs")
    if kind.nested and config.norm_before_fc and config.fc_norm:
        refuse("that has both norm_before_fc and fc_norm, as this head needs")


def _flat(kind: Format, config: EagleHeadConfig, contents: Contents) -> dict[str, Any]:
    stored: dict[str, Any] = {
        "architectures": [kind.architectures[config.arch]],
        "model_type": "llama",
        **layer_keys(contents.config, contents.passed_on),
        "torch_dtype": dtype_name(contents.dtype),
    }
    for_sglang = kind.name is FormatName.SGLANG
    if config.arch is Arch.EAGLE1:
        # Left out where true, as in the published files: SGLang and vLLM would take a true one for
        # biases of attention too, and leave those unset.
        stored |= {} if config.fc_bias else {"bias": False}
        if for_sglang and config.qkv_bias:
            stored |= {"architectures": ["Qwen2ForCausalLMEagle"], "model_type": "qwen2"}
        return stored | {"qkv_bias": config.qkv_bias}
    stored["draft_vocab_size"] = config.draft_vocab_size
    if config.hidden_size != config.target_hidden_size:
        stored["target_hidden_size"] = config.target_hidden_size
    if contents.layers is not None:
        stored["num_aux_hidden_states"] = len(contents.layers)
        stored["eagle_config"] = {
            "use_aux_hidden_state": True,
            LAYER_IDS: [layer - kind.numbering.shift for layer in contents.layers],
            NUMBERING: str(kind.numbering),
        }
    if for_sglang:
        for name in ("norm_before_fc", "fc_norm", "norm_output"):
            stored[name] = getattr(config, name)
    return stored


def _nested(kind: Format, config: EagleHeadConfig, contents: Contents) -> dict[str, Any]:
    layer = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        **layer_keys(contents.config, contents.passed_on),
        "attention_bias": config.qkv_bias,
        "mlp_bias": False,
        "torch_dtype": dtype_name(contents.dtype),
    }
    ids: list[int] | None = None
    if contents.layers is not None:
        ids = [layer_id - kind.numbering.shift for layer_id in contents.layers]
        # The settings beside this section have a schema; a Llama configuration takes any key.
        layer[NUMBERING] = str(kind.numbering)
    narrow = config.hidden_size != config.target_hidden_size
    return {
        "architectures": [kind.architectures[config.arch]],
        "model_type": "speculators",
        "speculators_model_type": "eagle3",
        "torch_dtype": dtype_name(contents.dtype),
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
        "target_hidden_size": config.target_hidden_size if narrow else None,
        LAYER_IDS: ids,
        "tie_word_embeddings": False,
        "speculators_config": speculators_section("eagle3", 3, contents),
        LAYER_SECTION: layer,
    }


def layer_keys(config: HeadConfig, passed_on: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder layer's keys, the same in all formats."""
    rope = {key: value for key, value in config.rope_parameters.items() if key != "rope_theta"}
    return {
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "tie_word_embeddings": False,
        **passed_on,
    }


def speculators_section(algorithm: str, tokens: int, contents: Contents) -> dict[str, Any]:
    """Return what speculators' format says of how a head drafts, and for whom."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
        "verifier": {
            "name_or_path": contents.verifier,
            "architectures": list(contents.verifier_architectures),
        },
    }
