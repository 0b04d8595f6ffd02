"""The worker that SGLang's scheduler calls: draft, verify, extend, as for EAGLE.

The token after a prompt is drawn from SGLang's distribution with the request's own random numbers,
so that a seed determines the whole answer. After a retraction, the prompt is read again with what
has been generated, and the token after it is drawn in the same way.
"""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from torch import Tensor

from eaglegbv.attention.kv_cache import SlotAllocator
from eaglegbv.backends.sglang.draft_worker import HeadReplay, RoundStart, SampledDraftWorker
from eaglegbv.backends.sglang.numbering import Acceptance, acceptance, draft_tree
from eaglegbv.backends.sglang.settings import Settings
from eaglegbv.backends.sglang.verify import (
    GraphJudge,
    RequestBook,
    Round,
    keep,
    verifying,
)
from eaglegbv.config import Plan
from eaglegbv.cuda_graphs import CudaRecorder, Recorder
from eaglegbv.devices import send
from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verification import replay_slots, verify_stateful
from eaglegbv.verifiers.base import Verdict
from eaglegbv.verifiers.paths import draw
from eaglegbv.verifiers.registry import STATEFUL_VERIFIERS


class SampledTreeWorker(EAGLEWorkerV2):  # type: ignore[misc]
    """SGLang's EAGLE worker with sampled draft trees and a verifier of this project."""

    def __init__(self, *arguments: object, **named: object) -> None:
        eagle_worker_v2.EagleDraftWorker = SampledDraftWorker  # SGLang's worker creates one
        super().__init__(*arguments, **named)
        settings = Settings.from_environment(os.environ)
        stateful = STATEFUL_VERIFIERS.get(settings.verifier)
        self._stateful = None if stateful is None else stateful()
        self._plan = Plan(
            verifier=settings.verifier,
            paths=self.topk,
            depth=self.speculative_num_steps,
            draft_width=settings.draft_width,
            draft_temperature=settings.draft_temperature,
        )
        self._book = RequestBook(self._plan, settings.seed, replica=get_parallel().dp_rank)
        self._draft_worker.configure(settings, self._book, self._redraw)
        runner = self.target_worker.model_runner
        # SGLang sizes its pools by the memory that is left after this.
        rows = 0 if self._stateful else self.server_args.max_running_requests
        shape = rows * (1 + self.topk * self.speculative_num_steps), runner.model_config.vocab_size
        self._probs = torch.zeros(shape, dtype=torch.float32, device=self.device)
        # The requests after whose prompts tokens are drawn now; None while other models sample.
        self._prefilled: Sequence[Req] | None = None
        self._first_probs: Tensor | None = None  # [batch, vocab], those last drawn from
        self._draw_as_before = runner.sampler._sample_from_probs
        runner.sampler._sample_from_probs = self._draw_first

    def init_cuda_graphs(self) -> None:
        """Capture SGLang's graphs, then those that judge rounds, or run them uncaptured."""
        super().init_cuda_graphs()
        if self._stateful is None:
            graphs = self.target_worker.model_runner.decode_cuda_graph_runner is not None
            recorder = CudaRecorder() if graphs and self._probs.is_cuda else Recorder()
            self._graphs = GraphJudge(self._plan, self._draft_worker.buffers, self._probs)
            self._graphs.record(recorder)

    def verify(self, batch: ScheduleBatch, *arguments: object, **named: object) -> Any:
        """Judge the trees of a round by the target's forward, and advance every row by a step."""
        if batch.forward_mode.is_idle():
            return super().verify(batch, *arguments, **named)
        drafted = batch.spec_info
        if self._stateful is None:
            accept = partial(self._graphs.accept, drafted.draft_token)
            judged = Round(accept, self._graphs.space(len(batch.reqs)), batch.sampling_info)
        else:
            judged = Round(partial(self._accept, batch, drafted), None, batch.sampling_info)
        with verifying(judged):
            result = super().verify(batch, *arguments, **named)
        self._book.advance(batch.reqs)
        return result

    def _accept(self, batch: ScheduleBatch, drafted: Any, probs: Tensor) -> Acceptance:
        """Judge a round by a verifier with modified-target state."""
        tokens = drafted.draft_token.view(probs.shape[:2])
        packed = self._draft_worker.buffers.packed[: len(tokens)]
        numbered = draft_tree(tokens, packed, self.topk)
        target = TargetProbs.of_logits(probs.flatten(0, 1).log(), numbered.rows)
        pool = batch.req_pool_indices
        verdict = self._judge(batch.reqs, pool, numbered.tree, target, drafted.start)
        return acceptance(verdict, numbered)

    def _judge(
        self,
        requests: Sequence[Req],
        pool_indices: Tensor,
        tree: DraftTree,
        target: TargetProbs,
        start: RoundStart | None,
    ) -> Verdict:
        """Judge trees; the verdict on a greedy request is neither used nor kept."""
        assert self._stateful is not None
        records = self._book.of(requests)
        for record, request in zip(records, requests, strict=True):
            record.token_ids = list(request.output_ids)
        replay = HeadReplay(self._draft_worker, pool_indices, start, records)
        # Replayed entries are outside SGLang's pool, so these slots are only counted, never used.
        slots = SlotAllocator(1 + len(records) * replay_slots(self._plan))
        verdict, layers, _ = verify_stateful(self._stateful, records, tree, target, replay, slots)
        for record, left, request in zip(records, layers, requests, strict=True):
            record.target_layers = () if request.sampling_params.top_k == 1 else left
        return verdict

    def _forward_prefill_batch(
        self, batch: ScheduleBatch, *arguments: object, **named: object
    ) -> Any:
        self._prefilled = list(batch.reqs)
        try:
            result = super()._forward_prefill_batch(batch, *arguments, **named)
        finally:
            self._prefilled = None
        # A prompt read in parts yields its token with the last part.
        self._book.advance([r for r in batch.reqs if r is not batch.chunked_req])
        return result

    def _redraw(self, batch: ScheduleBatch, token_ids: Tensor) -> bool:
        """Redraw the tokens of retracted requests whose target is modified from what it is now.

        The target and the head have read their texts again, so the head can replay distributions.
        """
        rows = [
            row
            for row, record in enumerate(self._book.of(batch.reqs))
            if record.target_layers and batch.reqs[row] is not batch.chunked_req
        ]
        if not rows or self._first_probs is None:
            return False
        requests = [batch.reqs[row] for row in rows]
        logits = self._first_probs[rows].log()
        roots = DraftTree.roots([r.output_ids[-1] for r in requests], device=logits.device)
        nodes = torch.arange(len(rows), device=logits.device).unsqueeze(1)
        target = TargetProbs.of_logits(logits, nodes)
        verdict = self._judge(requests, batch.req_pool_indices[rows], roots, target, None)
        token_ids[rows] = verdict.token_ids.to(token_ids.dtype)
        return True

    def _draw_first(
        self,
        probs: Tensor,
        sampling_info: SamplingBatchInfo,
        positions: Tensor,
        simple_sampling_case: bool,
    ) -> tuple[Tensor, Any]:
        """Replace the sampler's draw; as it, return token ids ``[batch]``, and a record of masks.

        For requests that are not ours, or of which a record is wanted, it draws as before.
        """
        if self._prefilled is None or sampling_info.sampling_mask_batch_indices is not None:
            drawn: tuple[Tensor, Any] = self._draw_as_before(
                probs, sampling_info, positions, simple_sampling_case
            )
            return drawn
        limits = {
            name: getattr(sampling_info, f"{name}s")
            for name in ("top_k", "top_p", "min_p")
            if getattr(sampling_info, f"need_{name}_sampling")
        }
        self._first_probs = probs = keep(probs, **limits) if limits else probs
        uniforms = self._book.uniforms(self._prefilled, Purpose.CORRECTION)
        token_ids = draw(probs, send(uniforms.squeeze(1), probs.device))
        return torch.where(sampling_info.top_ks == 1, probs.argmax(dim=1), token_ids), None
