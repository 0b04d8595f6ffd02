"""An answer while it grows: tokens in, pieces of text out."""

from dataclasses import dataclass, field

from eaglegbv.completion import Completion, Delta
from eaglegbv.errors import EagleGBVError
from eaglegbv.request import Request
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

    def add(self, token_ids: list[int]) -> None:
        """Turn new tokens into text."""
        before = len(self.text.token_ids)
        new = self.text.feed(token_ids)
        self.pieces.append(Delta(text=new, token_ids=self.text.token_ids[before:]))

    def take(self) -> list[Delta]:
        """Return the new pieces."""
        taken, self.pieces = self.pieces, []
        return taken

    def completion(self) -> Completion:
        """Return the answer of a request that has ended.

        Raises:
            RuntimeError: It has not.
        """
        if self.request.finish_reason is None:
            raise RuntimeError(f"request {self.request.number} has not ended")
        return Completion(
            text=self.text.text,
            token_ids=list(self.request.token_ids),
            prompt_token_ids=list(self.request.prompt_ids),
            finish_reason=self.request.finish_reason,
            error=None,
            metrics=self.request.metrics,
        )

    def result(self) -> Completion | EagleGBVError:
        """Return the answer, or what went wrong."""
        error = self.request.error
        return error if isinstance(error, EagleGBVError) else self.completion()
