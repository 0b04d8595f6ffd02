"""Our records of SGLang's requests: random numbers, steps, debts.

A request has one stream and one step counter for all its life, through retractions and in any
batch. Every rank of a tensor-parallel group sees the same requests in the same order, so all ranks
draw the same numbers.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from eaglegbv.config import Plan
from eaglegbv.request import Request
from eaglegbv.rng import Purpose, RequestRng, request_seed
from eaglegbv.sampling import SamplingParams

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class RequestBook:
    """Records of the living requests; the record of a request that SGLang drops is dropped too."""

    def __init__(self, plan: Plan, seed: int, *, replica: int | None = None) -> None:
        """Start without records.

        Args:
            plan: How all requests speculate.
            seed: Seed for the requests without a seed.
            replica: Number of the data-parallel replica that serves them, if there are several:
                each counts requests from 0, and copies of one prompt must not get the same numbers.
        """
        self._plan = plan
        self._seed = seed if replica is None else request_seed(seed, replica)
        self._seen = 0
        self._opened = 0
        self._records: WeakKeyDictionary[Req, Request] = WeakKeyDictionary()

    def of(self, requests: Sequence["Req"]) -> list[Request]:
        """Return the records of SGLang's requests."""
        return [self._of(request) for request in requests]

    def draft_uniforms(self, requests: Sequence["Req"]) -> Tensor:
        """Return ``[batch, paths, length]`` float64 in [0, 1), for the requests' current steps."""
        paths, length = self._plan.paths, self._plan.depth
        numbers = [
            torch.from_numpy(own.stream.draw(own.step, Purpose.DRAFT, paths * length))
            for own in self.of(requests)
        ]
        return torch.stack(numbers).view(len(requests), paths, length)

    def token_uniforms(self, requests: Sequence["Req"]) -> Tensor:
        """Return ``[batch]`` float64 in [0, 1), for one token at the requests' current steps."""
        numbers = [
            float(own.stream.draw(own.step, Purpose.CORRECTION, 1)[0]) for own in self.of(requests)
        ]
        return torch.tensor(numbers, dtype=torch.float64)

    def advance(self, requests: Sequence["Req"]) -> None:
        """Move on to the next step, so that no number of this one is used again."""
        for own in self.of(requests):
            own.step += 1

    def _of(self, request: "Req") -> Request:
        if request not in self._records:
            seed = request.sampling_params.sampling_seed
            if seed is None:
                seed = request_seed(self._seed, self._seen)
                self._seen += 1
            self._records[request] = Request(
                number=self._opened,
                prompt_ids=tuple(request.origin_input_ids),
                params=SamplingParams(),  # unused: SGLang's own apply
                plan=self._plan,
                stream=RequestRng(seed % 2**64),
                max_tokens=2**31 - 1,
            )
            self._opened += 1
        return self._records[request]
