"""Who receives the records of an engine's steps."""

import logging

from eaglegbv.engine_metrics import EngineMetrics
from eaglegbv.metrics import FAILED_OBSERVERS
from eaglegbv.step_record import StepObserver, StepRecord

_log = logging.getLogger(__name__)


class Observers:
    """The observers of an engine, in the order they came in."""

    def __init__(self, metrics: EngineMetrics) -> None:
        """Begin with none.

        Args:
            metrics: Counts those that raise.
        """
        self._metrics = metrics
        self._all: list[StepObserver] = []
        self._of_trees: list[StepObserver] = []

    @property
    def want_trees(self) -> bool:
        """Whether any of them asked for the records of draft trees."""
        return bool(self._of_trees)

    def add(self, observer: StepObserver, *, trees: bool) -> None:
        """Add an observer, which may ask for the records of draft trees too."""
        self._all.append(observer)
        if trees:
            self._of_trees.append(observer)

    def remove(self, observer: StepObserver) -> None:
        """Drop an observer; nothing happens if it is not among them."""
        for observers in (self._all, self._of_trees):
            if observer in observers:
                observers.remove(observer)

    def show(self, record: StepRecord) -> None:
        """Give all of them a step's record; one that raises is dropped, logged and counted."""
        for observer in tuple(self._all):
            try:
                observer.on_step(record)
            except Exception:  # noqa: BLE001  whatever it is, no request is to blame
                _log.exception("an observer raised, and was dropped")
                self._metrics.add(FAILED_OBSERVERS)
                self.remove(observer)
