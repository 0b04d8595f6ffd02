"""An answer while it grows: tokens in, pieces of text out."""

from dataclasses import dataclass, field

from eaglegbv.completion import Completion, Delta, Result
from eaglegbv.request import FinishReason, Request
from eaglegbv.text import TextStream


@dataclass(slots=True)
class Answer:
    """A request in the engine, its text so far, and the pieces nobody has taken yet.

    Attributes:
        request: In the engine.
        text: Its text.
        pieces: Those not taken yet, in order.
    """

    request: Request
    text: TextStream
    pieces: list[Delta] = field(default_factory=list)

    def follow(self) -> None:
        """Turn tokens that the request was given since into text."""
        before = self.kept
        new = self.request.token_ids[before:]
        if not new or self.text.stopped:
            return
        text = self.text.feed(new)
        self.pieces.append(Delta(text=text, token_ids=self.text.token_ids[before:]))

    @property
    def stops_here(self) -> bool:
        """Whether a stop string ends the text, and the engine has not been told yet."""
        told = self.request.finish_reason is FinishReason.STOP
        return self.text.stopped and not (told and self.kept == len(self.request.token_ids))

    @property
    def kept(self) -> int:
        """Tokens that were turned into text: up to the one that completes a stop string."""
        return len(self.text.token_ids)

    def take(self) -> list[Delta]:
        """Return the new pieces."""
        taken, self.pieces = self.pieces, []
        return taken

    def result(self) -> Result:
        """Return what came of a request that has ended.

        Raises:
            RuntimeError: It has not.
        """
        request = self.request
        if request.finish_reason is None:
            raise RuntimeError(f"request {request.number} has not ended")
        completion = Completion(
            text=self.text.text,
            token_ids=list(request.token_ids),
            prompt_token_ids=list(request.prompt_ids),
            finish_reason=request.finish_reason,
            error=None if request.error is None else str(request.error),
            metrics=request.metrics,
        )
        return Result(completion, request.error)
