"""The worker that SGLang's scheduler drives: draft, verify, extend, as it does for EAGLE."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from torch import Tensor

from eaglegbv.backends.sglang.draft_worker import SampledDraftWorker
from eaglegbv.backends.sglang.first_tokens import FirstTokens, first_tokens_of
from eaglegbv.backends.sglang.judging import Acceptance, acceptance, target_law, walk_greedily
from eaglegbv.backends.sglang.renormalisation import keep_min_p
from eaglegbv.backends.sglang.settings import Settings
from eaglegbv.backends.sglang.streams import Streams
from eaglegbv.backends.sglang.topology import NumberedTree
from eaglegbv.backends.sglang.tree_kernels import judging
from eaglegbv.verifiers.registry import make_verifier


class SampledTreeWorker(EAGLEWorkerV2):  # type: ignore[misc]
    """SGLang's EAGLE worker with sampled draft trees and a verifier of this project."""

    def __init__(self, *arguments: object, **named: object) -> None:
        with _draft_worker_class(SampledDraftWorker):
            super().__init__(*arguments, **named)
        settings = Settings.from_environment(os.environ)
        self._streams = Streams(settings.seed)
        self._verifier = make_verifier(settings.verifier)
        self._draft_worker.configure(settings, self._streams)
        sampler = self.target_worker.model_runner.sampler
        sampler._sample_from_probs = FirstTokens(sampler._sample_from_probs, self._streams)

    def verify(self, batch: ScheduleBatch, *arguments: object, **named: object) -> Any:
        """Judge the trees of a round by the target's forward; every row moves on by a step."""
        if batch.forward_mode.is_idle():
            return super().verify(batch, *arguments, **named)
        numbered: NumberedTree = batch.spec_info.numbered

        def judge(target_probs: Tensor) -> Acceptance:
            return self._judge(batch, numbered, target_probs)

        with judging(judge):
            result = super().verify(batch, *arguments, **named)
        self._streams.advance(batch.reqs)
        return result

    def _judge(
        self, batch: ScheduleBatch, numbered: NumberedTree, target_probs: Tensor
    ) -> Acceptance:
        sampling, tree = batch.sampling_info, numbered.tree
        if sampling.need_min_p_sampling:
            edges = sampling.min_ps.repeat_interleave(tree.nodes, dim=0)
            target_probs = keep_min_p(target_probs.flatten(0, 1), edges).view_as(target_probs)
        law = target_law(target_probs, numbered)
        uniforms = self._streams.verify_uniforms(
            batch.reqs, paths=tree.paths, length=tree.length, device=law.logits.device
        )
        verdict = self._verifier.verify(tree, law, uniforms)
        verdict = walk_greedily(numbered, law, verdict, sampling.top_ks == 1)
        return acceptance(verdict, numbered)

    def _forward_prefill_batch(
        self, batch: ScheduleBatch, *arguments: object, **named: object
    ) -> Any:
        requests = list(batch.reqs)
        with first_tokens_of(requests):
            result = super()._forward_prefill_batch(batch, *arguments, **named)
        # A prompt read in parts yields its token with the last of them.
        self._streams.advance([r for r in requests if r is not batch.chunked_req])
        return result


@contextmanager
def _draft_worker_class(worker: type) -> Iterator[None]:
    """Have SGLang's worker create a draft worker of this class."""
    original = eagle_worker_v2.EagleDraftWorker
    eagle_worker_v2.EagleDraftWorker = worker
    try:
        yield
    finally:
        eagle_worker_v2.EagleDraftWorker = original
