"""One timed call of a way to generate, and the load at which it was timed."""

import msgspec


class Cell(msgspec.Struct, frozen=True, order=True):
    """A load.

    Attributes:
        temperature: Sampling temperature.
        context: Tokens of each prompt; 0 for the questions as they are.
        batch: Number of prompts.
    """

    temperature: float
    context: int
    batch: int


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One timed call, prompts included.

    Attributes:
        way: Name of the way.
        batch: Number of prompts.
        context: Tokens of each prompt; 0 for the questions as they are.
        temperature: Sampling temperature.
        repeat: Number of the repeat.
        tokens: Number of tokens generated.
        seconds: Wall time.
        first: Number of the first prompt.
    """

    way: str
    batch: int
    context: int
    temperature: float
    repeat: int
    tokens: int
    seconds: float
    first: int = 0

    @property
    def cell(self) -> Cell:
        """The load at which it was measured."""
        return Cell(self.temperature, self.context, self.batch)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds
