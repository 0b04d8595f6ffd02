"""Room for the frames of Python functions, so that no call in a loop has to ask for it.

CPython keeps frames one behind another in chunks of 16 KiB. A call whose frame does not fit into
what is left of a chunk takes another from the system, and gives it back when it returns. Where a
loop runs at the end of a chunk every call in it does so, which takes longer than most calls:

    chunk   | callers ............ | loop |             call: map, run, unmap; call: map, run, ...

Whether that befalls a forward of a small model depends on how deep its caller's caller is, and then
takes up to three quarters of its time. So what loops is given a frame too wide for the chunk, and
with it a chunk of its own that has room for all its calls:

    chunk   | callers ............ |
    another | wide frame ............... | loop | call | ...
"""

from collections.abc import Callable
from functools import update_wrapper
from types import CodeType, FunctionType
from typing import ParamSpec, TypeVar

SLOTS = 1 << 14
"""Pointers by which a frame is wider: of a chunk of 256 KiB, as it then takes, half is left."""

P = ParamSpec("P")
R = TypeVar("R")


def roomy(function: Callable[P, R]) -> Callable[P, R]:
    """Return a Python function that gives what it calls a chunk of the stack of frames.

    To be called once for much work: to take a chunk costs some microseconds.
    """
    assert isinstance(function, FunctionType)  # as a type checker does not know
    code = function.__code__
    wide = with_code(function, code.replace(co_stacksize=code.co_stacksize + SLOTS))
    update_wrapper(wide, function)
    return wide


def with_code(function: FunctionType, code: CodeType) -> FunctionType:
    """Return a function that runs other code in the place of ``function``, defaults included."""
    made = FunctionType(
        code,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
