"""SGLang's EAGLE draft worker with trees of this project: of sampled paths, or EAGLE-2's if greedy.

A listener records the head's logits at the root of the next round, while SGLang runs the head over
the accepted tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunnerOutput
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from torch import Tensor

from eaglegbv.backends.sglang.book import RequestBook
from eaglegbv.backends.sglang.modified_target import RoundStart
from eaglegbv.backends.sglang.rounds import RoundBuffers, numbers_of
from eaglegbv.config import Plan
from eaglegbv.errors import ModelNotSupported
from eaglegbv.verifiers.registry import STATEFUL_VERIFIERS


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
        self,
        plan: Plan,
        book: RequestBook,
        redraw: Callable[[ScheduleBatch, Tensor], bool],
    ) -> None:
        """Take what is shared with the worker; call this before memory is allocated.

        ``redraw`` redraws, in place, those of the token ids ``[batch]`` after prompts that must not
        be drawn from the target's distribution alone, and returns whether there were any.

        Raises:
            ModelNotSupported: The head has attention that is not served.
        """
        indexed = self.index_share_for_mtp_iteration or self.dsa_index_topk is not None
        stateful = plan.verifier in STATEFUL_VERIFIERS
        if indexed or (stateful and self.draft_runner.use_mla_backend):
            latent = f"latent attention, for verifier {plan.verifier!r}"
            what = "a sparse-attention indexer" if indexed else latent
            name = "speculative_draft_model_path"
            raise ModelNotSupported(name, getattr(self.server_args, name), f"a head without {what}")
        self._plan, self._book, self._redraw = plan, book, redraw

    def alloc_memory_pool(self, *arguments: object, **named: object) -> None:
        """Allocate SGLang's pools, and the buffers by request slot and by row."""
        super().alloc_memory_pool(*arguments, **named)
        slots, ids = self.req_to_token_pool.req_to_token.shape[0], self.hot_token_id
        if ids is None:
            ids = torch.arange(self.draft_runner.model_config.vocab_size, device=self.device)
        # CUDA graphs are captured for at most this many rows, rounded up to a multiple of the
        # number of ranks, or of twice that number where two batches overlap.
        rows = slots + 2 * get_parallel().tp_size
        root_logits = torch.zeros((slots, len(ids)), device=self.device)
        self.buffers = RoundBuffers(self._plan, rows, root_logits, ids.long())

    def draft(self, batch: ScheduleBatch, *, with_topology: bool = False) -> EagleVerifyInput:
        """Draft a tree for each request; its ``start`` says where the round started."""
        if batch.forward_mode.is_idle():
            return super().draft(batch, with_topology=with_topology)
        numbers = self._book.uniforms(batch.reqs, numbers_of(self.buffers.plan))
        self.buffers.load(numbers, batch.sampling_info)
        start = RoundStart(batch.seq_lens, batch.spec_info.hidden_states)
        self._blank(batch.spec_info, self.topk)
        verify_input = super().draft(batch, with_topology=with_topology)
        verify_input.start = start
        return verify_input

    def _blank(self, draft_input: EagleDraftInput, width: int = 1) -> None:
        """Leave out SGLang's own choice at the roots, whose width would change with the plan."""
        shape = len(draft_input.hidden_states), width
        draft_input.topk_p = torch.zeros(shape, device=self.device)
        draft_input.topk_index = torch.zeros(shape, dtype=torch.int64, device=self.device)

    def _rebuild_topk1_chain_buffers(self) -> None:
        """SGLang's own chains are not drafted."""

    def draft_forward(
        self, forward_batch: ForwardBatch
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Grow the trees; SGLang need not carry their distributions to the verifier."""
        if forward_batch.forward_mode.is_idle():
            return super().draft_forward(forward_batch)  # type: ignore[no-any-return]
        spec_info: EagleDraftInput = forward_batch.spec_info
        K, L, batch = self.topk, self.speculative_num_steps, forward_batch.batch_size
        slots = per_step_draft_out_cache_loc(forward_batch.out_cache_loc, batch, K, L)
        levels = enumerate(slots.contiguous())
        hidden = spec_info.hidden_states.unsqueeze(1).expand(-1, K, -1)

        def head(tokens: Tensor, origins: Tensor) -> Tensor:
            nonlocal hidden
            forward_batch.input_ids = tokens.flatten()
            step, forward_batch.out_cache_loc = next(levels)
            rows = origins.unsqueeze(2).expand(-1, -1, hidden.shape[2])
            spec_info.hidden_states = hidden.gather(1, rows).flatten(0, 1)
            context = ForwardContext(attn_backend=self.draft_attn_backend.attn_backends[step])
            with forward_context(context, forward_batch=forward_batch):
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
        self._blank(next_input)
        return next_input

    def _draft_extend_for_decode(
        self, batch: ScheduleBatch, batch_result: Any, **named: object
    ) -> None:
        self._output = None
        super()._draft_extend_for_decode(batch, batch_result, **named)
        if batch.forward_mode.is_idle():
            return
        if self._output is None:
            raise RuntimeError("the draft head ran in a way that this plug-in does not know")
        self.buffers.keep_roots(batch.req_pool_indices, self._output.next_token_logits)
        self._blank(batch_result.next_draft_input)

    def _capture_cuda_graphs(self) -> None:
        super()._capture_cuda_graphs()
        if (runner := self.cuda_graph_runner_for_draft_extend) is not None:
            runner.execute = self._listening(runner.execute)
