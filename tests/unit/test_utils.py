import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from eaglegbv.utils import CACHE_FOLDER, FairLock, cache_folder, replacing, write_whole


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
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
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


# --- one thread at a time, in order; again by the same thread; never lost by an interrupt
def waiting(turns: FairLock, count: int) -> None:
    """Return once as many threads wait."""
    while len(turns._waiting) < count:
        time.sleep(0.001)


def started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_turns_come_in_the_order_asked_also_beside_a_loop():
    turns, order = FairLock(), list[int]()

    def take(number: int) -> None:
        with turns:
            order.append(number)

    with turns:
        threads = []
        for number in range(5):
            threads.append(started(lambda number=number: take(number)))
            waiting(turns, number + 1)
    with turns:  # asked again at once
        assert order == list(range(5))
    for thread in threads:
        thread.join()


def test_a_thread_may_take_its_turn_again():
    turns = FairLock()
    with turns, turns:
        assert not turns.try_enter()
    assert turns.try_enter()
    turns.leave()


def test_whoever_gives_up_waiting_is_passed_over():
    turns, order = FairLock(), list[str]()

    def give_up() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("eaglegbv.utils.Condition.wait_for", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt), turns:
                pass
        order.append("gave up")

    with turns:
        started(give_up).join()
    with turns:
        order.append("next")
    assert order == ["gave up", "next"]


def test_without_a_home_the_cache_is_missing_unless_it_is_named(tmp_path, monkeypatch):
    for name in (CACHE_FOLDER, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home")))
    with pytest.raises(FileNotFoundError, match=f"no home directory; {CACHE_FOLDER} names"):
        cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "eaglegbv"
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
