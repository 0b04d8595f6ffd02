"""Our records of SGLang's living requests: random numbers, steps, modified-target state."""

from collections.abc import Callable, Sequence
from copy import copy
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from eaglegbv.backends.sglang.metrics import ours
from eaglegbv.config import Plan
from eaglegbv.request import Request
from eaglegbv.rng import Purpose, RequestRng, request_seed
from eaglegbv.sampling import SamplingParams

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class RequestBook:
    """A record of each request, for all its life, through retractions and in any batch.

    Every rank of a tensor-parallel group sees the same requests in the same order, so all ranks
    draw the same numbers. The record of a request that SGLang drops is dropped too.
    """

    def __init__(self, plan: Plan, seed: int, *, replica: int | None = None) -> None:
        """Start without records; ``seed`` is for requests without one, ``plan`` for all.

        ``replica`` is the number of the data-parallel replica, if there are several: each counts
        requests from 0, and copies of one prompt must not get the same numbers.
        """
        self._plan = plan
        self._seed = seed if replica is None else request_seed(seed, replica)
        self._numbers, self._unseeded = count(), count()
        self._records: WeakKeyDictionary[Req, Request] = WeakKeyDictionary()

    def of(self, requests: Sequence["Req"]) -> list[Request]:
        """Return the records of SGLang's requests, opened where there are none."""
        for request in requests:
            if request not in self._records:
                seed = request.sampling_params.sampling_seed
                if seed is None:
                    seed = request_seed(self._seed, next(self._unseeded))
                self._records[request] = Request(
                    number=next(self._numbers),
                    prompt_ids=tuple(request.origin_input_ids),
                    params=SamplingParams(),  # unused: SGLang's own apply
                    plan=self._plan,
                    rng=RequestRng(seed % 2**64),
                    max_tokens=2**31 - 1,
                )
        return [self._records[request] for request in requests]

    def uniforms(
        self, requests: Sequence["Req"], numbers: int, purpose: Purpose = Purpose.DRAFT
    ) -> Tensor:
        """Return ``[batch, numbers]`` float64 in [0, 1), for the requests' current steps.

        One draw yields all of a round, as a draw takes longer than its numbers.
        """
        records = self.of(requests)
        drawn = [record.rng.draw(record.step, purpose, numbers) for record in records]
        return torch.from_numpy(np.array(drawn))

    def advance(self, requests: Sequence["Req"]) -> None:
        """Move on to the next step, so that no number of this one is used again."""
        for record in self.of(requests):
            record.step += 1


def seed_copies(original: Callable[..., Any], manager: Any, tokenized: Any) -> Any:
    """Send one of the ``n`` copies of a request; each gets its own seed, from the request's.

    SGLang sends all copies with the same parameters, so their ``n`` counts those still to be sent.
    The last keeps the request's own seed.
    """
    shared = tokenized.sampling_params
    if ours() and shared.n > 1 and shared.sampling_seed is not None:
        tokenized.sampling_params = copy(shared)
        seed = request_seed(shared.sampling_seed % 2**64, shared.n)
        tokenized.sampling_params.sampling_seed = (seed + 2**63) % 2**64 - 2**63
        shared.n -= 1
    return original(manager, tokenized)
