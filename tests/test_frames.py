"""Loops with room for the frames of what they call."""

import sys
from types import FunctionType

import pytest

from eaglegbv.frames import roomy, with_code

_CALLS, _CHUNK = 500, 2048
"""Calls of a loop; and pointers of a chunk, at every one of which its frame is made to end."""


def call(number: int) -> int:
    return number


def loop() -> None:
    for number in range(_CALLS):
        call(number)


def most_pages(function: FunctionType) -> int:
    """Return for how many pages memory was asked, where its frame ends worst within a chunk."""
    resource = pytest.importorskip("resource", reason="pages are counted on Unix")
    code = function.__code__

    def pages(width: int) -> int:
        placed = with_code(function, code.replace(co_stacksize=code.co_stacksize + width))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        placed()
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    return max(pages(width) for width in range(_CHUNK))


@pytest.mark.skipif(sys.platform != "linux", reason="memory that is given back at once: Linux")
def test_no_call_in_a_loop_asks_for_memory() -> None:
    assert most_pages(loop) >= _CALLS  # else there is nothing to make room for
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
