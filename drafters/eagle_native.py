"""EAGLE heads in the native library: which it knows, and their weights."""

from typing import Any

import torch
from torch import Tensor, nn

from eaglegbv.drafters.eagle_model import Eagle1Head, Eagle3Head, EagleHead
from eaglegbv.native.library import native_library
from eaglegbv.native.model import DTYPES, UNIT, NativeModel, Parts, drop_weights, layer_facts


def native_head(head: EagleHead) -> NativeModel | None:
    """Return ``head``, whose layer's weights move there; None if it cannot run there."""
    config = head.config
    embedding = head.embedding
    widths = config.hidden_size, config.target_hidden_size, config.intermediate_size
    misfits = any(width % UNIT for width in (*widths, config.head_dim))
    misfits = misfits or (config.norm_before_fc and config.fc_norm)
    if embedding.device.type != "cpu" or embedding.dtype not in DTYPES or misfits:
        return None
    library = native_library()
    if library is None:
        return None
    parts = Parts(library)
    facts: dict[str, Any]
    if isinstance(head, Eagle3Head):
        layer = head.layer
        first_norm = head.layer["input_layernorm"]
        facts = _eagle3_facts(head, parts)
    elif isinstance(head, Eagle1Head) and head.target_output.plain:
        layer = head.layer
        first_norm = None
        facts = {"output": parts.matrix(head.target_output)}
    else:
        return None
    norms = first_norm, layer["post_attention_layernorm"]
    model = NativeModel(
        parts,
        [layer_facts(parts, layer["self_attn"], layer["mlp"], norms, 0)],
        element_bytes=embedding.dtype.itemsize,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab=config.draft_vocab_size,
        norm_before_residual=config.norm_before_residual,
        norm_output=config.norm_output,
        eps=config.rms_norm_eps,
        rotary_scale=head.rotary.scaling,
        embedding=parts.numbers(embedding, embedding.dtype),
        frequencies=parts.numbers(head.rotary.frequencies),
        fc=parts.matrix(head.fc),
        **facts,
    )
    drop_weights(layer)
    return model


def _eagle3_facts(head: Eagle3Head, parts: Parts) -> dict[str, Any]:
    """Return what only EAGLE-3 heads have; the library norms features once before ``fc``."""
    norms = (head.input_norm, *head.fc_norm.children())
    weights: list[Tensor] = [norm.weight for norm in norms if isinstance(norm, nn.RMSNorm)]
    return {
        "norm": parts.norm(head.norm),
        "hidden_norm": parts.norm(head.layer["hidden_norm"]),
        "feature_norm": parts.numbers(torch.cat(weights) if weights else None),
        "feature_parts": max(1, len(weights)),
        "output": parts.matrix(head.lm_head),
    }
