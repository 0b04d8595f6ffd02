"""An LLM whose answers are streamed, so that the time to the first token is known."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from eaglegbv.completion import Completion, Delta
from eaglegbv.config import Plan
from eaglegbv.errors import EagleGBVError, InvalidArgument, StepFailed
from eaglegbv.params import SamplingParams
from eaglegbv.prompts import Prompt
from eaglegbv.stopwatch import Phase


class Streams(Protocol):
    """Streams answers, as :meth:`eaglegbv.llm.LLM.stream` does."""

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams, *, plan: Plan
    ) -> Iterator[Delta]:
        """Answer one prompt piece by piece."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """Returns whole answers, and records the time until the first tokens as prefill.

    Attributes:
        llm: A backend that answers but does not report its phases.
    """

    llm: Streams

    def __call__(
        self, prompts: list[dict[str, str]], sampling_params: SamplingParams, *, plan: Plan
    ) -> Completion:
        """Answer one conversation.

        Raises:
            EagleGBVError: The prompt is invalid, or the backend could not answer it.
        """
        start = time.perf_counter()
        prefill: float | None = None
        completion: Completion | None = None
        try:
            for piece in self.llm.stream(prompts, sampling_params, plan=plan):
                if prefill is None and piece.token_ids:
                    prefill = time.perf_counter() - start
                completion = piece.completion or completion
        except EagleGBVError:
            raise
        except ValueError as error:  # SGLang raises it for requests it does not accept
            raise InvalidArgument("prompt", f"{len(prompts)} messages", str(error)) from error
        if completion is None or completion.error is not None or prefill is None:
            cause = "no answer" if completion is None else completion.error or "no token"
            raise StepFailed(0, cause)
        completion.metrics.add_seconds(Phase.PREFILL, prefill)
        return completion
