"""Requests of a drafter, without an engine."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaForCausalLM

from eaglegbv.attention.kv_cache import SlotAllocator
from eaglegbv.config import Plan
from eaglegbv.drafters.base import Drafter
from eaglegbv.drafters.tree_growth import DraftCall
from eaglegbv.request import Request
from eaglegbv.rng import RequestRng
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling, DraftTree
from support.tiny_models import random_llama as tiny_llama


def random_llama(vocab: int, *, seed: int = 0, layers: int = 2) -> LlamaForCausalLM:
    """A random model whose distributions depend on the whole text, well spread."""
    return tiny_llama(vocab, seed=seed, num_hidden_layers=layers, initializer_range=0.3)


def random_table(vocab: int, *, order: int = 1, seed: int = 0, scale: float = 1.5) -> Tensor:
    """Logits of every state, as a table takes them."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(((vocab + 1) ** order, vocab), generator=generator)


class TokenSession:
    """A drafter and requests whose text is committed by hand."""

    def __init__(self, drafter: Drafter, *, slots: int = 4096) -> None:
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
        request = Request(
            number=seed,
            prompt_ids=tuple(prompt),
            params=params or SamplingParams(),
            plan=plan,
            rng=RequestRng(seed),
            max_tokens=100,
        )
        request.slots = self.allocator.allocate(len(prompt))
        request.token_ids.append(first)
        request.step = 1
        return request

    def draft(self, requests: Sequence[Request], draft_sampling: DraftSampling) -> DraftTree:
        slots = [self.allocator.allocate(r.plan.tree_slots) for r in requests]
        self._tree_slots = {r.number: s for r, s in zip(requests, slots, strict=True)}
        free = [own[1:] for own in slots]
        return self.drafter.draft(DraftCall(requests, requests[0].plan, draft_sampling, free))

    def commit(self, request: Request, tokens: Sequence[int], nodes: Sequence[int]) -> None:
        """Accept ``nodes`` with ``tokens`` but the last, which is the correction."""
        slots = self._tree_slots.pop(request.number)
        keep = torch.zeros(len(slots), dtype=torch.bool)
        keep[[0, *nodes]] = True
        request.slots = torch.cat((request.slots, slots[keep]))
        self.allocator.release(slots[~keep])
        request.token_ids += tokens
        request.step += 1


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
    lengths = tree.path_lengths[b].tolist()
    accepted = min(accepted, max(lengths))
    path = next(k for k, length in enumerate(lengths) if length >= accepted)
    nodes = tree.path_nodes[b, path, :accepted].tolist()
    correction = (7 * request.step + 3) % vocab
    session.commit(request, [*tree.token_ids[b, nodes].tolist(), correction], nodes)
