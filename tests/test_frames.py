"""Loops with room for the frames of what they call."""

import sys
from collections.abc import Callable

import pytest

from eaglegbv.frames import roomy

_CALLS, _DEPTHS = 500, 500
"""Calls of a loop, and the depths it is run at: every place within a chunk of 2048 pointers."""


def call(number: int) -> int:
    return number


def loop() -> None:
    for number in range(_CALLS):
        call(number)


def at_depth(depth: int, function: Callable[[], None]) -> None:
    if depth:
        at_depth(depth - 1, function)
    else:
        function()


def most_pages(function: Callable[[], None]) -> int:
    """Return for how many pages memory was asked, at the worst depth."""
    resource = pytest.importorskip("resource", reason="pages are counted on Unix")

    def pages(depth: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        at_depth(depth, function)
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    return max(pages(depth) for depth in range(_DEPTHS))


@pytest.mark.skipif(sys.platform != "linux", reason="memory that is given back at once: Linux")
def test_no_call_in_a_loop_asks_for_memory() -> None:
    if most_pages(loop) < _CALLS:
        pytest.skip("this interpreter keeps chunks, or has others")
    assert most_pages(roomy(loop)) < _CALLS / 4


def test_a_function_stays_what_it_is() -> None:
    more = 3

    def function(a: int, b: int = 2, *others: int, c: int = 4, **named: int) -> list[int]:
        """Say all."""
        return [a, b, *others, c, more, *named.values()]

    wide = roomy(function)
    for arguments, named in (((1,), {}), ((1, 5, 6), {"c": 7, "d": 8})):
        assert wide(*arguments, **named) == function(*arguments, **named)
    assert wide.__doc__ == "Say all."
    assert wide.__name__ == "function"
