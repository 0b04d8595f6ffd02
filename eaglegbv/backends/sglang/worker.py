"""The worker that SGLang's scheduler calls: draft, verify, extend, as for EAGLE."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from torch import Tensor

from eaglegbv.backends.sglang.draft_worker import SampledDraftWorker
from eaglegbv.backends.sglang.first_tokens import FirstTokens, first_tokens_of
from eaglegbv.backends.sglang.judging import Acceptance, acceptance, target_dist, walk_greedily
from eaglegbv.backends.sglang.referees import DebtReferee, PlainReferee, Referee
from eaglegbv.backends.sglang.renormalisation import keep_min_p
from eaglegbv.backends.sglang.requests import RequestBook
from eaglegbv.backends.sglang.settings import Settings
from eaglegbv.backends.sglang.tree_kernels import judging
from eaglegbv.config import Plan
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.registry import make_any_verifier
from eaglegbv.verifiers.stateful import StatefulVerifier


class SampledTreeWorker(EAGLEWorkerV2):  # type: ignore[misc]
    """SGLang's EAGLE worker with sampled draft trees and a verifier of this project."""

    def __init__(self, *arguments: object, **named: object) -> None:
        with _draft_worker_class(SampledDraftWorker):
            super().__init__(*arguments, **named)
        settings = Settings.from_environment(os.environ)
        plan = Plan(
            verifier=settings.verifier,
            paths=self.topk,
            depth=self.speculative_num_steps,
            draft_width=settings.draft_width,
            draft_temperature=settings.draft_temperature,
        )
        self._book = RequestBook(plan, settings.seed, replica=get_parallel().dp_rank)
        self._referee = _referee(settings.verifier, self._book, self._draft_worker)
        self._draft_worker.configure(settings, self._book, self._redraw)
        sampler = self.target_worker.model_runner.sampler
        self._first_tokens = FirstTokens(sampler._sample_from_probs, self._book)
        sampler._sample_from_probs = self._first_tokens

    def verify(self, batch: ScheduleBatch, *arguments: object, **named: object) -> Any:
        """Judge the trees of a round by the target's forward, and advance every row by a step."""
        if batch.forward_mode.is_idle():
            return super().verify(batch, *arguments, **named)
        drafted = batch.spec_info

        def judge(target_probs: Tensor) -> Acceptance:
            return self._judge(batch, drafted, target_probs)

        with judging(judge):
            result = super().verify(batch, *arguments, **named)
        self._book.advance(batch.reqs)
        return result

    def _judge(self, batch: ScheduleBatch, drafted: Any, target_probs: Tensor) -> Acceptance:
        sampling, numbered = batch.sampling_info, drafted.numbered
        if sampling.need_min_p_sampling:
            edges = sampling.min_ps.repeat_interleave(target_probs.shape[1], dim=0)
            target_probs = keep_min_p(target_probs.flatten(0, 1), edges).view_as(target_probs)
        dist = target_dist(target_probs, numbered)
        verdict = self._referee.judge(
            batch.reqs, batch.req_pool_indices, numbered.tree, dist, drafted.start, _greedy(batch)
        )
        verdict = walk_greedily(numbered, dist, verdict, sampling.top_ks == 1)
        return acceptance(verdict, numbered)

    def _forward_prefill_batch(
        self, batch: ScheduleBatch, *arguments: object, **named: object
    ) -> Any:
        with first_tokens_of(list(batch.reqs)):
            result = super()._forward_prefill_batch(batch, *arguments, **named)
        # A prompt read in parts yields its token with the last part.
        self._book.advance([r for r in batch.reqs if r is not batch.chunked_req])
        return result

    def _redraw(self, batch: ScheduleBatch, token_ids: Tensor) -> bool:
        """Redraw the tokens of retracted requests with debts from the distributions that the debts leave.

        The target and the head have read their texts again, so the head can recall distributions.
        """
        requests = list(batch.reqs)
        rows = [r for r in self._referee.owing(requests) if requests[r] is not batch.chunked_req]
        if not rows or self._first_tokens.dists is None:
            return False
        owing = [requests[row] for row in rows]
        dist = self._first_tokens.dists[rows].log()
        at = torch.arange(len(rows), device=dist.device).unsqueeze(1)
        verdict = self._referee.judge(
            owing,
            batch.req_pool_indices[rows],
            DraftTree.roots([r.output_ids[-1] for r in owing], device=dist.device),
            TargetProbs.of_logits(dist, at),
            None,
            [False] * len(rows),
        )
        token_ids[rows] = verdict.token_ids.to(token_ids.dtype)
        return True


def _greedy(batch: ScheduleBatch) -> list[bool]:
    return [request.sampling_params.top_k == 1 for request in batch.reqs]


def _referee(name: str, book: RequestBook, draft_worker: SampledDraftWorker) -> Referee:
    verifier = make_any_verifier(name)
    if isinstance(verifier, StatefulVerifier):
        return DebtReferee(verifier, book, draft_worker)
    return PlainReferee(verifier, book)


@contextmanager
def _draft_worker_class(worker: type) -> Iterator[None]:
    """Let SGLang's worker create a draft worker of this class."""
    original = eagle_worker_v2.EagleDraftWorker
    eagle_worker_v2.EagleDraftWorker = worker
    try:
        yield
    finally:
        eagle_worker_v2.EagleDraftWorker = original
