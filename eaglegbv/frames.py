"""Room for the frames of Python functions, so that calls in a loop need not ask for it.

CPython keeps frames in sequence in chunks of 16 KiB. A call whose frame does not fit into the rest
of a chunk takes another chunk from the system, and gives it back when it returns. If a loop runs at
the end of a chunk, every call in it does so, which takes longer than most calls themselves:

    chunk   | callers ............ | loop |             call: map, run, unmap; call: map, run, ...

Whether this happens to a forward of a small model depends on how deep the stack of its callers is.
If so, it takes up to three quarters of the time. So a function that loops gets a frame too wide for
the chunk, and with it a separate chunk that has room for all its calls:

    chunk   | callers ............ |
    another | wide frame ............... | loop | call | ...
"""

from collections.abc import Callable
from functools import update_wrapper
from types import CodeType, FunctionType
from typing import ParamSpec, TypeVar

SLOTS = 1 << 14
"""Pointers by which a frame is widened: it then takes a chunk of 256 KiB, of which half is left."""

P = ParamSpec("P")
R = TypeVar("R")


def roomy(function: Callable[P, R]) -> Callable[P, R]:
    """Return a Python function that gives its callees a fresh chunk of the stack of frames.

    Call it once for much work: taking a chunk costs a few microseconds.
    """
    assert isinstance(function, FunctionType)  # a type checker does not know this
    code = function.__code__
    wide = with_code(function, code.replace(co_stacksize=code.co_stacksize + SLOTS))
    update_wrapper(wide, function)
    return wide


def with_code(function: FunctionType, code: CodeType) -> FunctionType:
    """Return a function that runs other code in place of ``function``, with the same defaults."""
    made = FunctionType(
        code,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
