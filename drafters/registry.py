"""Drafters by name, and drafters by what their folders hold (see docs/study/add_a_drafter.md).

``LLM(drafter=...)`` and ``--drafter`` look a name up here first; other names are those of folders
and of repositories of the hub, whose files say which drafter they are.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from eaglegbv.drafters.base import Drafter
from eaglegbv.drafters.checkpoint import CONFIG
from eaglegbv.drafters.eagle import EagleFiles
from eaglegbv.drafters.files import DrafterFiles
from eaglegbv.drafters.formats.read import read_json
from eaglegbv.drafters.ngram import NgramDrafter
from eaglegbv.drafters.parallel import ParallelFiles
from eaglegbv.drafters.tabular import TabularFiles
from eaglegbv.errors import InvalidArgument, one_of

OwnDrafter = TypeVar("OwnDrafter", bound=type[Drafter])
OwnFiles = TypeVar("OwnFiles", bound=type[DrafterFiles])
DRAFTERS: dict[str, type[Drafter]] = {"ngram": NgramDrafter}
"""The classes of all drafters that need no files, by their names."""
DRAFTER_FILES: list[type[DrafterFiles]] = [EagleFiles, ParallelFiles, TabularFiles]
"""The drafters with files; the last one that recognises a folder's opens it."""


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


def register_files(files: OwnFiles) -> OwnFiles:
    """Let folders that these files recognise be opened by them, ahead of all others; a decorator.

    Raises:
        InvalidArgument: Files of that name are registered.
    """
    names = [known.name for known in DRAFTER_FILES]
    if files.name in names:
        raise InvalidArgument("name", files.name, f"a new one, not {one_of(names)}")
    DRAFTER_FILES.append(files)
    return files


def make_drafter(name: str, vocab_size: int, device: torch.device) -> Drafter:
    """Make the drafter of that name; lookups need to know nothing of the target."""
    drafter: Any = DRAFTERS[name]
    made: Drafter = drafter() if drafter is NgramDrafter else drafter(vocab_size, device)
    return made


def files_in(folder: Path) -> type[DrafterFiles] | None:
    """Return whose files are in ``folder``; None for those of no drafter, as a language model's.

    Raises:
        DrafterMismatch: There is no configuration or weight file, one is broken, or they are of a
            kind that is known but not supported.
    """
    config = read_json(folder / CONFIG)
    known = (files for files in reversed(DRAFTER_FILES) if files.recognise(folder, config))
    return next(known, None)
