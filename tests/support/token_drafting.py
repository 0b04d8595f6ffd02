"""Requests of drafters that read tokens alone, without an engine."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eaglegbv.attention.kv_cache import SlotAllocator
from eaglegbv.config import Plan
from eaglegbv.drafters.base import Drafter
from eaglegbv.request import Request
from eaglegbv.rng import RequestRng
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling, DraftTree


def random_llama(vocab: int, *, seed: int = 0, layers: int = 2) -> LlamaForCausalLM:
    """A random model whose distributions depend on the whole text, well spread."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=None,
        )
        return LlamaForCausalLM(config).eval()


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
            stream=RequestRng(seed),
            max_tokens=100,
        )
        request.slots = self.allocator.allocate(len(prompt))
        request.token_ids.append(first)
        request.step = 1
        return request

    def draft(self, requests: Sequence[Request], draft_sampling: DraftSampling) -> DraftTree:
        slots = [self.allocator.allocate(r.plan.tree_slots) for r in requests]
        self._tree_slots = {r.number: s for r, s in zip(requests, slots, strict=True)}
        return self.drafter.draft(
            requests, requests[0].plan, draft_sampling, [s[1:] for s in slots]
        )

    def commit(self, request: Request, tokens: Sequence[int], nodes: Sequence[int]) -> None:
        """Accept ``nodes`` with ``tokens`` but the last, which is the correction."""
        slots = self._tree_slots.pop(request.number)
        keep = torch.zeros(len(slots), dtype=torch.bool)
        keep[[0, *nodes]] = True
        request.slots = torch.cat((request.slots, slots[keep]))
        self.allocator.release(slots[~keep])
        request.token_ids += tokens
        request.step += 1
