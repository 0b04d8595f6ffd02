"""A small random target with a small random EAGLE head, put together into an engine."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from eaglegbv.attention.base import PagedAttention
from eaglegbv.attention.flashinfer import paged_attention
from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.config import EngineConfig, Plan, Planning
from eaglegbv.cuda_graphs import GraphMode, Recorder
from eaglegbv.drafters.eagle import EagleDrafter
from eaglegbv.drafters.eagle_model import (
    Arch,
    Eagle1Head,
    Eagle3Head,
    EagleHead,
    default_feature_layers,
)
from eaglegbv.drafters.training.heads import head_config_of
from eaglegbv.engine import Engine
from eaglegbv.models.hf import HFTarget
from eaglegbv.models.target import FINAL
from eaglegbv.request import Request
from eaglegbv.sampling import SamplingParams, WarpSettings, warp
from support.g_test import joint_probs
from support.tiny_models import random_llama

LAYERS = 6
WIDTH = 32
HEAD_DIM = 16

Asked = tuple[Sequence[int], SamplingParams, Planning]


@dataclass(frozen=True, slots=True)
class TinyEngine:
    """An engine and the plain model its target wraps a copy of."""

    engine: Engine
    model: LlamaForCausalLM
    target: HFTarget
    drafter: EagleDrafter

    def run(self, requests: list[Request]) -> None:
        """Step until all requests have ended, checking after every step who owns which slot."""
        while self.engine.has_work:
            self.engine.step()
            self.target.allocator.check([request.slots for request in requests])

    def texts(self, asked: Iterable[Asked]) -> list[list[int]]:
        """Return what prompts are answered with, each by settings of its own, in one batch."""
        self.run(requests := [self.engine.add(*own) for own in asked])
        return [request.token_ids for request in requests]

    def tokens(
        self, prompts: list[list[int]], params: SamplingParams, plan: Plan
    ) -> list[list[int]]:
        """Return what the prompts are answered with, by the same settings."""
        return self.texts((prompt, params, plan) for prompt in prompts)

    def sample(
        self, prompt: list[int], params: SamplingParams, plans: Sequence[Planning], count: int
    ) -> list[Request]:
        """Requests that differ in their seeds, with these plans in turn, answered."""
        seeded = (msgspec.structs.replace(params, seed=seed) for seed in range(count))
        return served(self.engine, [(prompt, p, plans[p.seed % len(plans)]) for p in seeded])

    def joint_probs(
        self, prompt: list[int], tokens: int, params: SamplingParams | None = None
    ) -> NDArray[np.float64]:
        """The exact joint distribution of the first tokens, by the plain model, penalties and all.

        Shape ``[vocab ** tokens]``.
        """
        own = params or SamplingParams()

        @torch.inference_mode()
        def next_probs(prefixes: list[list[int]]) -> NDArray[np.float64]:
            logits = self.model(torch.tensor(prefixes)).logits[:, -1]
            for row, prefix in zip(logits, prefixes, strict=True):
                generated = prefix[len(prompt) :]
                for token in set(prefix):
                    factor = own.repetition_penalty
                    row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
                for token in set(generated):
                    row[token] -= own.presence_penalty
                    row[token] -= own.frequency_penalty * generated.count(token)
            settings = WarpSettings.of([own], [len(prefixes)])
            return warp(logits, settings).double().softmax(dim=1).numpy()

        return joint_probs(next_probs, prompt, tokens)


def served(engine: Engine, asked: Iterable[Asked]) -> list[Request]:
    """Return requests that were added, and stepped until all had ended, none by an error."""
    requests = [engine.add(*own) for own in asked]
    while engine.has_work:
        engine.step()
    assert not any(request.error for request in requests)
    return requests


def cells_of(requests: list[Request], vocab: int) -> list[int]:
    """Texts of one length as cells of their joint distribution."""
    texts = np.array([request.token_ids for request in requests]).T
    return np.ravel_multi_index(tuple(texts), [vocab] * len(texts)).tolist()


def tiny_engine(
    *,
    vocab: int = 16,
    arch: Arch = Arch.EAGLE3,
    slots: int = 4096,
    max_batch: int = 64,
    sharpness: float = 2.0,
    device: str = "cpu",
    graphs: GraphMode | Recorder = GraphMode.OFF,
    attention: Callable[[KVPool], PagedAttention] = paged_attention,
    compile_backend: str | None = None,
    dtype: torch.dtype = torch.float32,
    head_dim: int = HEAD_DIM,
    layers: int = LAYERS,
    native: bool = True,
    **settings: int | bool,
) -> TinyEngine:
    """Build one; ``sharpness`` is the standard deviation of the logits, roughly.

    The target is compiled by ``compile_backend``. Further settings are those of ``EngineConfig``.
    """
    torch.manual_seed(11)
    sizes = {"num_hidden_layers": layers, "num_key_value_heads": 2, "head_dim": head_dim}
    model = random_llama(vocab, initializer_range=0.3, **sizes)
    with torch.no_grad():
        # A normed hidden state has length sqrt(width).
        model.lm_head.weight.normal_(std=sharpness / WIDTH**0.5)
    features = (FINAL,) if arch is Arch.EAGLE1 else default_feature_layers(layers)
    copy = LlamaForCausalLM(LlamaConfig(**model.config.to_dict())).eval()
    copy.load_state_dict(model.state_dict())
    target = HFTarget(
        copy.to(dtype).to(device),
        features=features,
        max_slots=slots,
        graphs=graphs,
        attention=attention,
        compile_backend=compile_backend,
        native=native,
    )
    pool = KVPool(1, slots + 1, 2, head_dim, dtype, torch.device(device))
    head_config = head_config_of(model.config, arch, draft_vocab=vocab)
    head: EagleHead
    if arch is Arch.EAGLE1:
        head = Eagle1Head(head_config, target.input_embeddings, target.output_layer())
    else:
        head = Eagle3Head(head_config, target.input_embeddings)
        with torch.no_grad():
            # Distributions that resemble the target's: its output layer under the head's own norm.
            head.lm_head.weight.copy_(target.output_layer().weight)
    head = head.eval().to(dtype).to(device)
    drafter = EagleDrafter(head, attention(pool), graphs=graphs, max_context=256, native=native)
    config = EngineConfig(max_batch=max_batch, kv_slots=slots, **settings)
    return TinyEngine(Engine(target, drafter, config), model, target, drafter)
