"""The observers that receive the records of an engine's steps."""

import logging

from eaglegbv.engine_metrics import EngineMetrics
from eaglegbv.metrics import FAILED_OBSERVERS
from eaglegbv.step_record import StepObserver, StepRecord

_log = logging.getLogger(__name__)


class Observers:
    """The observers of an engine, in the order in which they were added."""

    def __init__(self, metrics: EngineMetrics) -> None:
        """Start with none.

        Args:
            metrics: Counts observers that raise an error.
        """
        self._metrics = metrics
        self._all: list[StepObserver] = []
        self._of_trees: list[StepObserver] = []

    @property
    def want_trees(self) -> bool:
        """Whether any observer asked for the records of draft trees."""
        return bool(self._of_trees)

    def add(self, observer: StepObserver, *, trees: bool) -> None:
        """Add an observer, which may also ask for the records of draft trees."""
        self._all.append(observer)
        if trees:
            self._of_trees.append(observer)

    def remove(self, observer: StepObserver) -> None:
        """Remove an observer; does nothing if it was not added."""
        for observers in (self._all, self._of_trees):
            if observer in observers:
                observers.remove(observer)

    def show(self, record: StepRecord) -> None:
        """Pass a step's record to all observers; one that raises is dropped, logged and counted."""
        for observer in tuple(self._all):
            try:
                observer.on_step(record)
            except Exception:  # noqa: BLE001  whatever the error is, no request is to blame
                _log.exception("an observer raised, and was dropped")
                self._metrics.add(FAILED_OBSERVERS)
                self.remove(observer)
