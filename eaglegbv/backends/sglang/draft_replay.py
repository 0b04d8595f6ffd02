"""Draft distributions that an earlier round's head would have had after other tokens.

A modified target (:mod:`eaglegbv.verifiers.stateful`) needs the draft distributions of its own
round along tokens committed later. So the round's root, its head's hidden state there and the
settings of its distributions are kept, and the head runs on from there along the tokens, on its own
features, one row each. Its keys before the root are SGLang's, which are final once written. Those
from the root onwards are kept here, because SGLang's own have been rewritten from the target's
features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.eagle_info import EagleDraftInput
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eaglegbv.backends.sglang.tree_layout import ShortProbs
from eaglegbv.drafters.base import DraftReplay, own_snapshots
from eaglegbv.drafters.tree_growth import DraftProbs
from eaglegbv.request import DraftSnapshot, Request

if TYPE_CHECKING:
    from eaglegbv.backends.sglang.draft_worker import SampledDraftWorker


Entries = tuple[Tensor, Tensor]  # keys and values, `[entries, heads, dim]` each

_ASKED_FOR_BATCH = "forward_batch" in signature(forward_context).parameters  # not by 0.5.22


def head_context(attention: AttentionBackend, batch: ForwardBatch) -> Any:
    """Return the context of a forward of the head."""
    named = {"forward_batch": batch} if _ASKED_FOR_BATCH else {}
    return forward_context(ForwardContext(attn_backend=attention), **named)


@dataclass(frozen=True, slots=True)
class RoundStart:
    """Start of a round's drafting, one row per request."""

    lengths: Tensor  # [batch] int64, number of entries of the head's KV cache up to the root
    hidden: Tensor  # [batch, hidden], the head's state at the root
    packed: Tensor  # [batch, 2, width], the distributions at the root, packed


@dataclass(frozen=True, slots=True, eq=False)
class HeadSnapshot(DraftSnapshot):
    """A round's head after tokens that need not be those it drafted."""

    context: int  # entries of SGLang's KV cache to read: those before the round's root
    entries: Mapping[int, Entries]  # the head's own entries from the root onwards, by layer
    hidden: Tensor  # [hidden], its state
    probs: ShortProbs  # [width], the distribution of the next token
    temperature: Tensor  # [1], temperature of its distributions

    @property
    def position(self) -> int:
        """Position of the next entry."""
        own = next(iter(self.entries.values()), None)
        return self.context + (0 if own is None else len(own[0]))


class HeadReplay(DraftReplay):
    """Replays distributions for the requests of one batch."""

    def __init__(
        self,
        worker: "SampledDraftWorker",
        pool_indices: Tensor,
        start: RoundStart | None,
        requests: Sequence[Request],
    ) -> None:
        """Take a batch: its slots ``[batch]`` in SGLang's pool, and where its round started.

        ``start`` is None if nothing was drafted; ``worker`` runs the head.
        """
        self._worker = worker
        self._rows = {request.number: row for row, request in enumerate(requests)}
        self._pool_indices = pool_indices
        self._start = start

    def snapshot(self, request: Request) -> HeadSnapshot:
        """See :meth:`DraftReplay.snapshot`."""
        if self._start is None:
            raise RuntimeError(f"request {request.number} has drafted nothing to be replayed")
        row, start = self._rows[request.number], self._start
        return HeadSnapshot(
            context=int(start.lengths[row]),
            entries={},
            hidden=start.hidden[row].clone(),
            probs=ShortProbs.unpack(start.packed[row].clone()),
            temperature=self._worker.buffers.temperatures(len(start.hidden))[row].clone(),
        )

    def advance(
        self,
        requests: Sequence[Request],
        snapshots: Sequence[DraftSnapshot],
        tokens: Tensor,
        slots: Tensor,
    ) -> list[DraftSnapshot]:
        """Run one more row of the head for each request; see :meth:`DraftReplay.advance`."""
        del slots  # entries are few and short-lived, so they are kept outside the pool
        own = own_snapshots(snapshots, HeadSnapshot)
        rows = [self._rows[request.number] for request in requests]
        attention = ReplayAttention(self._worker, self._pool_indices[rows], own)
        output = self._run(attention, own, tokens)
        probs = self._worker.buffers.short_probs(
            output.next_token_logits, torch.stack([s.temperature for s in own])
        )
        return [
            replace(
                snapshot,
                entries=attention.entries_of(i),
                hidden=output.hidden_states[i],
                probs=ShortProbs(probs.ids[i], probs.probs[i]),
            )
            for i, snapshot in enumerate(own)
        ]

    def probs_at(self, snapshots: Sequence[DraftSnapshot]) -> DraftProbs:
        """See :meth:`DraftReplay.probs_at`."""
        own = [snapshot.probs for snapshot in own_snapshots(snapshots, HeadSnapshot)]
        return DraftProbs(torch.stack([p.ids for p in own]), torch.stack([p.probs for p in own]))

    def _run(
        self, attention: "ReplayAttention", snapshots: Sequence[HeadSnapshot], tokens: Tensor
    ) -> Any:
        runner = self._worker.draft_runner
        positions = torch.tensor([s.position for s in snapshots], device=tokens.device)
        last = CaptureHiddenMode.LAST
        hidden = torch.stack([s.hidden for s in snapshots])
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(snapshots),
            input_ids=tokens,
            req_pool_indices=attention.pool_indices,
            seq_lens=positions + 1,
            out_cache_loc=torch.zeros_like(tokens),
            seq_lens_sum=0,
            positions=positions,
            spec_algorithm=runner.spec_algorithm,
            spec_info=EagleDraftInput(hidden_states=hidden, capture_hidden_mode=last),
            capture_hidden_mode=last,
        )
        with head_context(attention, batch):
            return runner.model.forward(tokens, positions, batch)


class ReplayAttention(AttentionBackend):  # type: ignore[misc]
    """Attention of single rows over SGLang's entries and over the rows' own entries."""

    def __init__(
        self,
        worker: "SampledDraftWorker",
        pool_indices: Tensor,
        snapshots: Sequence[HeadSnapshot],
    ) -> None:
        """Look up the entries that each row reads."""
        super().__init__()
        self.token_to_kv_pool = worker.draft_runner.token_to_kv_pool
        self.pool_indices = pool_indices
        self._snapshots = snapshots
        device = pool_indices.device
        contexts = torch.tensor([s.context for s in snapshots], device=device).unsqueeze(1)
        longest = max(s.context for s in snapshots)
        table = worker.req_to_token_pool.req_to_token[pool_indices.long(), :longest]
        real = torch.arange(longest, device=device) < contexts
        self._slots = torch.where(real, table.long(), 0)
        counts = torch.tensor([s.position - s.context + 1 for s in snapshots], device=device)
        own = torch.arange(int(counts.max()), device=device) < counts.unsqueeze(1)
        self._mask = torch.cat((real, own), dim=1)
        self._new: dict[int, Entries] = {}

    def entries_of(self, row: int) -> dict[int, Entries]:
        """Return a row's own entries by layer, with the one just written last."""
        return {
            layer: (self._extended(row, layer, 0), self._extended(row, layer, 1))
            for layer in self._new
        }

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **others: object,
    ) -> Tensor:
        """Return ``[rows, heads * dim]``, without writing to SGLang's pool."""
        del forward_batch, save_kv_cache
        if others:
            raise NotImplementedError(f"attention with {', '.join(others)}")
        self._new[layer.layer_id] = (k, v)
        keys, values = (self._all(layer.layer_id, part) for part in range(2))
        query = q.view(len(q), keys.shape[2], -1, layer.qk_head_dim).float()
        scores = torch.einsum("rkgd,rskd->rkgs", query, keys) * layer.scaling
        if layer.logit_cap > 0:
            scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
        scores = scores.masked_fill(~self._mask[:, None, None], -torch.inf)
        out = torch.einsum("rkgs,rskd->rkgd", scores.softmax(dim=3), values)
        return out.flatten(1).to(q.dtype)

    def _all(self, layer: int, part: int) -> Tensor:
        """Return keys or values ``[rows, entries, heads, dim]``: SGLang's, then the rows' own."""
        pool = self.token_to_kv_pool
        buffer = pool.get_value_buffer(layer) if part else pool.get_key_buffer(layer)
        own = [self._extended(row, layer, part) for row in range(len(self._snapshots))]
        return torch.cat((buffer[self._slots], pad_sequence(own, batch_first=True)), 1).float()

    def _extended(self, row: int, layer: int, part: int) -> Tensor:
        new = self._new[layer][part][row : row + 1]
        before = self._snapshots[row].entries.get(layer)
        return new if before is None else torch.cat((before[part], new))
