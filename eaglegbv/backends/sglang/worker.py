"""The worker that SGLang's scheduler calls: draft, verify, extend, as for EAGLE."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative import eagle_utils, eagle_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from torch import Tensor

from eaglegbv.backends.sglang.draft_replay import HeadReplay, RoundStart
from eaglegbv.backends.sglang.draft_worker import SampledDraftWorker
from eaglegbv.backends.sglang.settings import Settings
from eaglegbv.backends.sglang.tree_layout import draft_tree
from eaglegbv.backends.sglang.verify import (
    Acceptance,
    GraphJudge,
    RequestBook,
    Round,
    StatefulJudge,
    acceptance,
    keep_min_p,
    verifying,
)
from eaglegbv.config import Plan
from eaglegbv.cuda_graphs import CudaRecorder, Recorder
from eaglegbv.errors import ModelNotSupported
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import Verdict
from eaglegbv.verifiers.paths import draw
from eaglegbv.verifiers.registry import STATEFUL_VERIFIERS


class SampledTreeWorker(EAGLEWorkerV2):  # type: ignore[misc]
    """SGLang's EAGLE worker with sampled draft trees and a verifier of this project."""

    def __init__(self, *arguments: object, **named: object) -> None:
        eagle_worker_v2.EagleDraftWorker = SampledDraftWorker  # SGLang's worker creates one
        super().__init__(*arguments, **named)
        settings = Settings.from_environment(os.environ)
        stateful = settings.verifier in STATEFUL_VERIFIERS
        if stateful and self._draft_worker.draft_runner.use_mla_backend:
            raise ModelNotSupported(
                "speculative_draft_model_path",
                self.server_args.speculative_draft_model_path,
                f"a head without latent attention, for verifier {settings.verifier!r}",
            )
        self._plan = Plan(
            verifier=settings.verifier,
            paths=self.topk,
            depth=self.speculative_num_steps,
            draft_width=settings.draft_width,
            draft_temperature=settings.draft_temperature,
        )
        self._book = RequestBook(self._plan, settings.seed, replica=get_parallel().dp_rank)
        self._stateful = StatefulJudge(settings.verifier, self._book) if stateful else None
        self._draft_worker.configure(settings, self._book, self._redraw)
        runner = self.target_worker.model_runner
        # SGLang sizes its pools by the memory that is left after this.
        rows = 0 if stateful else self.server_args.max_running_requests
        shape = rows * (1 + self.topk * self.speculative_num_steps), runner.model_config.vocab_size
        self._probs = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self._first_tokens = FirstTokens(runner.sampler._sample_from_probs, self._book)
        runner.sampler._sample_from_probs = self._first_tokens

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
            accept = partial(self._graphs.accept, drafted.draft_token, drafted.draft_probs)
            own = Round(accept, self._graphs.space(len(batch.reqs)), batch.sampling_info)
        else:
            own = Round(partial(self._accept, batch, drafted), None, batch.sampling_info)
        with verifying(own):
            result = super().verify(batch, *arguments, **named)
        self._book.advance(batch.reqs)
        return result

    def _accept(self, batch: ScheduleBatch, drafted: Any, probs: Tensor) -> Acceptance:
        tokens = drafted.draft_token.view(probs.shape[:2])
        numbered = draft_tree(tokens, drafted.draft_probs, self.topk)
        target = TargetProbs.of_logits(probs.flatten(0, 1).log(), numbered.rows())
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
        assert self._stateful is not None
        replay = partial(HeadReplay, self._draft_worker, pool_indices, start)
        return self._stateful.judge(requests, tree, target, replay)

    def _forward_prefill_batch(
        self, batch: ScheduleBatch, *arguments: object, **named: object
    ) -> Any:
        self._first_tokens.requests = list(batch.reqs)
        try:
            result = super()._forward_prefill_batch(batch, *arguments, **named)
        finally:
            self._first_tokens.requests = None
        # A prompt read in parts yields its token with the last part.
        self._book.advance([r for r in batch.reqs if r is not batch.chunked_req])
        return result

    def _redraw(self, batch: ScheduleBatch, token_ids: Tensor) -> bool:
        """Redraw the tokens of retracted requests whose target is modified from what it is now.

        The target and the head have read their texts again, so the head can replay distributions.
        """
        rows = [
            row
            for row, own in enumerate(self._book.of(batch.reqs))
            if own.target_layers and batch.reqs[row] is not batch.chunked_req
        ]
        if not rows or self._first_tokens.probs is None:
            return False
        requests = [batch.reqs[row] for row in rows]
        logits = self._first_tokens.probs[rows].log()
        verdict = self._judge(
            requests,
            batch.req_pool_indices[rows],
            DraftTree.roots([r.output_ids[-1] for r in requests], device=logits.device),
            TargetProbs.of_logits(
                logits, torch.arange(len(rows), device=logits.device).unsqueeze(1)
            ),
            None,
        )
        token_ids[rows] = verdict.token_ids.to(token_ids.dtype)
        return True


# The token after a prompt, drawn from SGLang's distribution with the request's own random numbers,
# so that a seed determines the whole answer. After a retraction, the prompt is read again with what
# has been generated, and the token after it is drawn in the same way.


class FirstTokens:
    """Replaces a sampler's draw; for requests that are not ours, it draws as before.

    Attributes:
        requests: Those whose tokens are drawn now; None while other models sample.
        probs: ``[batch, vocab]``, from which the last tokens were drawn; None before the first.
    """

    def __init__(self, draw_as_before: Callable[..., Any], book: RequestBook) -> None:
        self._draw_as_before = draw_as_before
        self._book = book
        self.requests: Sequence[Req] | None = None
        self.probs: Tensor | None = None

    def __call__(
        self,
        probs: Tensor,
        sampling_info: SamplingBatchInfo,
        positions: Tensor,
        simple_sampling_case: bool,
    ) -> tuple[Tensor, Any]:
        """Return token ids ``[batch]``, and a record of sampling masks if one is wanted."""
        if self.requests is None or sampling_info.sampling_mask_batch_indices is not None:
            return cast(
                "tuple[Tensor, Any]",
                self._draw_as_before(probs, sampling_info, positions, simple_sampling_case),
            )
        uniforms = self._book.token_uniforms(self.requests).to(probs.device, non_blocking=True)
        self.probs = warped(probs, sampling_info)
        likely = self.probs.argmax(dim=1)
        drawn = draw(self.probs, uniforms)
        return torch.where(sampling_info.top_ks == 1, likely, drawn), None


def warped(probs: Tensor, sampling: SamplingBatchInfo) -> Tensor:
    """Apply the requests' top-k, top-p and min-p to ``[batch, vocab]``."""
    if sampling.need_top_k_sampling:
        probs = eagle_utils.top_k_renorm_prob(probs, sampling.top_ks)
    if sampling.need_top_p_sampling:
        probs = eagle_utils.top_p_renorm_prob(probs, sampling.top_ps)
    if sampling.need_min_p_sampling:
        probs = keep_min_p(probs, sampling.min_ps)
    return probs
