"""Families whose logits are more than a product, and heads that predict them perfectly."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from eaglegbv.drafters.checkpoint import save_head
from eaglegbv.drafters.eagle_model import Arch, Eagle1Head
from eaglegbv.drafters.training.heads import head_config_of
from eaglegbv.output_layer import OutputLayer

HIDDEN = 32
FAMILIES = {
    "llama": {},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 3.0},
    "cohere": {"logit_scale": 0.125},
    "gemma2": {"final_logit_softcapping": 2.0, "head_dim": 8},
    "phi": {},
}
"""Scaled down, scaled up, softly capped, biased; and what changes them, by transformers' names."""


def family(name: str, vocab: int, **changes: object) -> PreTrainedModel:
    """Return a random model of a family whose output layer says much."""
    sizes = {
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = AutoConfig.for_model(name, **sizes | FAMILIES[name] | changes)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        layer = model.get_output_embeddings()
        with torch.no_grad():
            layer.weight.normal_()
            if layer.bias is not None:
                layer.bias.normal_(std=3.0)
    return model.requires_grad_(requires_grad=False)


def save_with_perfect_head(name: str, vocab: int, target: Path, head: Path) -> None:
    """Write a model whose last state is its token's embedding, and the EAGLE-1 head that knows.

    Attention and feed-forward layers add nothing. Embeddings are vectors of as many 1 as -1, which
    the norms leave as they are.
    """
    model = family(name, vocab)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(4)
        for part, weight in model.base_model.named_parameters():
            if any(end in part for end in ("o_proj", "down_proj", "dense", "fc2")):
                weight.zero_()
        signs = torch.tensor([1.0, -1.0]).repeat(HIDDEN // 2)
        rows = [signs[torch.randperm(HIDDEN)] for _ in range(vocab)]
        model.get_input_embeddings().weight.copy_(torch.stack(rows))
        model.save_pretrained(target)
        config = head_config_of(model.config, Arch.EAGLE1, draft_vocab=vocab)
        embedding = model.get_input_embeddings().weight
        eagle1 = Eagle1Head(replace(config, fc_bias=False), embedding, OutputLayer.of(model))
        for part, weight in eagle1.named_parameters():
            if any(end in part for end in ("o_proj", "down_proj")):
                weight.zero_()
        eagle1.fc.weight.copy_(torch.eye(HIDDEN, 2 * HIDDEN))
        save_head(eagle1, head, torch.float32)
