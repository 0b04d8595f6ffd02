"""Prompts of given lengths for measurements."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.questions import evenly
from eaglegbv.llm import LLM


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Prompts of any length, made of questions.

    Attributes:
        questions: Token ids as the model reads them, including the chat template.
    """

    questions: Sequence[Sequence[int]]

    @classmethod
    def of(cls, llm: LLM, texts: Sequence[str]) -> Self:
        """Encode user messages."""
        if not texts:
            raise InvalidArgument("questions", 0, "at least one question")
        return cls([llm.encode([{"role": "user", "content": text}]) for text in texts])

    def take(self, count: int, length: int) -> list[list[int]]:
        """Return ``count`` prompts: different questions, or ``length`` tokens of several questions.

        The questions are spread evenly over the file, and so over its categories.

        Args:
            count: Number of prompts.
            length: Tokens of each prompt; 0 for the questions as they are.
        """
        total = len(self.questions)
        places = evenly(count, total) if count < total else range(count)
        return [self._prompt(place, length) for place in places]

    def _prompt(self, first: int, length: int) -> list[int]:
        if not length:
            return list(self.questions[first % len(self.questions)])
        tokens: list[int] = []
        while len(tokens) < length:
            # The last question stays whole, so that the model has something to answer.
            tokens = [*self.questions[first % len(self.questions)], *tokens]
            first += 1
        return tokens[-length:]
