"""Wall time of a step, by phase."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """The phases of a step's time."""

    PREFILL = "prefill"
    DRAFT = "draft"
    FORWARD = "forward"
    VERIFY = "verify"
    COMMIT = "commit"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time spent in one phase.

    Attributes:
        phase: The phase.
        start: Seconds since the stopwatch started.
        seconds: Duration.
    """

    phase: Phase
    start: float
    seconds: float


class Stopwatch:
    """Wall time of one step, by phase."""

    def __init__(self, barrier: Callable[[], None] | None = None) -> None:
        """Start the stopwatch.

        Args:
            barrier: Waits for the device at the end of every phase; by default nothing is waited
                for.
        """
        self._barrier = barrier
        self.started = time.perf_counter()
        self.spans: list[Span] = []

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Count the time within this context as ``phase``."""
        start = time.perf_counter()
        try:
            yield
            if self._barrier is not None:
                self._barrier()
        finally:
            seconds = time.perf_counter() - start
            self.spans.append(Span(phase, start - self.started, seconds))

    @property
    def seconds(self) -> dict[Phase, float]:
        """Seconds of each phase that occurred."""
        return seconds_by_phase(self.spans)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started


def seconds_by_phase(spans: Iterable[Span]) -> dict[Phase, float]:
    """Return the seconds of each phase that occurs in ``spans``."""
    totals: dict[Phase, float] = {}
    for span in spans:
        totals[span.phase] = totals.get(span.phase, 0.0) + span.seconds
    return totals
