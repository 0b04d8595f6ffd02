"""Drafters by name: those that need no files, and your own (see docs/add_a_drafter.md).

``LLM(drafter=...)`` and ``--drafter`` look a name up here first; other names are those of folders
and of repositories of the hub.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from eaglegbv.drafters.base import Drafter
from eaglegbv.drafters.ngram import NgramDrafter
from eaglegbv.errors import InvalidArgument, one_of

OwnDrafter = TypeVar("OwnDrafter", bound=type[Drafter])
DRAFTERS: dict[str, type[Drafter]] = {"ngram": NgramDrafter}
"""The classes of all drafters that are registered, by their names."""


def register_drafter(name: str) -> Callable[[OwnDrafter], OwnDrafter]:
    """Return a decorator that gives a drafter's class its name.

    An instance is made with the target's number of tokens, and its device.

    Raises:
        InvalidArgument: The name is taken.
    """
    if name in DRAFTERS:
        raise InvalidArgument("name", name, f"a new one, not {one_of(DRAFTERS)}")

    def register(drafter: OwnDrafter) -> OwnDrafter:
        DRAFTERS[name] = drafter
        return drafter

    return register


def make_drafter(name: str, vocab_size: int, device: torch.device) -> Drafter:
    """Make the drafter of that name; lookups need to know nothing of the target."""
    drafter: Any = DRAFTERS[name]
    made: Drafter = drafter() if drafter is NgramDrafter else drafter(vocab_size, device)
    return made
