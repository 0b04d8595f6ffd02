"""Drafters by name: those that need no files, and your own (see docs/add_a_drafter.md).

``LLM(drafter=...)`` and ``--drafter`` look a name up here first; other names are those of folders
and of repositories of the hub.
"""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import torch

from eaglegbv.drafters.base import Drafter
from eaglegbv.drafters.ngram import NgramDrafter
from eaglegbv.errors import InvalidArgument, one_of

MakeDrafter: TypeAlias = Callable[[int, torch.device], Drafter]
"""A drafter's class, or a function; takes the target's number of tokens, and its device."""

Made = TypeVar("Made", bound=MakeDrafter)

_MAKERS: dict[str, MakeDrafter] = {"ngram": lambda vocab_size, device: NgramDrafter()}  # noqa: ARG005


def register_drafter(name: str) -> Callable[[Made], Made]:
    """Return a decorator that gives a drafter its name.

    Raises:
        InvalidArgument: The name is taken.
    """
    if name in _MAKERS:
        raise InvalidArgument("name", name, f"a new one, not {one_of(_MAKERS)}")

    def register(make: Made) -> Made:
        _MAKERS[name] = make
        return make

    return register


def drafter_names() -> tuple[str, ...]:
    """Return the names of all drafters that are registered."""
    return tuple(_MAKERS)


def make_drafter(name: str, vocab_size: int, device: torch.device) -> Drafter:
    """Make the drafter of that name.

    Raises:
        InvalidArgument: There is none.
    """
    if name not in _MAKERS:
        raise InvalidArgument("drafter", name, one_of(_MAKERS, name))
    return _MAKERS[name](vocab_size, device)
