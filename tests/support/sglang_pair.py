"""A random target of 16 tokens with EAGLE-1 and EAGLE-3 heads, saved as SGLang reads them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from support.published_heads import layer
from support.tiny_models import random_llama, spread

VOCAB = 16
DRAFT_VOCAB = 12
HIDDEN = 64
INTERMEDIATE = 128
LAYERS = 4
EOS = 1


@dataclass(frozen=True, slots=True)
class SGLangPair:
    """Folders of a target and its heads."""

    target: Path
    eagle1: Path
    eagle3: Path

    def next_logits(self) -> Callable[[list[list[int]]], NDArray[np.float64]]:
        """Return what tells the logits ``[sequences, vocab]`` after sequences of one length."""
        model = LlamaForCausalLM.from_pretrained(self.target, dtype=torch.float64).eval()

        @torch.no_grad()
        def after(sequences: list[list[int]]) -> NDArray[np.float64]:
            return model(torch.tensor(sequences)).logits[:, -1].numpy()

        return after

    def next_probs(
        self, temperature: float, top_p: float
    ) -> Callable[[list[list[int]]], NDArray[np.float64]]:
        """Return what tells next tokens' exact distributions after sequences of one length.

        They are ``[sequences, vocab]``, by transformers in float64, under these settings.
        """
        logits_after = self.next_logits()

        def after(sequences: list[list[int]]) -> NDArray[np.float64]:
            logits = torch.from_numpy(logits_after(sequences))
            dists = (logits / temperature).softmax(dim=1)
            values, order = dists.sort(dim=1, descending=True, stable=True)
            values[values.cumsum(dim=1) - values >= top_p] = 0
            dists = torch.zeros_like(dists).scatter_(1, order, values)
            return (dists / dists.sum(dim=1, keepdim=True)).numpy()

        return after


def save_sglang_pair(folder: Path, *, seed: int = 1) -> SGLangPair:
    """Write the models into ``folder``; the heads resemble the target enough to be accepted."""
    pair = SGLangPair(folder / "target", folder / "eagle1", folder / "eagle3")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
        tokens = {"bos_token_id": 0, "eos_token_id": EOS, "pad_token_id": 2}
        model = spread(random_llama(VOCAB, **sizes, **tokens), 0.15)
        model.save_pretrained(pair.target)
        _save(pair.eagle1, _eagle1(), "LlamaForCausalLMEagle", model.config)
        _save(pair.eagle3, _eagle3(model), "LlamaForCausalLMEagle3", model.config)
    return pair


def _eagle1() -> dict[str, torch.Tensor]:
    # The target's feature passes through, so that the distributions resemble each other.
    feature = torch.cat((_random(HIDDEN, HIDDEN) * 0.3, torch.eye(HIDDEN) * 0.8), dim=1)
    bias = torch.zeros(HIDDEN)  # SGLang would draw one at random
    return {"fc.weight": feature, "fc.bias": bias} | _layer("layers.0.", HIDDEN)


def _eagle3(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    # Draft token i is target token i + 3 from the fifth on: a reduced, shifted vocabulary.
    shift = torch.where(torch.arange(DRAFT_VOCAB) < 4, 0, VOCAB - DRAFT_VOCAB)
    known = torch.zeros(VOCAB, dtype=torch.bool)
    kept = torch.arange(DRAFT_VOCAB) + shift
    known[kept] = True
    return {
        "fc.weight": torch.cat([torch.eye(HIDDEN) * w for w in (0.2, 0.3, 0.8)], dim=1),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": model.lm_head.weight.detach()[kept].clone(),
        "d2t": shift,
        "t2d": known,
    } | _layer("midlayer.", 2 * HIDDEN)


def _layer(prefix: str, inputs: int) -> dict[str, torch.Tensor]:
    shapes = layer(prefix, inputs, hidden=HIDDEN, kv=2, dim=HIDDEN // 4, wide=INTERMEDIATE)
    return {
        name: torch.ones(shape) if "norm" in name else _random(*shape)
        for name, shape in shapes.items()
    }


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * 0.15


def _save(
    folder: Path, tensors: dict[str, torch.Tensor], architecture: str, target: LlamaConfig
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = target.to_dict() | {"architectures": [architecture], "num_hidden_layers": 1}
    config |= {"bias": False, "qkv_bias": False}
    if architecture.endswith("3"):
        config |= {
            "draft_vocab_size": DRAFT_VOCAB,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
