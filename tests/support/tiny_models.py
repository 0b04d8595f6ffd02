"""Tiny random models of many architectures, built from configurations: no downloads."""

from collections.abc import Callable
from typing import TypeVar

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)

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

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen2_window": lambda: Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=16),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **_SIZES, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=0.5
    ),
    "gemma3_text": lambda: Gemma3TextConfig(
        **_SIZES,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    ),
    "opt": lambda: OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        **_TOKENS,
    ),
    "gpt2": lambda: GPT2Config(**_GPT2_SIZES),
    "phi3": lambda: Phi3Config(**_SIZES),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=4),
    "gpt_oss": lambda: GptOssConfig(
        **_SIZES,
        head_dim=16,
        sliding_window=WINDOW,
        num_local_experts=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "bloom": lambda: BloomConfig(
        vocab_size=VOCAB, hidden_size=32, n_layer=LAYERS, n_head=4, **_TOKENS
    ),
    "gptj": lambda: GPTJConfig(**_GPT2_SIZES, rotary_dim=4),
    "stablelm": lambda: StableLmConfig(**_SIZES),
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


def tiny_model(name: str, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a random model whose attention matters: weights well above the usual start."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager")
        return spread(model, 0.15).to(dtype)


def spread(model: Module, std: float) -> Module:
    """Draw all weights of a model but its norms' anew, and return it, to be evaluated."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=std)
    return model.eval()
