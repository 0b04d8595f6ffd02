"""SGLang's EAGLE draft worker with trees of this project: of sampled paths, or EAGLE-2's if greedy.

A listener records the head's logits at the root of the next round, while SGLang runs the head over
the accepted tokens.

A modified target (:mod:`eaglegbv.verifiers.stateful`) needs the draft distributions of an earlier
round along tokens committed later. So that round's root, its head's hidden state there and the
settings of its distributions are kept, and the head runs on from there along the tokens, on its own
features, one row each. Its keys before the root are SGLang's, which are final once written. Those
from the root onwards are kept here, because SGLang's own have been rewritten from the target's
features.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunnerOutput
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eaglegbv.backends.sglang.settings import Settings
from eaglegbv.backends.sglang.tree_layout import Branches, RoundBuffers, ShortProbs
from eaglegbv.backends.sglang.verify import RequestBook
from eaglegbv.drafters.base import DraftReplay, own_snapshots
from eaglegbv.drafters.draft_probs import DraftProbs
from eaglegbv.errors import ModelNotSupported
from eaglegbv.request import DraftSnapshot, Request
from eaglegbv.verifiers.registry import STATEFUL_VERIFIERS

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


class SampledDraftWorker(EagleDraftWorker):  # type: ignore[misc]
    """Drafts trees and keeps the distributions they are drawn from."""

    buffers: RoundBuffers  # what the rounds read at fixed addresses; allocated with SGLang's pools

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)
        self._output: Any = None  # the head's last; SGLang picks the accepted rows in it afterwards
        self.draft_runner.forward = self._listening(self.draft_runner.forward)

    def _listening(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a forward of the head, or the replay of its graph, to keep its output."""

        def listening(*arguments: object, **named: object) -> Any:
            result = call(*arguments, **named)
            forward = isinstance(result, ModelRunnerOutput)
            self._output = result.logits_output if forward else result
            return result

        return listening

    def configure(
        self, settings: Settings, book: RequestBook, redraw: Callable[[ScheduleBatch, Tensor], bool]
    ) -> None:
        """Take what is shared with the worker; call this before memory is allocated.

        ``redraw`` redraws, in place, those of the token ids ``[batch]`` after prompts that must not
        be drawn from the target's distribution alone, and returns whether there were any.

        Raises:
            ModelNotSupported: The head has attention that is not served.
        """
        indexed = self.index_share_for_mtp_iteration or self.dsa_index_topk is not None
        stateful = settings.verifier in STATEFUL_VERIFIERS
        if indexed or (stateful and self.draft_runner.use_mla_backend):
            latent = f"latent attention, for verifier {settings.verifier!r}"
            what = "a sparse-attention indexer" if indexed else latent
            name = "speculative_draft_model_path"
            raise ModelNotSupported(name, getattr(self.server_args, name), f"a head without {what}")
        self._settings, self._book, self._redraw = settings, book, redraw

    def alloc_memory_pool(self, *arguments: object, **named: object) -> None:
        """Allocate SGLang's pools, and the buffers by request slot and by row."""
        super().alloc_memory_pool(*arguments, **named)
        slots, hot = self.req_to_token_pool.req_to_token.shape[0], self.hot_token_id
        vocab = self.draft_runner.model_config.vocab_size if hot is None else len(hot)
        # CUDA graphs are captured for at most this many rows, rounded up to a multiple of the
        # number of ranks, or of twice that number where two batches overlap.
        self.buffers = RoundBuffers(
            slots + 2 * self.server_args.tp_size,
            slots,
            self.topk,
            self.speculative_num_steps,
            min(max(self._settings.draft_width, self.topk), vocab),
            draft_temperature=self._settings.draft_temperature,
            target_ids=self.hot_token_id,
            device=self.device,
        )

    def draft(self, batch: ScheduleBatch, *, with_topology: bool = False) -> EagleVerifyInput:
        """Draft a tree for each request; its ``start`` says where the round started."""
        if batch.forward_mode.is_idle():
            return super().draft(batch, with_topology=with_topology)
        self.buffers.load(self._book.uniforms(batch.reqs), batch.sampling_info)
        lengths, hidden = batch.seq_lens, batch.spec_info.hidden_states
        verify_input = super().draft(batch, with_topology=with_topology)
        verify_input.start = RoundStart(lengths, hidden)
        return verify_input

    def draft_forward(
        self, forward_batch: ForwardBatch
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Grow the trees; SGLang need not carry their distributions to the verifier."""
        spec_info: EagleDraftInput = forward_batch.spec_info
        if forward_batch.forward_mode.is_idle():
            return self._draft_forward_idle(forward_batch, spec_info)  # type: ignore[no-any-return]
        K, L, batch = self.topk, self.speculative_num_steps, forward_batch.batch_size
        slots = per_step_draft_out_cache_loc(forward_batch.out_cache_loc, batch, K, L)
        levels = enumerate(slots.contiguous())
        hidden = spec_info.hidden_states.unsqueeze(1).expand(-1, K, -1)

        def head(branches: Branches) -> Tensor:
            nonlocal hidden
            forward_batch.input_ids = branches.tokens.flatten()
            step, forward_batch.out_cache_loc = next(levels)
            origins = branches.origins.unsqueeze(2).expand(-1, -1, hidden.shape[2])
            spec_info.hidden_states = hidden.gather(1, origins).flatten(0, 1)
            with head_context(self.draft_attn_backend.attn_backends[step], forward_batch):
                output = self.draft_runner.forward(forward_batch).logits_output
            hidden = output.hidden_states.view(batch, K, -1)
            forward_batch.positions.add_(1)
            if self.draft_runner.model_config.model_is_mrope:
                forward_batch.mrope_positions.add_(1)
            return output.next_token_logits  # type: ignore[no-any-return]

        return *self.buffers.grow(forward_batch.req_pool_indices[:batch], head), None

    def _draft_extend_for_prefill(
        self,
        batch: ScheduleBatch,
        target_hidden_states: Tensor,
        next_token_ids: Tensor,
        *arguments: object,
        **named: object,
    ) -> EagleDraftInput:
        extend = super()._draft_extend_for_prefill
        input_ids = batch.input_ids
        next_input = extend(batch, target_hidden_states, next_token_ids, *arguments, **named)
        if batch.forward_mode.is_idle():
            return next_input
        if self._redraw(batch, next_token_ids):
            # The head has read the token drawn first, so it runs again from the start.
            batch.input_ids = input_ids
            next_input = extend(batch, target_hidden_states, next_token_ids, *arguments, **named)
        self.buffers.keep_roots(batch.req_pool_indices, self._output.next_token_logits)
        return next_input

    def _draft_extend_for_decode(
        self, batch: ScheduleBatch, *arguments: object, **named: object
    ) -> None:
        self._output = None
        super()._draft_extend_for_decode(batch, *arguments, **named)
        if batch.forward_mode.is_idle():
            return
        if self._output is None:
            raise RuntimeError("the draft head ran in a way that this plug-in does not know")
        self.buffers.keep_roots(batch.req_pool_indices, self._output.next_token_logits)

    def _capture_cuda_graphs(self) -> None:
        super()._capture_cuda_graphs()
        if (runner := self.cuda_graph_runner_for_draft_extend) is not None:
            runner.execute = self._listening(runner.execute)


@dataclass(frozen=True, slots=True, eq=False)
class HeadSnapshot(DraftSnapshot):
    """A round's head after tokens that need not be those it drafted."""

    context: int  # entries of SGLang's KV cache to read: those before the round's root
    position: int  # of the next entry
    entries: Mapping[int, Entries]  # the head's own entries from the root onwards, by layer
    hidden: Tensor  # [hidden], its state
    probs: ShortProbs  # [width], the distribution of the next token
    temperature: Tensor  # [1], temperature of its distributions


@dataclass(frozen=True, slots=True)
class HeadReplay(DraftReplay):
    """Replays distributions for the requests of one batch."""

    worker: SampledDraftWorker  # runs the head
    pool_indices: Tensor  # [batch], the requests' slots in SGLang's pool
    start: RoundStart | None  # None if nothing was drafted
    requests: Sequence[Request]

    def snapshot(self, request: Request) -> HeadSnapshot:
        """See :meth:`DraftReplay.snapshot`."""
        if self.start is None:
            raise RuntimeError(f"request {request.number} has drafted nothing to be replayed")
        row, start = self.requests.index(request), self.start
        buffers = self.worker.buffers
        length = int(start.lengths[row])
        return HeadSnapshot(
            context=length,
            position=length,
            entries={},
            hidden=start.hidden[row].clone(),
            probs=ShortProbs.unpack(buffers.packed[row, 0].clone()),
            temperature=buffers.temperatures(len(start.hidden))[row].clone(),
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
        temperatures = torch.stack([s.temperature for s in own])
        probs = self.worker.buffers.short_probs(output.next_token_logits, temperatures)
        return [
            replace(
                snapshot,
                position=snapshot.position + 1,
                entries=attention.entries[i],
                hidden=output.hidden_states[i],
                probs=ShortProbs(probs.ids[i], probs.probs[i]),
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
        with head_context(attention, batch):
            return runner.model.forward(tokens, positions, batch)


class ReplayAttention(AttentionBackend):  # type: ignore[misc]
    """Attention of single rows over SGLang's entries and over the rows' own entries.

    Attributes:
        entries: Each row's own entries by layer, with those just written last.
    """

    def __init__(
        self, worker: SampledDraftWorker, pool_indices: Tensor, snapshots: Sequence[HeadSnapshot]
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
