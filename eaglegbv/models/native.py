"""Targets in the native library: which models it knows, and their weights."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from eaglegbv.models.self_check import LayerCall
from eaglegbv.native.library import native_library
from eaglegbv.native.model import DTYPES, UNIT, NativeModel, Parts, layer_facts

_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_FIXED_ROTARY = frozenset({"default", "linear", "llama3", "yarn"})

_log = logging.getLogger(__name__)


def native_target(
    model: PreTrainedModel, calls: Sequence[LayerCall], features: Sequence[int]
) -> NativeModel | None:
    """Return ``model`` in the library, with a copy of its weights; None if it cannot run there.

    ``calls`` are what its layers asked of attention. The target's self-check proves the rest.
    """
    reason = _unknown(model)
    if reason is not None:
        _log.info("forwards of %s run through transformers: %s", type(model).__name__, reason)
        return None
    library = native_library()
    if library is None:
        return None
    config, parts = model.config, Parts(library)
    base: Any = model.model
    lm_head: Any = model.lm_head
    layers = []
    for layer, call in zip(base.layers, calls, strict=True):
        norms = layer.input_layernorm, layer.post_attention_layernorm
        layers.append(layer_facts(parts, layer.self_attn, layer.mlp, norms, call.window or 0))
    heads = int(config.num_attention_heads)
    return NativeModel(
        parts,
        layers,
        element_bytes=model.dtype.itemsize,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=heads,
        kv_heads=calls[0].kv_heads,
        head_dim=calls[0].head_dim,
        vocab=config.vocab_size,
        num_features=len(features),
        eps=config.rms_norm_eps,
        rotary_scale=base.rotary_emb.attention_scaling,
        embedding=parts.numbers(base.embed_tokens.weight, model.dtype),
        frequencies=parts.numbers(base.rotary_emb.inv_freq),
        norm=parts.norm(base.norm),
        output=parts.matrix(lm_head),
        features=parts.numbers(torch.tensor(features), torch.int32) if features else None,
    )


def _unknown(model: PreTrainedModel) -> str | None:
    """Return what the library does not know of a model, None if it knows all."""
    if model.device.type != "cpu" or model.dtype not in DTYPES:
        return f"{model.dtype} on {model.device}"
    return unknown_of(model.config)


def unknown_of(config: PreTrainedConfig) -> str | None:
    """Return what the library does not know of models of a configuration, None if it knows all."""
    if config.model_type not in _FAMILIES:
        return f"the library knows {', '.join(sorted(_FAMILIES))}"
    rotary = (config.rope_parameters or {}).get("rope_type", "default")
    if rotary not in _FIXED_ROTARY:
        return f"rotary embedding {rotary!r}"
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    widths = config.hidden_size, config.intermediate_size, head_dim
    if config.hidden_act != "silu" or any(width % UNIT for width in widths):
        return f"activation {config.hidden_act!r}, widths {widths}"
    return None
