"""What it costs a drafter to read what it missed."""

from collections import deque
from dataclasses import dataclass, field

_ROWS = 32
"""Rows read at once that say something about what a row costs."""

_READINGS, _FEW_READINGS = 5, 2
"""Latest readings that are remembered, and number below which they say nothing."""


@dataclass(slots=True)
class ReadingCost:
    """What a drafter takes to read a position that it missed.

    Attributes:
        latest: Seconds of a position, at the latest times that many were read at once.
    """

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_READINGS))

    @property
    def seconds(self) -> float:
        """Seconds of a position; 0 while too little is known.

        The least: what is too dear is not read, so that a price could not fall which somebody's
        hiccup had raised.
        """
        return min(self.latest) if len(self.latest) >= _FEW_READINGS else 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from ``rows`` that were read in ``seconds``; few of them say nothing."""
        if rows < _ROWS:
            return
        self.latest.append(seconds / rows)
