"""What it costs a drafter to read positions that it missed."""

from collections import deque
from dataclasses import dataclass, field

_ROWS = 32
"""Rows that must be read at once to say something about the cost of a row."""

_READINGS, _FEW_READINGS = 5, 2
"""Number of latest readings kept, and least number needed for an estimate."""


@dataclass(slots=True)
class ReadingCost:
    """Time a drafter takes to read a position that it missed.

    Attributes:
        latest: Seconds per position of the latest readings of many positions at once.
    """

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_READINGS))

    @property
    def seconds(self) -> float:
        """Seconds per position; 0 while too little is known.

        This is the least of the latest readings. Positions that seem too expensive are not read, so
        an estimate raised by a single slow reading could never fall again.
        """
        return min(self.latest) if len(self.latest) >= _FEW_READINGS else 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from ``rows`` read in ``seconds``; readings of few rows are ignored."""
        if rows < _ROWS:
            return
        self.latest.append(seconds / rows)
