"""Whose turn it is: one thread at a time, in the order in which they asked."""

from collections import deque
from threading import Lock, get_ident
from types import TracebackType


class Turns:
    """A fair lock that the thread which holds it may take again.

    A plain lock goes to whoever is awake, and a thread that gives it back and takes it again in a
    loop is always awake: others would wait until its loop ends.
    """

    def __init__(self) -> None:
        """Begin with nobody's turn."""
        self._guard = Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[Lock, int]] = deque()

    def __enter__(self) -> None:
        """Wait for a turn."""
        own = get_ident()
        if self._owner == own:
            self._depth += 1
            return
        gate = Lock()
        gate.acquire()
        with self._guard:
            if self._owner is None:
                self._owner, self._depth = own, 1
                return
            self._waiting.append((gate, own))
        try:
            gate.acquire()
        except BaseException:  # an interrupt: the turn goes to the next
            self._give_up((gate, own))
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """See :meth:`leave`."""
        self.leave()

    def leave(self) -> None:
        """End the turn; whoever has waited longest is next."""
        self._depth -= 1
        if self._depth == 0:
            with self._guard:
                self._pass_on()

    def try_enter(self) -> bool:
        """Take a turn unless somebody has one, the caller included; return whether it was taken.

        Never waits, so that it may be called in the midst of anything.
        """
        if not self._guard.acquire(blocking=False):
            return False
        try:
            if self._owner is not None:
                return False
            self._owner, self._depth = get_ident(), 1
            return True
        finally:
            self._guard.release()

    def _pass_on(self) -> None:
        self._owner = None
        if self._waiting:
            gate, self._owner = self._waiting.popleft()
            self._depth = 1
            gate.release()

    def _give_up(self, place: tuple[Lock, int]) -> None:
        with self._guard:
            if place in self._waiting:
                self._waiting.remove(place)
            else:  # the turn came at the moment of the interrupt
                self._pass_on()
