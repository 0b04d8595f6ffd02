"""Tiny random models of many architectures, built from configurations: no downloads."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

VOCAB = 48
LAYERS = 4
WINDOW = 4

Module = TypeVar("Module", bound=torch.nn.Module)

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    **_TOKENS,
}
_GPT2_SIZES = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 128,
    **_TOKENS,
}


def for_model(kind: str, **settings: Any) -> Callable[[], transformers.PreTrainedConfig]:
    """What makes configurations of a kind of model."""
    return partial(AutoConfig.for_model, kind, **settings)


CONFIGS: dict[str, Callable[..., transformers.PreTrainedConfig]] = {
    "llama": for_model("llama", **_SIZES),
    "qwen2": for_model("qwen2", **_SIZES),
    "qwen2_window": for_model(
        "qwen2", **_SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen3": for_model("qwen3", **_SIZES, head_dim=16),
    "mistral": for_model("mistral", **_SIZES, sliding_window=WINDOW),
    "gemma2": for_model(
        "gemma2", **_SIZES, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=0.5
    ),
    "gemma3_text": for_model(
        "gemma3_text",
        **_SIZES,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    ),
    "opt": for_model(
        "opt",
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        **_TOKENS,
    ),
    "gpt2": for_model("gpt2", **_GPT2_SIZES),
    "phi3": for_model("phi3", **_SIZES),
    "mixtral": for_model("mixtral", **_SIZES, num_local_experts=4),
    "gpt_oss": for_model(
        "gpt_oss",
        **_SIZES,
        head_dim=16,
        sliding_window=WINDOW,
        num_local_experts=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "bloom": for_model(
        "bloom", vocab_size=VOCAB, hidden_size=32, n_layer=LAYERS, n_head=4, **_TOKENS
    ),
    "gptj": for_model("gptj", **_GPT2_SIZES, rotary_dim=4),
    "stablelm": for_model("stablelm", **_SIZES),
}
"""Configurations by name; windows are shorter than the texts of the tests."""


def random_llama(vocab: int, *, seed: int | None = None, **changes: object) -> LlamaForCausalLM:
    """Return a random Llama, by a seed of its own or by PyTorch's generator as it is."""
    sizes = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**sizes | changes)).eval()


def tiny_model(
    name: str, *, dtype: torch.dtype = torch.float32, layers: int = LAYERS
) -> transformers.PreTrainedModel:
    """Return a random model whose attention matters: weights well above the usual start."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        how = {} if layers == LAYERS else {"num_hidden_layers": layers}
        config = CONFIGS[name](**how)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        return spread(model, 0.15).to(dtype)


def spread(model: Module, std: float) -> Module:
    """Draw all weights of a model but its norms' anew, and return it, to be evaluated."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=std)
    return model.eval()
