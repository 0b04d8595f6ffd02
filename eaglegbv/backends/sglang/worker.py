"""The worker that SGLang's scheduler calls: draft, verify, extend, as for EAGLE.

The token after a prompt is drawn from SGLang's distribution with the request's own random numbers,
so that a seed determines the whole answer. After a retraction, the prompt is read again with what
has been generated, and the token after it is drawn in the same way.
"""

import os
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.sampler import create_sampler, register_sampler_backend
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.runtime_context import get_parallel, get_schedule
from sglang.srt.speculative import eagle_utils, eagle_worker_common, eagle_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from torch import Tensor

from eaglegbv.backends.sglang.book import RequestBook
from eaglegbv.backends.sglang.draft_worker import SampledDraftWorker
from eaglegbv.backends.sglang.modified_target import ModifiedTargets
from eaglegbv.backends.sglang.penalties import TokenCounts
from eaglegbv.backends.sglang.rounds import numbers_of
from eaglegbv.backends.sglang.sampler import SAMPLER, FirstTokenSampler
from eaglegbv.backends.sglang.settings import Settings
from eaglegbv.backends.sglang.states import Plans
from eaglegbv.backends.sglang.verify import Judge, TreeSampling
from eaglegbv.verifiers.registry import STATEFUL_VERIFIERS


class SampledTreeWorker(EAGLEWorkerV2):  # type: ignore[misc]
    """SGLang's EAGLE worker with sampled draft trees and a verifier of this project."""

    def __init__(self, *arguments: object, **named: object) -> None:
        eagle_worker_v2.EagleDraftWorker = SampledDraftWorker  # SGLang's worker creates one
        super().__init__(*arguments, **named)
        settings = Settings.from_environment(os.environ)
        plans = settings.served_plans(self.topk, self.speculative_num_steps)
        self.most = get_schedule().max_running_requests
        seed = self.target_worker.random_seed if settings.seed is None else settings.seed
        self._book = RequestBook(plans[0], seed, replica=get_parallel().dp_rank)
        self.drafter: SampledDraftWorker = self._draft_worker
        self.drafter.configure(plans[0], self._book, self._redraw)
        register_sampler_backend(SAMPLER, partial(FirstTokenSampler, self._book))
        self._sampler: FirstTokenSampler = create_sampler(SAMPLER)
        self.target_worker.model_runner.sampler = self._sampler
        vocab = self.target_worker.model_config.vocab_size
        counts = TokenCounts(vocab, self.device)
        original = eagle_worker_common.eagle_sample
        self._trees = TreeSampling(original, eagle_utils.verify_tree_greedy_func, counts)
        eagle_worker_common.eagle_sample = self._trees
        self._targets: ModifiedTargets | None = None
        rows = 0
        if plans[0].verifier in STATEFUL_VERIFIERS:
            self._targets = ModifiedTargets(plans[0].verifier, self.drafter, self._book)
        else:
            self.adaptive_controller = Plans(self, plans, settings.costs)
            rows = self.adaptive_controller.rows()
        # SGLang sizes its pools by the memory that is left after this.
        self.probs = torch.zeros((rows, vocab), dtype=torch.float32, device=self.device)

    def forward_batch_generation(
        self, batch: ScheduleBatch, *arguments: object, **named: object
    ) -> Any:
        """Run a prompt, or a round, whose plan may depend on whether a request has a seed."""
        if self._targets is None:
            seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
            self.adaptive_controller.seeded = any(seed is not None for seed in seeds)
        return super().forward_batch_generation(batch, *arguments, **named)

    def verify(self, batch: ScheduleBatch, *arguments: object, **named: object) -> Any:
        """Judge the trees of a round by the target's forward, and advance every row by a step."""
        idle = batch.forward_mode.is_idle()
        self._trees.judge = None if idle else self._judge(batch)
        result = super().verify(batch, *arguments, **named)
        if not idle:
            self._trees.counts.add(batch, result.next_token_ids, result.accept_lens)
            self._book.advance(batch.reqs)
        return result

    def _judge(self, batch: ScheduleBatch) -> Judge:
        if self._targets is not None:
            return self._targets.of(batch, batch.spec_info.start)
        state = self.adaptive_controller.now
        if not state.plan.speculative:  # nothing was drafted, so nothing was loaded
            numbers = self._book.uniforms(batch.reqs, numbers_of(state.plan))
            state.buffers.load(numbers, batch.sampling_info)
        return state.judge

    def _forward_prefill_batch(
        self, batch: ScheduleBatch, *arguments: object, **named: object
    ) -> Any:
        with self._sampler.drawing_first(batch.reqs):
            result = super()._forward_prefill_batch(batch, *arguments, **named)
        self._trees.counts.start(batch, result.next_token_ids)
        # A prompt read in parts yields its token with the last part.
        self._book.advance([r for r in batch.reqs if r is not batch.chunked_req])
        return result

    def _redraw(self, batch: ScheduleBatch, token_ids: Tensor) -> bool:
        """Redraw tokens after prompts, in place, where a target is modified; whether any was."""
        if self._targets is None:
            return False
        return self._targets.redraw(batch, self._sampler.probs, token_ids)
