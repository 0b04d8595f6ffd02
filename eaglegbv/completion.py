"""The answer to a prompt, complete or in pieces."""

from dataclasses import dataclass
from typing import Self

import msgspec

from eaglegbv.errors import EagleGBVError
from eaglegbv.request import FinishReason
from eaglegbv.request_metrics import RequestMetrics


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one prompt.

    Attributes:
        text: The text, cut before a stop string, without special tokens.
        token_ids: The tokens, including an end-of-sequence token.
        prompt_token_ids: The prompt as the model read it.
        finish_reason: ``stop`` (end of sequence or a stop string), ``length``, ``error``, or
            ``cancelled`` (a stream that was closed early).
        error: What went wrong, if the reason is ``error``.
        metrics: Counts and times.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    error: str | None
    metrics: RequestMetrics


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a streamed answer.

    Attributes:
        text: New text; may be empty while a character or a possible stop string is incomplete.
        token_ids: New tokens.
        completion: The complete answer, in the last piece only.
    """

    text: str
    token_ids: list[int]
    completion: Completion | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a prompt.

    Attributes:
        completion: The answer; if something went wrong, as far as it got.
        error: What went wrong, or None.
    """

    completion: Completion
    error: EagleGBVError | None = None

    @classmethod
    def of_error(cls, error: EagleGBVError) -> Self:
        """Return the result of a prompt that was never read."""
        nothing = Completion(
            text="",
            token_ids=[],
            prompt_token_ids=[],
            finish_reason=FinishReason.ERROR,
            error=str(error),
            metrics=RequestMetrics(),
        )
        return cls(nothing, error)
