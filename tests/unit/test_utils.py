"""Files are replaced whole, and threads take turns."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eaglegbv.utils import FairLock, replacing, write_whole

# Files are replaced whole, or stay as they were.


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_breaks_off_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, b"one")

    def break_off() -> None:
        with replacing(path) as partial:
            partial.write_bytes(b"tw")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert path.read_bytes() == b"one"
    write_whole(path, b"two")
    assert list(tmp_path.iterdir()) == [path]


# One thread at a time, in order; again by the same thread; never lost by an interrupt.


def waiting(turns: FairLock, count: int) -> None:
    """Return once as many threads wait."""
    while len(turns._waiting) < count:
        time.sleep(0.001)


def started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_turns_come_in_the_order_asked() -> None:
    turns, order = FairLock(), list[int]()

    def take(number: int) -> None:
        with turns:
            order.append(number)

    with turns:
        threads = []
        for number in range(5):
            threads.append(started(lambda number=number: take(number)))
            waiting(turns, number + 1)
    for thread in threads:
        thread.join()
    assert order == list(range(5))


def test_a_loop_does_not_keep_others_waiting() -> None:
    turns, done = FairLock(), threading.Event()

    def take() -> None:
        with turns:
            done.set()

    with turns:
        thread = started(take)
        waiting(turns, 1)
    with turns:
        assert done.is_set()
    thread.join()


def test_a_thread_may_take_its_turn_again() -> None:
    turns = FairLock()
    with turns, turns:
        assert not turns.try_enter()
    assert turns.try_enter()
    turns.leave()


def test_whoever_gives_up_waiting_is_passed_over() -> None:
    turns, order = FairLock(), list[str]()

    class Interrupted(BaseException):
        pass

    class Gate:
        """A lock whose second acquisition is interrupted."""

        def __init__(self) -> None:
            self.asked = 0

        def acquire(self) -> None:
            self.asked += 1
            if self.asked == 2:
                raise Interrupted

        def release(self) -> None:
            raise AssertionError("nobody waits here any more")

    def give_up() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("eaglegbv.utils.Lock", Gate)
            with pytest.raises(Interrupted), turns:
                pass
        order.append("gave up")

    with turns:
        started(give_up).join()
    with turns:
        order.append("next")
    assert order == ["gave up", "next"]
