"""SGLang's sampler, by which the token after a prompt comes from the request's own numbers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from eaglegbv.backends.sglang.book import RequestBook
from eaglegbv.backends.sglang.verify import keep, limits_of
from eaglegbv.devices import send
from eaglegbv.rng import Purpose
from eaglegbv.verifiers.paths import draw

SAMPLER = "eaglegbv"
"""The name by which SGLang makes our sampler."""


class FirstTokenSampler(Sampler):  # type: ignore[misc]
    """SGLang's sampler with draws of our own after prompts of requests of ours."""

    def __init__(self, book: RequestBook) -> None:
        super().__init__()
        self._book = book
        self._requests: Sequence[Req] | None = None  # those whose prompts are read now
        self.probs: Tensor | None = None
        """``[batch, vocab]``, what the latest were drawn from; None if all are greedy."""

    @contextmanager
    def drawing_first(self, requests: Sequence[Req]) -> Iterator[None]:
        """Draw the tokens after the prompts of ``requests`` by their numbers, within this."""
        self._requests, self.probs = list(requests), None
        try:
            yield
        finally:
            self._requests = None

    def _sample_from_probs(
        self,
        probs: Tensor,
        sampling_info: SamplingBatchInfo,
        positions: Tensor,
        simple_sampling_case: bool,
    ) -> tuple[Tensor, Any]:
        """Return token ids ``[batch]``, and no record of masks; where one is wanted, as before."""
        requests = self._requests
        if requests is None or sampling_info.sampling_mask_batch_indices is not None:
            drawn: tuple[Tensor, Any] = super()._sample_from_probs(
                probs, sampling_info, positions, simple_sampling_case
            )
            return drawn
        limits = limits_of(sampling_info)
        self.probs = probs = keep(probs, **limits) if limits else probs
        uniforms = self._book.uniforms(requests, 1, Purpose.CORRECTION)
        token_ids = draw(probs, send(uniforms.squeeze(1), probs.device))
        return torch.where(sampling_info.top_ks == 1, probs.argmax(dim=1), token_ids), None
