"""Strict loading and saving of heads, in the tensor names of the EAGLE repository.

What a checkpoint is follows from its tensors, never from the ``architectures`` string, which is the
same for all. Every tensor expected must be there, and every tensor there must be used or be one of
the few known to be left aside; a head that loads in part drafts noise without a word.
"""

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig

from eaglegbv.drafters.eagle_head import (
    Arch,
    Eagle1Head,
    Eagle3Head,
    EagleHead,
    EagleHeadConfig,
    default_feature_layers,
)
from eaglegbv.errors import DrafterMismatch

logger = logging.getLogger(__name__)

_WEIGHTS = "model.safetensors"
_LAYER_PREFIX = {Arch.EAGLE1: "layers.0.", Arch.EAGLE3: "midlayer."}
_EMBEDDING = "embed_tokens.weight"
# Offsets from draft ids to target ids, and which target ids the draft vocabulary holds.
_OFFSETS = "d2t"
_MEMBERS = "t2d"


def read_head_config(path: Path, target_config: PreTrainedConfig) -> EagleHeadConfig:
    """Read what the head at ``path`` is, without loading its weights.

    Raises:
        DrafterMismatch: A file is missing or broken, a key is missing, or the head does not fit
            the target; the message names the file or key.
    """
    return _head_config(_read_json(path / "config.json"), _names(path / _WEIGHTS), target_config)


def load_head(
    path: Path,
    *,
    target_config: PreTrainedConfig,
    target_embedding: Tensor,
    target_lm_head: Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> EagleHead:
    """Load the head at ``path``, a folder with ``config.json`` and ``model.safetensors``.

    Args:
        path: The folder.
        target_config: The target's configuration.
        target_embedding: ``[vocab, hidden]``, shared with the head.
        target_lm_head: ``[vocab, hidden]``, shared with an EAGLE-1 head.
        dtype: Type of the head's weights.
        device: Device of the head's weights.

    Raises:
        DrafterMismatch: A tensor is missing, unknown, of a wrong shape or type, the file is
            truncated, or sizes or vocabulary do not fit the target; the message names the tensor
            or key.
    """
    config = read_head_config(path, target_config)
    tensors = _read_tensors(path / _WEIGHTS)
    embedding = target_embedding
    if config.hidden_size != config.target_hidden_size:
        embedding = _take(tensors, _EMBEDDING, (config.vocab_size, config.hidden_size)).to(dtype)
    head: EagleHead
    if config.arch is Arch.EAGLE1:
        with torch.device("meta"):
            head = Eagle1Head(config, embedding, target_lm_head)
    else:
        draft_to_target = _draft_to_target(tensors, config)
        with torch.device("meta"):
            head = Eagle3Head(config, embedding, draft_to_target)
    weights = {
        name: _take(tensors, _stored_name(name, config.arch), tuple(expected.shape)).to(dtype)
        for name, expected in head.state_dict().items()
    }
    _check_left_over(tensors, config)
    head.load_state_dict(weights, assign=True)
    return head.to(device).requires_grad_(False).eval()


def save_head(head: EagleHead, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Save ``head`` as ``config.json`` and ``model.safetensors`` of type ``dtype`` in ``path``.

    The embedding is saved only where it is not the target's.
    """
    config = head.config
    tensors = {
        _stored_name(name, config.arch): tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in head.state_dict().items()
    }
    if config.hidden_size != config.target_hidden_size:
        tensors[_EMBEDDING] = head.embedding.to("cpu", dtype).contiguous()
    if config.draft_vocab_size < config.vocab_size:
        chosen = head.draft_to_target.cpu()
        tensors[_OFFSETS] = chosen - torch.arange(len(chosen))
        tensors[_MEMBERS] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors[_MEMBERS][chosen] = True
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / _WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(_stored_config(config, dtype), indent=2)
    (path / "config.json").write_text(text + "\n")


def _head_config(
    stored: Mapping[str, Any], names: Collection[str], target_config: PreTrainedConfig
) -> EagleHeadConfig:
    target = target_config.get_text_config()
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if stored.get(key) is None:
            raise DrafterMismatch(f"config.json key {key}", None, "an integer")
    arch = _detect(names)
    llama = LlamaConfig(**_llama_keys(stored))
    _expect("vocab_size", stored["vocab_size"], target.vocab_size)
    _expect(
        "target_hidden_size",
        stored.get("target_hidden_size", stored["hidden_size"]),
        target.hidden_size,
    )
    draft_vocab = stored.get("draft_vocab_size") or stored["vocab_size"]
    layers: tuple[int, ...] = ()
    if arch is Arch.EAGLE3:
        named = stored.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        layers = tuple(named or default_feature_layers(target.num_hidden_layers))
        for layer in layers:
            if not 0 < layer < target.num_hidden_layers:
                expected = f"layers from 1 to {target.num_hidden_layers - 1} of the target"
                raise DrafterMismatch("eagle_aux_hidden_state_layer_ids", layers, expected)
    return EagleHeadConfig(
        arch=arch,
        hidden_size=llama.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=llama.intermediate_size,
        num_heads=llama.num_attention_heads,
        num_kv_heads=llama.num_key_value_heads or llama.num_attention_heads,
        head_dim=llama.head_dim or llama.hidden_size // llama.num_attention_heads,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab if arch is Arch.EAGLE3 else target.vocab_size,
        feature_layers=layers,
        rms_norm_eps=llama.rms_norm_eps,
        rope_parameters=dict(llama.rope_parameters or {}),
        fc_bias="fc.bias" in names,
        qkv_bias=f"{_LAYER_PREFIX[arch]}self_attn.q_proj.bias" in names,
    )


def _llama_keys(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the keys that mean in a head's configuration what they mean in Llama's."""
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
    )
    return {key: stored[key] for key in keys if stored.get(key) is not None}


def _detect(names: Collection[str]) -> Arch:
    if any(name.startswith("midlayer.") for name in names):
        return Arch.EAGLE3
    if any(name.startswith("layers.0.") for name in names) and "lm_head.weight" not in names:
        return Arch.EAGLE1
    expected = "tensors named midlayer.* (EAGLE-3) or layers.0.* without lm_head (EAGLE-1)"
    raise DrafterMismatch(_WEIGHTS, sorted(names)[:5], expected)


def _stored_config(config: EagleHeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    stored: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if config.rope_parameters["rope_type"] != "default":
        stored["rope_scaling"] = dict(config.rope_parameters)
    if config.arch is Arch.EAGLE1:
        return stored | {"bias": config.fc_bias, "qkv_bias": config.qkv_bias}
    stored["draft_vocab_size"] = config.draft_vocab_size
    stored["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(config.feature_layers)}
    if config.hidden_size != config.target_hidden_size:
        stored["target_hidden_size"] = config.target_hidden_size
    return stored


def _stored_name(name: str, arch: Arch) -> str:
    inner = name.removeprefix("layer.")
    return name if inner == name else _LAYER_PREFIX[arch] + inner


def _draft_to_target(tensors: dict[str, Tensor], config: EagleHeadConfig) -> Tensor | None:
    """Turn the stored offsets into target ids; None for the full vocabulary."""
    if config.draft_vocab_size == config.vocab_size:
        return None
    offsets = _take(tensors, _OFFSETS, (config.draft_vocab_size,), torch.int64)
    ids = offsets + torch.arange(len(offsets))
    if not bool(((ids >= 0) & (ids < config.vocab_size)).all()) or len(set(ids.tolist())) < len(
        ids
    ):
        expected = f"offsets to different target ids in [0, {config.vocab_size})"
        raise DrafterMismatch(_OFFSETS, [int(ids.min()), int(ids.max())], expected)
    members = _take(tensors, _MEMBERS, (config.vocab_size,), torch.bool)
    if not torch.equal(members.nonzero().squeeze(1), ids.sort().values):
        raise DrafterMismatch(_MEMBERS, int(members.sum()), f"the {len(ids)} target ids of d2t")
    return ids


def _take(
    tensors: dict[str, Tensor],
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Remove and return the tensor ``name``, checked; ``dtype`` None means any float type."""
    if name not in tensors:
        raise DrafterMismatch(name, None, f"a tensor of shape {list(shape)}")
    tensor = tensors.pop(name)
    if tuple(tensor.shape) != shape:
        raise DrafterMismatch(name, list(tensor.shape), f"shape {list(shape)}")
    if tensor.dtype != dtype and not (dtype is None and tensor.dtype.is_floating_point):
        raise DrafterMismatch(name, tensor.dtype, str(dtype or "a float type"))
    return tensor


def _check_left_over(tensors: Mapping[str, Tensor], config: EagleHeadConfig) -> None:
    unused = {_EMBEDDING}
    if config.draft_vocab_size == config.vocab_size:
        unused |= {_OFFSETS, _MEMBERS}
    for name, tensor in tensors.items():
        if name not in unused:
            raise DrafterMismatch(name, list(tensor.shape), f"no such tensor in {config.arch}")
    if tensors:
        logger.info("left aside: %s (the target's own are used)", ", ".join(sorted(tensors)))


def _expect(key: str, value: object, expected: object) -> None:
    if value != expected:
        raise DrafterMismatch(f"config.json key {key}", value, f"the target's, {expected}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DrafterMismatch("drafter", str(path), f"a readable JSON file ({error})") from error
    return content


def _names(path: Path) -> frozenset[str]:
    try:
        with safe_open(path, "pt") as file:
            return frozenset(file.keys())
    except (OSError, SafetensorError) as error:
        expected = f"a complete safetensors file ({error})"
        raise DrafterMismatch("drafter", str(path), expected) from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
