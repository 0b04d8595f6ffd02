"""The random numbers of SGLang's requests.

A request has one stream and one step counter for all its life, over retraction and whatever batch
it is in. Every rank of a tensor-parallel group sees the same requests in the same order, so all of
them draw the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from eaglegbv.uniforms import Purpose, Stream, request_seed
from eaglegbv.verifiers.base import VerifyUniforms

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass(slots=True)
class Progress:
    """A request's stream and how many of its steps have been taken."""

    stream: Stream
    step: int = 0


class Streams:
    """The streams of the requests alive; those that SGLang has dropped are forgotten with them."""

    def __init__(self, seed: int) -> None:
        """Take the seed of the requests that name none."""
        self._seed = seed
        self._seen = 0
        self._progress: WeakKeyDictionary[Req, Progress] = WeakKeyDictionary()

    def draft_uniforms(self, requests: Sequence["Req"], *, paths: int, length: int) -> Tensor:
        """Return ``[batch, paths, length]`` float64 in [0, 1), of the requests' current steps."""
        numbers = [
            torch.from_numpy(p.stream.draw(p.step, Purpose.DRAFT, paths * length))
            for p in self._all(requests)
        ]
        return torch.stack(numbers).view(len(requests), paths, length)

    def verify_uniforms(
        self, requests: Sequence["Req"], *, paths: int, length: int, device: torch.device
    ) -> VerifyUniforms:
        """Draw what the verification of the requests' current steps may use."""
        progress = self._all(requests)
        return VerifyUniforms.draw(
            [p.stream for p in progress],
            [p.step for p in progress],
            paths=paths,
            length=length,
            device=device,
        )

    def token_uniforms(self, requests: Sequence["Req"]) -> Tensor:
        """Return ``[batch]`` float64 in [0, 1): a token's, of the requests' current steps."""
        numbers = [
            float(p.stream.draw(p.step, Purpose.CORRECTION, 1)[0]) for p in self._all(requests)
        ]
        return torch.tensor(numbers, dtype=torch.float64)

    def advance(self, requests: Sequence["Req"]) -> None:
        """Go on to the next step; no number of this one is used again."""
        for progress in self._all(requests):
            progress.step += 1

    def _all(self, requests: Sequence["Req"]) -> list[Progress]:
        return [self._of(request) for request in requests]

    def _of(self, request: "Req") -> Progress:
        if request not in self._progress:
            seed = request.sampling_params.sampling_seed
            if seed is None:
                seed = request_seed(self._seed, self._seen)
                self._seen += 1
            self._progress[request] = Progress(Stream(seed % 2**64))
        return self._progress[request]
