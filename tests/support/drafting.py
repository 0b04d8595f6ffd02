"""Requests as a drafter sees them, and what an EAGLE head says of a text, worked out plainly."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaForCausalLM, PreTrainedModel

from eaglegbv.attention.kv_cache import KVPool, SlotAllocator
from eaglegbv.attention.torch import TorchPagedAttention
from eaglegbv.config import Plan
from eaglegbv.drafters.base import Drafter
from eaglegbv.drafters.checkpoint import load_head
from eaglegbv.drafters.eagle import EagleDrafter
from eaglegbv.drafters.eagle_model import Arch, Eagle1Head, Eagle3Head, EagleHead
from eaglegbv.drafters.host_drafting import DraftCall
from eaglegbv.drafters.training.heads import head_config_of
from eaglegbv.output_layer import OutputLayer
from eaglegbv.request import Request
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling, DraftTree
from eaglegbv.verifiers.paths import paths_of
from support.requests import make_request
from support.tiny_models import random_llama as tiny_llama
from support.tiny_models import spread


def random_llama(vocab: int, *, seed: int = 0, layers: int = 2) -> LlamaForCausalLM:
    """A random model whose distributions depend on the whole text, well spread."""
    return tiny_llama(vocab, seed=seed, num_hidden_layers=layers, initializer_range=0.3)


def random_table(vocab: int, *, order: int = 1, seed: int = 0, scale: float = 1.5) -> Tensor:
    """Logits of every state, as a table takes them."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(((vocab + 1) ** order, vocab), generator=generator)


class TokenSession:
    """A drafter and requests whose text is committed by hand."""

    def __init__(self, drafter: Drafter, slots: int = 4096) -> None:
        self.drafter = drafter
        self.allocator = SlotAllocator(slots)
        self._tree_slots: dict[int, Tensor] = {}

    def start(
        self,
        prompt: Sequence[int],
        first: int,
        plan: Plan,
        *,
        params: SamplingParams | None = None,
        seed: int = 0,
    ) -> Request:
        """A request whose prompt was read and whose first token is ``first``."""
        request = make_request(seed, tuple(prompt), params=params or SamplingParams(), plan=plan)
        request.slots = self.allocator.allocate(len(prompt))
        request.token_ids.append(first)
        request.step = 1
        return request

    def draft(self, requests: Sequence[Request], draft_sampling: DraftSampling) -> DraftTree:
        slots = [self.allocator.allocate(r.plan.tree_slots) for r in requests]
        self._tree_slots = {r.number: s for r, s in zip(requests, slots, strict=True)}
        return self.drafter.draft(DraftCall(requests, requests[0].plan, draft_sampling, slots))

    def commit(self, request: Request, tokens: Sequence[int], nodes: Sequence[int]) -> None:
        """Accept ``nodes`` with ``tokens`` but the last, which is the correction."""
        slots = self._tree_slots.pop(request.number)
        keep = torch.zeros(len(slots), dtype=torch.bool)
        keep[[0, *nodes]] = True
        request.slots = torch.cat((request.slots, slots[keep]))
        self.allocator.release(slots[~keep])
        request.token_ids += tokens
        request.step += 1


def starts(session: TokenSession, prompt: Sequence[int], plan: Plan) -> list[Request]:
    """Requests of several texts and settings."""
    settings = [SamplingParams(temperature=t) for t in (1.0, 0.7, 0.5)]
    texts = [(prompt, 11), ([1], 30), ([8] * 9, 0)]
    return [
        session.start(text, first, plan, params=params, seed=seed)
        for seed, ((text, first), params) in enumerate(zip(texts, settings, strict=True))
    ]


def head_for(model: PreTrainedModel, folder: Path) -> Any:
    """The head in a folder, in float32, loaded for a target."""
    return load_head(
        folder,
        target_config=model.config,
        target_embedding=model.get_input_embeddings().weight.detach(),
        read_output=lambda: OutputLayer.of(model),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def text_of(request: Request) -> list[int]:
    """Everything known: the prompt and the tokens, the root of the next tree last."""
    return [*request.prompt_ids, *request.token_ids]


def inner_nodes(tree: DraftTree, b: int) -> list[int]:
    return sorted({int(p) for p in tree.parents[b, 1 : int(tree.num_nodes[b])]})


def full_probs(tree: DraftTree, b: int, node: int, vocab: int) -> NDArray[np.float64]:
    """The distribution that a node carries, over the target's vocabulary."""
    probs = np.zeros(vocab)
    np.add.at(probs, tree.draft_ids[b, node].numpy(), tree.draft_probs[b, node].numpy())
    return probs


def advance(
    session: TokenSession, request: Request, tree: DraftTree, b: int, accepted: int, vocab: int
) -> None:
    """Commit the first ``accepted`` nodes of a path that reaches so deep, and a token more."""
    paths = paths_of(tree)[b].tolist()
    lengths = [sum(node > 0 for node in nodes) for nodes in paths]
    accepted = min(accepted, max(lengths))
    path = next(k for k, length in enumerate(lengths) if length >= accepted)
    nodes = paths[path][:accepted]
    correction = (7 * request.step + 3) % vocab
    session.commit(request, [*tree.token_ids[b, nodes].tolist(), correction], nodes)


VOCAB, HEADS, KV_HEADS, HEAD_DIM = 40, 4, 2, 8
FEATURE_LAYERS = (2, 3, 4)
SLOTS = 160


@dataclass(frozen=True, slots=True)
class Pair:
    """A random Llama and a random head over it, float32, and the head once more in float64."""

    model: LlamaForCausalLM
    head: EagleHead
    exact: EagleHead
    known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def features(self, text: Sequence[int]) -> Tensor:
        """The true features of a text, by one plain forward of the model."""
        if tuple(text) not in self.known:
            self.known[tuple(text)] = self._features(text)
        return self.known[tuple(text)]

    def _features(self, text: Sequence[int]) -> Tensor:
        with torch.no_grad():
            out = self.model.model(torch.tensor([list(text)]), output_hidden_states=True)
        if self.head.config.arch is Arch.EAGLE1:
            return out.last_hidden_state[0]
        return torch.cat([out.hidden_states[layer][0] for layer in FEATURE_LAYERS], dim=-1)

    def log_probs(self, text: Sequence[int], drafted: Sequence[int]) -> NDArray[np.float64]:
        """Log-probabilities ``[draft_vocab]`` of the token after ``text`` and ``drafted``.

        The head reads the whole text at once, without any cache, then once more for every drafted
        token, on its own output for the token before.
        """
        with torch.no_grad():
            hidden = self.exact.fuse(self.features(text[:-1]).double())
            for end in range(len(drafted) + 1):
                tokens = torch.tensor([*text[1:], *drafted[:end]])
                positions = torch.arange(len(tokens))
                out = self.exact(tokens, hidden, positions, causal)
                hidden = torch.cat((hidden, out[-1:]))
            log_probs: NDArray[np.float64] = self.exact.logits(out[-1]).log_softmax(0).numpy()
        return log_probs


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain causal attention over ``[tokens, heads, head_dim]``."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


def random_pair(arch: Arch, *, draft_vocab: int = VOCAB, seed: int = 0) -> Pair:
    """Weights are well above the usual start, so that attention and position matter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = tiny_llama(
            VOCAB, num_hidden_layers=5, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS
        )
        spread(model, 0.25)
        embedding = model.get_input_embeddings().weight.detach()
        config = head_config_of(model.config, arch, draft_vocab=draft_vocab)
        head: EagleHead
        if arch is Arch.EAGLE1:
            head = Eagle1Head(config, embedding, OutputLayer.of(model))
            spread(head, 0.25)
            # Its state has no norm: keep it from growing from one drafted token to the next.
            with torch.no_grad():
                head.fc.weight.mul_(0.4)
                head.layer["self_attn"].o_proj.weight.mul_(0.4)
        else:
            chosen = torch.randperm(VOCAB)[:draft_vocab]
            head = Eagle3Head(replace(config, feature_layers=FEATURE_LAYERS), embedding, chosen)
            spread(head, 0.25)
    head = head.eval().requires_grad_(requires_grad=False)
    return Pair(model, head, copy.deepcopy(head).double())


class Session(TokenSession):
    """A drafter, and requests whose target is the plain model: every commit has true features.

    Slots nobody wrote to hold NaN, so that reading one of them shows.
    """

    drafter: EagleDrafter

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        pool = KVPool(1, SLOTS, KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
        pool.keys.fill_(torch.nan)
        pool.values.fill_(torch.nan)
        super().__init__(EagleDrafter(pair.head, TorchPagedAttention(pool)), SLOTS)

    def start(
        self, prompt: Sequence[int], first: int, plan: Plan, *, observe: bool = True, **how: Any
    ) -> Request:
        """See :meth:`TokenSession.start`; unless told not to, the drafter observes the prompt."""
        request = super().start(prompt, first, plan, **how)
        if observe:
            self.drafter.observe(request, self.pair.features(prompt))
        return request

    def commit(self, request: Request, tokens: Sequence[int], nodes: Sequence[int]) -> None:
        """See :meth:`TokenSession.commit`."""
        features = self.pair.features(text_of(request) + list(tokens[:-1]))
        super().commit(request, tokens, nodes)
        self.drafter.observe(request, features[-(len(nodes) + 1) :])
