"""The token after a prompt, drawn from SGLang's distribution with the request's own random numbers.

So a seed determines the whole answer. After a retraction, the prompt is read again with what has
been generated, and the token after it is drawn in the same way.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative import eagle_utils
from torch import Tensor

from eaglegbv.backends.sglang.renormalisation import keep_min_p
from eaglegbv.backends.sglang.requests import RequestBook
from eaglegbv.verifiers.paths import draw

_requests: ContextVar[Sequence[Req] | None] = ContextVar("eaglegbv_first_tokens", default=None)


@contextmanager
def first_tokens_of(requests: Sequence[Req]) -> Iterator[None]:
    """Set the requests whose tokens the sampler draws within this context."""
    token = _requests.set(requests)
    try:
        yield
    finally:
        _requests.reset(token)


def warped(probs: Tensor, sampling: SamplingBatchInfo) -> Tensor:
    """Apply the requests' top-k, top-p and min-p to ``[batch, vocab]``."""
    if sampling.need_top_k_sampling:
        probs = eagle_utils.top_k_renorm_prob(probs, sampling.top_ks)
    if sampling.need_top_p_sampling:
        probs = eagle_utils.top_p_renorm_prob(probs, sampling.top_ps)
    if sampling.need_min_p_sampling:
        probs = keep_min_p(probs, sampling.min_ps)
    return probs


class FirstTokens:
    """Replaces a sampler's draw; for requests that are not ours, it draws as before.

    Attributes:
        dists: ``[batch, vocab]``, from which the last tokens were drawn; None before the first.
    """

    def __init__(self, draw_as_before: Callable[..., Any], book: RequestBook) -> None:
        self._draw_as_before = draw_as_before
        self._book = book
        self.dists: Tensor | None = None

    def __call__(
        self,
        probs: Tensor,
        sampling_info: SamplingBatchInfo,
        positions: Tensor,
        simple_sampling_case: bool,
    ) -> tuple[Tensor, Any]:
        """Return token ids ``[batch]``, and a record of sampling masks if one is wanted."""
        requests = _requests.get()
        if requests is None or sampling_info.sampling_mask_batch_indices is not None:
            return cast(
                "tuple[Tensor, Any]",
                self._draw_as_before(probs, sampling_info, positions, simple_sampling_case),
            )
        uniforms = self._book.token_uniforms(requests).to(probs.device, non_blocking=True)
        self.dists = warped(probs, sampling_info)
        likely = self.dists.argmax(dim=1)
        drawn = draw(self.dists.to(torch.float64), uniforms)
        return torch.where(sampling_info.top_ks == 1, likely, drawn), None
