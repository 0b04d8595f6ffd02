"""SGLang's sampler, by which the token after a prompt comes from the request's own numbers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
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


@dataclass(slots=True)
class FirstTokens:
    """The tokens after the prompts of a batch."""

    book: RequestBook
    requests: Sequence[Req]
    probs: Tensor | None = None  # [batch, vocab], those drawn from; None if all are greedy


_first: ContextVar[FirstTokens | None] = ContextVar("eaglegbv_first_tokens", default=None)


@contextmanager
def drawing_first(book: RequestBook, requests: Sequence[Req]) -> Iterator[FirstTokens]:
    """Draw the tokens after the prompts of ``requests`` by their numbers, within this context."""
    first = FirstTokens(book, list(requests))
    token = _first.set(first)
    try:
        yield first
    finally:
        _first.reset(token)


class FirstTokenSampler(Sampler):  # type: ignore[misc]
    """SGLang's sampler with draws of our own after prompts of requests of ours."""

    def _sample_from_probs(
        self,
        probs: Tensor,
        sampling_info: SamplingBatchInfo,
        positions: Tensor,
        simple_sampling_case: bool,
    ) -> tuple[Tensor, Any]:
        """Return token ids ``[batch]``, and no record of masks; where one is wanted, as before."""
        first = _first.get()
        if first is None or sampling_info.sampling_mask_batch_indices is not None:
            drawn: tuple[Tensor, Any] = super()._sample_from_probs(
                probs, sampling_info, positions, simple_sampling_case
            )
            return drawn
        limits = limits_of(sampling_info)
        first.probs = probs = keep(probs, **limits) if limits else probs
        uniforms = first.book.uniforms(first.requests, 1, Purpose.CORRECTION)
        token_ids = draw(probs, send(uniforms.squeeze(1), probs.device))
        return torch.where(sampling_info.top_ks == 1, probs.argmax(dim=1), token_ids), None
