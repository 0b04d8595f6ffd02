"""Penalties and minimum lengths that count every token before a node: the text's and the path's.

SGLang counts one token a verification, its last, and none along a path. Here counts are kept on the
device and grow with every round's verdict, so they are right also while rounds overlap, and texts
follow the distribution of plain decoding.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from eaglegbv.devices import upload

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


NAMES = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens")
"""SGLang's settings that go by counts."""


class TokenCounts:
    """How often each penalised request has had each token, by its slot in SGLang's pool."""

    def __init__(self, vocab: int, device: torch.device | str) -> None:
        """Count nothing yet; memory is taken when a request is first penalised."""
        self._vocab, self._device = vocab, device
        self._counts: Tensor | None = None

    def start(self, batch: Any, token_ids: Tensor) -> None:
        """Count the texts of requests whose prompts were read, and the tokens drawn ``[batch]``."""
        rows = [row for row, request in enumerate(batch.reqs) if penalised(request)]
        if not rows:
            return
        if self._counts is None:
            slots = len(batch.req_to_token_pool.req_to_token)
            self._counts = torch.zeros((slots, self._vocab), device=self._device)
        slots = batch.req_pool_indices[rows]
        # A request that was retracted has had tokens before.
        said = [upload(batch.reqs[row].output_ids, dtype=torch.int64) for row in rows]
        counts = torch.stack([text.bincount(minlength=self._vocab) for text in said])
        self._counts[slots] = counts.to(self._counts)
        ended = [float(batch.reqs[row] is not batch.chunked_req) for row in rows]
        drawn = upload(ended, dtype=torch.float32, device=self._device)
        self._counts.index_put_((slots, token_ids[rows].long()), drawn, accumulate=True)

    def add(self, batch: Any, token_ids: Tensor, lengths: Tensor) -> None:
        """Count what a round commits: the first ``lengths`` ``[batch]`` of each one's tokens."""
        if self._counts is None or batch.sampling_info.acc_additive_penalties is None:
            return
        tokens = token_ids.view(len(lengths), -1).long()
        committed = torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1)
        slots = batch.req_pool_indices.unsqueeze(1).expand_as(tokens)
        self._counts.index_put_((slots, tokens), committed.to(self._counts), accumulate=True)

    def apply(self, batch: Any, drafted: Any, logits: Tensor) -> None:
        """Penalise ``[batch, nodes, vocab]``, in place, as SGLang does without speculation."""
        if self._counts is None or batch.sampling_info.acc_additive_penalties is None:
            return
        said = self._counts[batch.req_pool_indices].unsqueeze(1)
        # Others' counts are old.
        ours = [[[penalised(request)]] for request in batch.reqs]
        said = said * upload(ours, dtype=torch.float32, device=logits.device)
        counts = said.repeat(1, logits.shape[1], 1)
        _count_paths(drafted, counts)
        named = [[float(getattr(r.sampling_params, name)) for name in NAMES] for r in batch.reqs]
        table = upload(named, dtype=torch.float32, device=logits.device)
        frequency, presence, repetition, least = table.view(-1, len(NAMES), 1, 1).unbind(1)
        logits.sub_(counts * frequency + (counts > 0) * presence)
        early = counts.sum(dim=2, keepdim=True) < least
        logits.masked_fill_(early & _stops(batch.reqs, logits), -torch.inf)
        factors = torch.where(counts > 0, repetition, 1.0)
        logits.copy_(torch.where(logits < 0, logits * factors, logits / factors))


def penalised(request: "Req") -> bool:
    """Return whether a request has any penalty, or a least number of tokens."""
    params = request.sampling_params
    neutral = (params.frequency_penalty, params.presence_penalty, params.repetition_penalty)
    return params.min_new_tokens > 0 or neutral != (0.0, 0.0, 1.0)


def _stops(requests: Sequence["Req"], logits: Tensor) -> Tensor:
    """Return ``[batch, 1, vocab]`` bool, the tokens that end each request."""
    places: list[tuple[int, int]] = []
    for row, request in enumerate(requests):
        ids = {*(request.sampling_params.stop_token_ids or ()), *(request.eos_token_ids or ())}
        if request.tokenizer is not None:
            ids |= {*(request.tokenizer.additional_stop_token_ids or ())}
            ids.add(request.tokenizer.eos_token_id)
        places += [(row, token) for token in ids - {None}]
    stops = torch.zeros_like(logits[:, :1], dtype=torch.bool)
    rows, token_ids = upload(places, dtype=torch.int64, device=logits.device).view(-1, 2).T
    stops[rows, 0, token_ids] = True
    return stops


def _count_paths(drafted: Any, counts: Tensor) -> None:
    """Add the tokens on the way from the root, excluded, to each node of SGLang's trees."""
    parents = parents_of(drafted.retrieve_next_token, drafted.retrieve_next_sibling)
    node = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    tokens = drafted.draft_token.view_as(parents).long()
    for _ in range(drafted.max_tree_depth - 1):
        drawn = (node > 0).to(counts)
        counts.scatter_add_(2, tokens.gather(1, node).unsqueeze(2), drawn.unsqueeze(2))
        node = parents.gather(1, node)


def parents_of(first_children: Tensor, siblings: Tensor) -> Tensor:
    """Return ``[batch, nodes]`` int64, the parents in SGLang's trees; the root's is the root.

    SGLang links a node to its first child and each child to the next.
    """
    batch, nodes = siblings.shape
    every = torch.arange(nodes, device=siblings.device).expand(batch, -1)

    def linked(links: Tensor, otherwise: Tensor) -> Tensor:
        """Return for each node the one whose link leads to it."""
        to = torch.where(links >= 0, links.long(), nodes)
        return pad(otherwise, (0, 1)).scatter(1, to, every)[:, :nodes]

    eldest = linked(siblings, every)
    for _ in range(nodes.bit_length()):
        eldest = eldest.gather(1, eldest)
    return linked(first_children, torch.zeros_like(every)).gather(1, eldest)
