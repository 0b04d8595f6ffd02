"""One timed call of a way to generate, and the load it was timed at."""

import msgspec


class Cell(msgspec.Struct, frozen=True, order=True):
    """A load.

    Attributes:
        temperature: Of sampling.
        context: Tokens of each prompt; 0 for the questions as they are.
        batch: Prompts.
    """

    temperature: float
    context: int
    batch: int


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One call, prompts included.

    Attributes:
        way: Name.
        batch: Prompts.
        context: Tokens of each prompt; 0 for the questions as they are.
        temperature: Of sampling.
        repeat: Number of the repeat.
        tokens: Tokens generated.
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
        """The load it was measured at."""
        return Cell(self.temperature, self.context, self.batch)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds
