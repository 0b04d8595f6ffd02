"""SGLang's EAGLE draft worker with K sampled paths instead of the most likely tokens.

A round needs from the round before only the distribution at its root. A listener records the head's
logits there while SGLang runs the head over the accepted tokens. They are kept by the request's
slot in SGLang's pool, as SGLang keeps what it carries from round to round. Numbers that change from
round to round are in buffers at fixed addresses, so that the drafting loop can be captured as a
CUDA graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from torch import Tensor

from eaglegbv.backends.sglang.draft_replay import RoundStart
from eaglegbv.backends.sglang.settings import Settings
from eaglegbv.backends.sglang.tree_layout import (
    GrowingPaths,
    ShortProbs,
    draft_tree,
    sglang_tree,
)
from eaglegbv.backends.sglang.verify import RequestBook
from eaglegbv.errors import ModelNotSupported

Redraw = Callable[[ScheduleBatch, Tensor], bool]


@dataclass(frozen=True, slots=True)
class RoundInputs:
    """Inputs of one round of drafting, in buffers for ``rows`` requests.

    Attributes:
        uniforms: ``[rows, paths, length]`` float64.
        temperatures: ``[rows, 1]`` float32, temperatures of the draft distributions.
        greedy: ``[rows, 1]`` bool, whether the request is greedy: draft the most likely tokens.
    """

    uniforms: Tensor
    temperatures: Tensor
    greedy: Tensor

    @classmethod
    def allocate(cls, rows: int, *, paths: int, length: int, device: str) -> "RoundInputs":
        """Return buffers with values that suit captures before the first real round."""
        return cls(
            torch.zeros((rows, paths, length), dtype=torch.float64, device=device),
            torch.ones((rows, 1), device=device),
            torch.zeros((rows, 1), dtype=torch.bool, device=device),
        )

    def load(self, uniforms: Tensor, temperatures: Tensor, greedy: Tensor) -> None:
        """Write the numbers for a round's requests."""
        batch = len(uniforms)
        self.uniforms[:batch].copy_(uniforms, non_blocking=True)
        self.temperatures[:batch].copy_(temperatures)
        self.greedy[:batch].copy_(greedy)

    def choose(self, probs: ShortProbs, depth: int) -> Tensor:
        """Return each path's token ``[batch, paths]`` at ``depth``, 0 at the root's children."""
        batch, paths, width = probs.ids.shape
        drawn = probs.pick(self.uniforms[:batch, :, depth])
        # For greedy requests, paths start with different likely tokens, and continue with the best.
        every = torch.arange(paths, device=drawn.device)
        likely = probs.ids[:, every, every.clamp(max=width - 1) if depth == 0 else 0]
        return torch.where(self.greedy[:batch], likely, drawn)


class Listener:
    """Wraps a callable and keeps its last result."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.heard: Any = None

    def __call__(self, *arguments: object, **named: object) -> Any:
        """Call it, and keep the result as :attr:`heard`."""
        self.heard = self._call(*arguments, **named)
        return self.heard


class SampledDraftWorker(EagleDraftWorker):  # type: ignore[misc]
    """Drafts the trie of K paths drawn independently from the head's distributions; keeps these."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)
        if self.index_share_for_mtp_iteration or self.dsa_index_topk is not None:
            raise ModelNotSupported(
                "speculative_draft_model_path",
                self.server_args.speculative_draft_model_path,
                "an EAGLE head without a sparse-attention indexer",
            )
        self._forward = Listener(self.draft_runner.forward)
        self.draft_runner.forward = self._forward
        self._replay: Listener | None = None

    def configure(self, settings: Settings, book: RequestBook, redraw: Redraw) -> None:
        """Take the objects shared with the worker; call this before memory is allocated.

        Args:
            settings: Settings of the drafts.
            book: Source of the random numbers.
            redraw: Redraws tokens after prompts that must not be drawn from the target's
                distribution alone; returns whether it changed any of the token ids ``[batch]``, in
                place.
        """
        self._settings = settings
        self._book = book
        self._redraw = redraw

    def alloc_memory_pool(self, *arguments: object, **named: object) -> None:
        """Allocate SGLang's pools, and the buffers by request slot and by row."""
        super().alloc_memory_pool(*arguments, **named)
        slots = self.req_to_token_pool.req_to_token.shape[0]
        vocab = self.draft_runner.model_config.vocab_size
        if self.hot_token_id is not None:
            vocab = len(self.hot_token_id)
        width = min(self._settings.draft_width, vocab)
        self._root_probs = torch.zeros((slots, 2, width), dtype=torch.float64, device=self.device)
        # CUDA graphs are captured for at most this many rows, rounded up to a multiple of the
        # number of ranks, or of twice that number where two batches overlap.
        self._inputs = RoundInputs.allocate(
            slots + 2 * self.server_args.tp_size,
            paths=self.topk,
            length=self.speculative_num_steps,
            device=self.device,
        )

    def draft(self, batch: ScheduleBatch, *, with_topology: bool = False) -> EagleVerifyInput:
        """Draft a tree for each request.

        The verify input carries it as ``numbered``, and where its round started as ``start``.
        """
        if batch.forward_mode.is_idle():
            return super().draft(batch, with_topology=with_topology)
        K, L = self.topk, self.speculative_num_steps
        temperatures = self._temperatures(batch)
        greedy = (batch.sampling_info.top_ks == 1).view(-1, 1)
        self._inputs.load(self._book.draft_uniforms(batch.reqs), temperatures, greedy)
        roots = ShortProbs.unpack(self._root_probs[batch.req_pool_indices])
        draft_input: EagleDraftInput = batch.spec_info
        start = RoundStart(batch.seq_lens, draft_input.hidden_states, roots, temperatures)
        each = ShortProbs(
            *(table.unsqueeze(1).expand(-1, K, -1) for table in (roots.ids, roots.probs))
        )
        draft_input.topk_index = self._inputs.choose(each, 0)
        draft_input.topk_p = torch.ones_like(draft_input.topk_index, dtype=torch.float32)
        verify_input = super().draft(batch, with_topology=with_topology)
        tokens = verify_input.draft_token.view(-1, K * L + 1)
        verify_input.numbered = draft_tree(
            tokens[:, 0], tokens[:, 1:].view(-1, L, K), roots, verify_input.draft_probs
        )
        verify_input.start = start
        return verify_input

    def draft_forward(
        self, forward_batch: ForwardBatch
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Continue the paths from their first tokens.

        Returns:
            Parents, numbers and tokens as in :class:`SGLangTree`, and in place of SGLang's
            draft_probs the distributions after each path's tokens, packed:
            ``[batch, length - 1, paths, 2, width]`` float64.
        """
        spec_info: EagleDraftInput = forward_batch.spec_info
        if forward_batch.forward_mode.is_idle():
            return self._draft_forward_idle(forward_batch, spec_info)  # type: ignore[no-any-return]
        K, L, batch = self.topk, self.speculative_num_steps, forward_batch.batch_size
        slots = per_step_draft_out_cache_loc(forward_batch.out_cache_loc, batch, K, L)
        temperatures = self._inputs.temperatures[:batch].repeat_interleave(K, dim=0)
        hidden = spec_info.hidden_states.repeat_interleave(K, dim=0)
        paths = GrowingPaths(spec_info.topk_index)
        packed = []
        for step in range(L - 1):
            forward_batch.input_ids = paths.tokens[-1].flatten()
            forward_batch.out_cache_loc = slots[step].contiguous()
            spec_info.hidden_states = hidden
            context = ForwardContext(attn_backend=self.draft_attn_backend.attn_backends[step])
            with forward_context(context, forward_batch=forward_batch):
                output = self.draft_runner.forward(forward_batch).logits_output
            hidden = output.hidden_states
            forward_batch.positions.add_(1)
            if self.draft_runner.model_config.model_is_mrope:
                forward_batch.mrope_positions.add_(1)
            probs = self.short_probs(output.next_token_logits, temperatures)
            probs = probs.of_branches(paths.standing[-1])
            packed.append(probs.pack())
            paths.grow(self._inputs.choose(probs, step + 1))
        tree = sglang_tree(paths)
        none = self._root_probs.new_zeros((batch, 0, K, *self._root_probs.shape[1:]))
        probs_after = torch.stack(packed, dim=1) if packed else none
        return tree.parents, tree.numbers, tree.tokens, probs_after

    def short_probs(self, logits: Tensor, temperatures: Tensor) -> ShortProbs:
        """Turn the head's logits ``[rows, draft_vocab]`` into the distributions of the drafts."""
        width = self._root_probs.shape[-1]
        return ShortProbs.of_logits(logits, temperatures, width=width, target_ids=self.hot_token_id)

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
        self._keep_roots(batch, self._forward.heard.logits_output)
        return next_input

    def _draft_extend_for_decode(
        self, batch: ScheduleBatch, *arguments: object, **named: object
    ) -> None:
        self._forward.heard = None
        super()._draft_extend_for_decode(batch, *arguments, **named)
        if batch.forward_mode.is_idle():
            return
        if self._forward.heard is not None:
            self._keep_roots(batch, self._forward.heard.logits_output)
        elif self._replay is not None:
            self._keep_roots(batch, self._replay.heard)
        else:
            raise RuntimeError("the draft head ran in a way that this plug-in does not know")

    def _capture_cuda_graphs(self) -> None:
        super()._capture_cuda_graphs()
        runner = self.cuda_graph_runner_for_draft_extend
        if runner is not None:
            self._replay = Listener(runner.execute)
            runner.execute = self._replay

    def _keep_roots(self, batch: ScheduleBatch, output: Any) -> None:
        """Keep the distributions of the next round's roots; ``output`` has one row per request."""
        probs = self.short_probs(output.next_token_logits, self._temperatures(batch))
        self._root_probs[batch.req_pool_indices] = probs.pack()

    def _temperatures(self, batch: ScheduleBatch) -> Tensor:
        temperatures: Tensor = batch.sampling_info.temperatures
        return temperatures * self._settings.draft_temperature
