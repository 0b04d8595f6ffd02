"""The worker that SGLang's scheduler calls: draft, verify, extend, as for EAGLE.

The token after a prompt is drawn from SGLang's distribution with the request's own random numbers,
so that a seed determines the whole answer. After a retraction, the prompt is read again with what
has been generated, and the token after it is drawn in the same way.
"""

import os
from typing import Any

import torch
from sglang.srt.layers.sampler import create_sampler, register_sampler_backend
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.runtime_context import get_parallel, get_schedule
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from torch import Tensor

from eaglegbv.backends.sglang.book import RequestBook
from eaglegbv.backends.sglang.draft_worker import SampledDraftWorker
from eaglegbv.backends.sglang.modified_target import ModifiedTargets
from eaglegbv.backends.sglang.penalties import TokenCounts
from eaglegbv.backends.sglang.sampler import (
    SAMPLER,
    FirstTokens,
    FirstTokenSampler,
    drawing_first,
)
from eaglegbv.backends.sglang.settings import Settings
from eaglegbv.backends.sglang.verify import GraphJudge, Judge, verifying
from eaglegbv.cuda_graphs import CudaRecorder, Recorder
from eaglegbv.verifiers.registry import STATEFUL_VERIFIERS


class SampledTreeWorker(EAGLEWorkerV2):  # type: ignore[misc]
    """SGLang's EAGLE worker with sampled draft trees and a verifier of this project."""

    def __init__(self, *arguments: object, **named: object) -> None:
        eagle_worker_v2.EagleDraftWorker = SampledDraftWorker  # SGLang's worker creates one
        super().__init__(*arguments, **named)
        settings = Settings.from_environment(os.environ)
        self._plan = settings.plan(self.topk, self.speculative_num_steps)
        seed = self.target_worker.random_seed if settings.seed is None else settings.seed
        self._book = RequestBook(self._plan, seed, replica=get_parallel().dp_rank)
        self._draft_worker.configure(self._plan, self._book, self._redraw)
        register_sampler_backend(SAMPLER, FirstTokenSampler)
        self.target_worker.model_runner.sampler = create_sampler(SAMPLER)
        self._first: FirstTokens | None = None  # those of the prompts that are read now
        self._targets: ModifiedTargets | None = None
        self._most = get_schedule().max_running_requests
        if self._plan.verifier in STATEFUL_VERIFIERS:
            self._targets = ModifiedTargets(self._plan.verifier, self._draft_worker, self._book)
        # SGLang sizes its pools by the memory that is left after this.
        rows = 0 if self._targets else self._most * (1 + self._plan.paths * self._plan.depth)
        vocab = self.target_worker.model_config.vocab_size
        self._probs = torch.zeros((rows, vocab), dtype=torch.float32, device=self.device)

    def init_cuda_graphs(self) -> None:
        """Capture SGLang's graphs, then those that judge rounds, or run them uncaptured."""
        super().init_cuda_graphs()
        slots, vocab = len(self.req_to_token_pool.req_to_token), self._probs.shape[1]
        self._counts = TokenCounts(slots, vocab, self.device)
        if self._targets is None:
            graphs = self.target_worker.model_runner.decode_cuda_graph_runner is not None
            recorder = CudaRecorder() if graphs and self._probs.is_cuda else Recorder()
            self._graphs = GraphJudge(self._draft_worker.buffers, self._probs, self._most)
            self._graphs.record(recorder)

    def verify(self, batch: ScheduleBatch, *arguments: object, **named: object) -> Any:
        """Judge the trees of a round by the target's forward, and advance every row by a step."""
        if batch.forward_mode.is_idle():
            return super().verify(batch, *arguments, **named)
        judge: Judge | None = None
        if self._targets is not None:
            judge = self._targets.judge(batch, batch.spec_info.start)
        with verifying(judge or self._graphs, self._counts):
            result = super().verify(batch, *arguments, **named)
        self._counts.add(batch, result.next_token_ids, result.accept_lens)
        self._book.advance(batch.reqs)
        return result

    def _forward_prefill_batch(
        self, batch: ScheduleBatch, *arguments: object, **named: object
    ) -> Any:
        with drawing_first(self._book, batch.reqs) as self._first:
            result = super()._forward_prefill_batch(batch, *arguments, **named)
        self._counts.start(batch, result.next_token_ids)
        # A prompt read in parts yields its token with the last part.
        self._book.advance([r for r in batch.reqs if r is not batch.chunked_req])
        return result

    def _redraw(self, batch: ScheduleBatch, token_ids: Tensor) -> bool:
        """Redraw tokens after prompts, in place, where a target is modified; whether any was."""
        if self._targets is None or self._first is None:
            return False
        return self._targets.redraw(batch, self._first.probs, token_ids)
