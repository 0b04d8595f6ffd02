"""Rules that modify the target of later rounds (:mod:`eaglegbv.verifiers.stateful`).

They need the draft distributions of an earlier round along tokens committed later. So that round's
root, its head's hidden state there and the settings of its distributions are kept, and the head
runs on from there along the tokens, on its own features, one row each. Its keys before the root are
SGLang's, which are final once written. Those from the root onwards are kept here, because SGLang's
own have been rewritten from the target's features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.eagle_info import EagleDraftInput
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eaglegbv.attention.kv_cache import SlotAllocator
from eaglegbv.backends.sglang.book import RequestBook
from eaglegbv.backends.sglang.rounds import Acceptance, acceptance
from eaglegbv.drafters.base import DraftReplay, own_snapshots
from eaglegbv.drafters.draft_probs import DraftProbs, certain_where_broken, draft_probs
from eaglegbv.replay import replay_slots, verify_stateful
from eaglegbv.request import DraftSnapshot, Request
from eaglegbv.sampling import WarpSettings
from eaglegbv.tree import DraftTree, TargetProbs, WarpedLogits
from eaglegbv.verifiers.base import Verdict
from eaglegbv.verifiers.registry import STATEFUL_VERIFIERS

if TYPE_CHECKING:
    from eaglegbv.backends.sglang.draft_worker import SampledDraftWorker

Entries = tuple[Tensor, Tensor]  # keys and values, `[entries, heads, dim]` each


@dataclass(frozen=True, slots=True)
class RoundStart:
    """Start of a round's drafting, one row per request."""

    lengths: Tensor  # [batch] int64, number of entries of the head's KV cache up to the root
    hidden: Tensor  # [batch, hidden], the head's state at the root


class ModifiedTargets:
    """Judges rounds by such a rule, and keeps what they leave with the requests."""

    def __init__(self, verifier: str, drafter: "SampledDraftWorker", book: RequestBook) -> None:
        """Judge trees of ``drafter`` by the rule of this name."""
        self._verifier, self._drafter, self._book = STATEFUL_VERIFIERS[verifier](), drafter, book

    def of(self, batch: ScheduleBatch, start: RoundStart | None) -> Self:
        """Judge the round of a batch."""
        self._batch, self._start = batch, start
        return self

    def space(self, batch: int) -> Tensor:
        """See :class:`eaglegbv.backends.sglang.verify.Judge`."""
        nodes, config = self._drafter.buffers.tree.nodes, self._drafter.target_worker.model_config
        self._probs = torch.empty((batch, nodes, config.vocab_size), device=self._drafter.device)
        return self._probs

    def accept(self, batch: int) -> Acceptance:
        """See :class:`eaglegbv.backends.sglang.verify.Judge`."""
        tree = self._drafter.buffers.tree.mapped(lambda tensor: tensor[:batch])
        requests, indices = self._batch.reqs, self._batch.req_pool_indices
        verdict = self.verdict(requests, indices, tree, _target_of(self._probs), self._start)
        return acceptance(verdict, tree)

    def verdict(
        self,
        requests: Sequence[Req],
        pool_indices: Tensor,
        tree: DraftTree,
        target: TargetProbs,
        start: RoundStart | None,
    ) -> Verdict:
        """Judge trees; the verdict on a greedy request is neither used nor kept."""
        records = self._book.of(requests)
        for record, request in zip(records, requests, strict=True):
            record.token_ids = list(request.output_ids)
        replay = HeadReplay(self._drafter, pool_indices, start, records)
        # Replayed entries are outside SGLang's pool, so these slots are only counted, never used.
        slots = SlotAllocator(1 + len(records) * replay_slots(self._drafter.buffers.plan))
        verdict, layers, _ = verify_stateful(self._verifier, records, tree, target, replay, slots)
        for record, left, request in zip(records, layers, requests, strict=True):
            record.target_layers = () if request.sampling_params.top_k == 1 else left
        return verdict

    def redraw(self, batch: ScheduleBatch, probs: Tensor | None, token_ids: Tensor) -> bool:
        """Redraw the tokens of retracted requests whose target is modified from what it is now.

        The target and the head have read their texts again, so the head can replay distributions.
        ``probs`` ``[batch, vocab]`` are those from which ``token_ids`` ``[batch]`` were drawn, None
        if all were greedy. Returns whether there were such requests.
        """
        rows = [
            row
            for row, record in enumerate(self._book.of(batch.reqs))
            if record.target_layers and batch.reqs[row] is not batch.chunked_req
        ]
        if not rows or probs is None:
            return False
        requests = [batch.reqs[row] for row in rows]
        target = _target_of(probs[rows].unsqueeze(1))
        roots = DraftTree.roots([r.output_ids[-1] for r in requests], device=probs.device)
        verdict = self.verdict(requests, batch.req_pool_indices[rows], roots, target, None)
        token_ids[rows] = verdict.token_ids.to(token_ids.dtype)
        return True


def _target_of(probs: Tensor) -> TargetProbs:
    """Return distributions ``[batch, nodes, vocab]`` as verifiers take them."""
    batch, nodes, _ = probs.shape
    rows = torch.arange(batch * nodes, device=probs.device).view(batch, nodes)
    return WarpedLogits.of(probs.flatten(0, 1).log(), rows)


@dataclass(frozen=True, slots=True, eq=False)
class HeadSnapshot(DraftSnapshot):
    """A round's head after tokens that need not be those it drafted."""

    context: int  # entries of SGLang's KV cache to read: those before the round's root
    position: int  # of the next entry
    entries: Mapping[int, Entries]  # the head's own entries from the root onwards, by layer
    hidden: Tensor  # [hidden], its state
    probs: DraftProbs  # [width], the distribution of the next token
    temperature: Tensor  # [], temperature of its distributions


@dataclass(frozen=True, slots=True)
class HeadReplay(DraftReplay):
    """Replays distributions for the requests of one batch."""

    worker: "SampledDraftWorker"  # runs the head
    pool_indices: Tensor  # [batch], the requests' slots in SGLang's pool
    start: RoundStart | None  # None if nothing was drafted
    requests: Sequence[Request]

    def snapshot(self, request: Request) -> HeadSnapshot:
        """See :meth:`DraftReplay.snapshot`."""
        if self.start is None:
            raise RuntimeError(f"request {request.number} has drafted nothing to be replayed")
        row, start = self.requests.index(request), self.start
        buffers, tree = self.worker.buffers, self.worker.buffers.tree
        length = int(start.lengths[row])
        return HeadSnapshot(
            context=length,
            position=length,
            entries={},
            hidden=start.hidden[row].clone(),
            probs=DraftProbs(tree.draft_ids[row, 0].clone(), tree.draft_probs[row, 0].clone()),
            temperature=buffers.temperatures[row].clone(),
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
        pool_indices = self.pool_indices[[self.requests.index(request) for request in requests]]
        attention = ReplayAttention(self.worker, pool_indices, own)
        output = self._forward(attention, pool_indices, own, tokens)
        settings = WarpSettings(temperature=torch.stack([s.temperature for s in own]))
        buffers = self.worker.buffers
        probs = draft_probs(
            output.next_token_logits,
            settings,
            width=buffers.width,
            draft_to_target=buffers.draft_to_target,
        )
        certain_where_broken(probs.probs)
        return [
            replace(
                snapshot,
                position=snapshot.position + 1,
                entries=attention.entries[i],
                hidden=output.hidden_states[i],
                probs=DraftProbs(probs.ids[i], probs.probs[i]),
            )
            for i, snapshot in enumerate(own)
        ]

    def probs_at(self, snapshots: Sequence[DraftSnapshot]) -> DraftProbs:
        """See :meth:`DraftReplay.probs_at`."""
        own = [snapshot.probs for snapshot in own_snapshots(snapshots, HeadSnapshot)]
        return DraftProbs(torch.stack([p.ids for p in own]), torch.stack([p.probs for p in own]))

    def _forward(
        self,
        attention: "ReplayAttention",
        pool_indices: Tensor,
        snapshots: Sequence[HeadSnapshot],
        tokens: Tensor,
    ) -> Any:
        runner, last = self.worker.draft_runner, CaptureHiddenMode.LAST
        positions = torch.tensor([s.position for s in snapshots], device=tokens.device)
        hidden = torch.stack([s.hidden for s in snapshots])
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(snapshots),
            input_ids=tokens,
            req_pool_indices=pool_indices,
            seq_lens=positions + 1,
            out_cache_loc=torch.zeros_like(tokens),
            seq_lens_sum=0,
            positions=positions,
            spec_algorithm=runner.spec_algorithm,
            spec_info=EagleDraftInput(hidden_states=hidden, capture_hidden_mode=last),
            capture_hidden_mode=last,
        )
        with forward_context(ForwardContext(attn_backend=attention), forward_batch=batch):
            return runner.model.forward(tokens, positions, batch)


class ReplayAttention(AttentionBackend):  # type: ignore[misc]
    """Attention of single rows over SGLang's entries and over the rows' own entries.

    Attributes:
        entries: Each row's own entries by layer, with those just written last.
    """

    def __init__(
        self, worker: "SampledDraftWorker", pool_indices: Tensor, snapshots: Sequence[HeadSnapshot]
    ) -> None:
        """Look up the entries that each row reads."""
        super().__init__()
        self.token_to_kv_pool = worker.draft_runner.token_to_kv_pool
        self.entries = [dict(s.entries) for s in snapshots]
        device = pool_indices.device
        contexts = torch.tensor([[s.context] for s in snapshots], device=device)
        longest = max(s.context for s in snapshots)
        table = worker.req_to_token_pool.req_to_token[pool_indices.long(), :longest]
        real = torch.arange(longest, device=device) < contexts
        self._slots = torch.where(real, table.long(), 0)
        counts = torch.tensor([[s.position - s.context + 1] for s in snapshots], device=device)
        own = torch.arange(int(counts.max()), device=device) < counts
        self._mask = torch.cat((real, own), dim=1)

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
        number, pool = layer.layer_id, self.token_to_kv_pool
        for row, entries in enumerate(self.entries):
            before = entries.get(number, (k[:0], v[:0]))
            new = k[row : row + 1], v[row : row + 1]
            entries[number] = torch.cat((before[0], new[0])), torch.cat((before[1], new[1]))
        own = [entries[number] for entries in self.entries]
        keys = self._joined(pool.get_key_buffer(number), [key for key, _ in own])
        values = self._joined(pool.get_value_buffer(number), [value for _, value in own])
        query = q.view(len(q), keys.shape[2], -1, layer.qk_head_dim).float()
        scores = torch.einsum("rkgd,rskd->rkgs", query, keys) * layer.scaling
        if layer.logit_cap > 0:
            scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
        scores = scores.masked_fill(~self._mask[:, None, None], -torch.inf)
        out = torch.einsum("rkgs,rskd->rkgd", scores.softmax(dim=3), values)
        return out.flatten(1).to(q.dtype)

    def _joined(self, known: Tensor, own: list[Tensor]) -> Tensor:
        """Return ``[rows, entries, heads, dim]``: SGLang's, then the rows' own."""
        return torch.cat((known[self._slots], pad_sequence(own, batch_first=True)), 1).float()
