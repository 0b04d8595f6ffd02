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
        said = self._counts[batch.req_pool_indices]
        ours = [[penalised(request)] for request in batch.reqs]  # others' counts are old
        said = said * upload(ours, dtype=torch.float32, device=logits.device)
        path, real = path_tokens(drafted)
        counts = said.unsqueeze(1).repeat(1, logits.shape[1], 1)
        counts.scatter_add_(2, path, real.to(counts))
        frequency = _column(batch.reqs, "frequency_penalty", logits).view(-1, 1, 1)
        presence = _column(batch.reqs, "presence_penalty", logits).view(-1, 1, 1)
        repetition = _column(batch.reqs, "repetition_penalty", logits).view(-1, 1, 1)
        logits.sub_(counts * frequency + (counts > 0) * presence)
        least = _column(batch.reqs, "min_new_tokens", logits)
        lengths = said.sum(dim=1, keepdim=True) + real.sum(dim=2)
        _forbid(logits, _stop_ids(batch.reqs, logits), lengths < least.unsqueeze(1))
        factors = torch.where(counts > 0, repetition, 1.0)
        logits.copy_(torch.where(logits < 0, logits * factors, logits / factors))


def penalised(request: "Req") -> bool:
    """Return whether a request has any penalty, or a least number of tokens."""
    params = request.sampling_params
    neutral = (params.frequency_penalty, params.presence_penalty, params.repetition_penalty)
    return params.min_new_tokens > 0 or neutral != (0.0, 0.0, 1.0)


def _column(requests: Sequence["Req"], name: str, like: Tensor) -> Tensor:
    """Return ``[batch]`` float32, a setting of each request."""
    values = [float(getattr(request.sampling_params, name)) for request in requests]
    return upload(values, dtype=torch.float32, device=like.device)


def _stop_ids(requests: Sequence["Req"], logits: Tensor) -> Tensor:
    """Return ``[batch, ids]`` int64, what ends each request, padded by the vocabulary's size."""
    vocab, stops = logits.shape[2], []
    for request in requests:
        ids = {*(request.sampling_params.stop_token_ids or ()), *(request.eos_token_ids or ())}
        if request.tokenizer is not None:
            ids |= {*(request.tokenizer.additional_stop_token_ids or ())}
            ids.add(request.tokenizer.eos_token_id)
        stops.append(sorted(ids - {None}))
    most = max(map(len, stops))
    padded = [ids + [vocab] * (most - len(ids)) for ids in stops]
    return upload(padded, dtype=torch.int64, device=logits.device).view(len(stops), most)


def _forbid(logits: Tensor, token_ids: Tensor, where: Tensor) -> None:
    """Forbid ``token_ids`` ``[batch, ids]`` at the nodes ``where`` ``[batch, nodes]``, in place."""
    vocab = logits.shape[2]
    stops = logits.new_zeros((len(logits), vocab + 1)).scatter_(1, token_ids, -torch.inf)
    stops = stops[:, :vocab]
    logits.add_(torch.where(where.unsqueeze(2), stops.unsqueeze(1), 0.0))


def path_tokens(drafted: Any) -> tuple[Tensor, Tensor]:
    """Return the tokens on the way from the root, excluded, to each node of SGLang's trees.

    ``[batch, nodes, length]`` int64, and which of them there are. SGLang links a node to its first
    child and each child to the next.
    """
    first, following = drafted.retrieve_next_token, drafted.retrieve_next_sibling
    batch, nodes = first.shape
    every = torch.arange(nodes, device=first.device).expand(batch, -1)

    def linked(links: Tensor, otherwise: Tensor) -> Tensor:
        """Return for each node the one whose link leads to it."""
        to = torch.where(links >= 0, links.long(), nodes)
        return pad(otherwise, (0, 1)).scatter(1, to, every)[:, :nodes]

    eldest = linked(following, every)
    for _ in range(nodes.bit_length()):
        eldest = eldest.gather(1, eldest)
    parents = linked(first, torch.zeros_like(every)).gather(1, eldest)
    tokens, node, path, real = drafted.draft_token.view(batch, nodes).long(), every, [], []
    for _ in range(drafted.max_tree_depth - 1):
        path.append(tokens.gather(1, node))
        real.append(node > 0)
        node = parents.gather(1, node) * (node > 0)
    if not path:
        return every.new_zeros((batch, nodes, 0)), every.new_zeros((batch, nodes, 0)) > 0
    return torch.stack(path, dim=2), torch.stack(real, dim=2)
