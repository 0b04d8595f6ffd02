"""Small things that many modules need: checks of a user's values, and whole files."""

import gzip
import hashlib
import logging
import os
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Generic, Self, TypeVar

import msgspec

from eaglegbv.errors import InvalidArgument, one_of

Item = TypeVar("Item")
Kind = TypeVar("Kind", bound=Hashable)

_log = logging.getLogger(__name__)


def require_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise :class:`InvalidArgument` unless ``value`` is an integer in [low, high]."""
    inside = isinstance(value, int) and low <= value and (high is None or value <= high)
    if isinstance(value, bool) or not inside:
        limits = f"of at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidArgument(name, value, f"an integer {limits}")


def require_integers(
    settings: object, optional: Collection[str] = (), **limits: tuple[int, int | None]
) -> None:
    """Check fields by their lowest and highest values, the ``optional`` ones unless they are None.

    Raises:
        InvalidArgument: See :func:`require_integer`.
    """
    for name, (low, high) in limits.items():
        value = getattr(settings, name)
        if value is not None or name not in optional:
            require_integer(name, value, low, high)


def require_number(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> None:
    """Raise :class:`InvalidArgument` unless ``value`` is a number in [low, high].

    The limits are finite; ``open_low`` refuses ``low`` itself too. NaN is outside every range.
    """
    inside = isinstance(value, int | float) and low <= value <= high
    if isinstance(value, bool) or not inside or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidArgument(name, value, f"a number in {bracket}{low:g}, {high:g}]")


def require_truth(settings: object, *names: str) -> None:
    """Raise :class:`InvalidArgument` unless the fields of these names are true or false."""
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, bool):
            raise InvalidArgument(name, value, "true or false")


def make_member(settings: msgspec.Struct, name: str, kind: type[StrEnum]) -> None:
    """Turn a setting given by its name into the member of an enumeration, or InvalidArgument."""
    value = getattr(settings, name)
    if value not in list(kind):
        raise InvalidArgument(name, value, one_of(kind, value))
    msgspec.structs.force_setattr(settings, name, kind(value))


def plain_numbers(value: object) -> object:
    """Return ``value`` with Python's own numbers for those of NumPy, also in sequences."""
    import numpy as np  # help is printed without it

    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return tuple(plain_numbers(entry) for entry in value)
    return value


def make_numbers_plain(settings: msgspec.Struct) -> None:
    """Apply :func:`plain_numbers` to every field of a new object; comparisons and JSON need it."""
    for name in settings.__struct_fields__:
        msgspec.structs.force_setattr(settings, name, plain_numbers(getattr(settings, name)))


def grouped(items: Iterable[Item], key: Callable[[Item], Kind]) -> dict[Kind, list[Item]]:
    """Return the items of each key, keys and items in order of appearance."""
    groups: dict[Kind, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


Content = TypeVar("Content")


def read_json_lines(
    path: Path, kind: type[Content], *, argument: str = "data"
) -> Iterator[tuple[str, Content]]:
    """Yield the rows of a file of JSON lines, each with its place, ``file:line``.

    Only a newline ends a line: U+2028 and its like may stand in a string. A byte-order mark and
    blank lines are skipped. A file whose name ends in ``.gz`` is unpacked. Rows are of type
    ``kind``, and messages call the file ``argument``.

    Raises:
        InvalidArgument: The file cannot be read, or a line is no UTF-8, no JSON or of another type.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                row = line.removeprefix(BOM_UTF8) if number == 1 else line
                if row.strip():
                    place = f"{path}:{number}"
                    yield place, decode_json(row, kind, argument=argument, place=place)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidArgument(
            argument, str(path), f"a readable JSON-lines file ({error})"
        ) from error


def decode_json(
    content: bytes, kind: type[Content], *, argument: str, place: str, expected: str = "JSON"
) -> Content:
    """Return what UTF-8 JSON says; InvalidArgument, with the place, if it is something else."""
    try:
        return msgspec.json.decode(content.decode("utf-8"), type=kind)
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise InvalidArgument(argument, place, f"{expected} ({error})") from error


CACHE_FOLDER = "EAGLEGBV_CACHE"
"""Environment variable that names the folder; by default it is in the user's cache."""


def cache_folder() -> Path:
    """Return the folder of what is kept between runs; it need not exist, nor allow writing.

    Raises:
        FileNotFoundError: No variable names one, and the user has no home directory.
    """
    named = os.environ.get(CACHE_FOLDER)
    if named:
        return Path(named)
    usual = os.environ.get("XDG_CACHE_HOME")
    if usual:
        return Path(usual) / "eaglegbv"
    try:
        return Path.home() / ".cache" / "eaglegbv"
    except RuntimeError as error:
        raise FileNotFoundError(f"no home directory; {CACHE_FOLDER} names a cache") from error


@dataclass(frozen=True, slots=True)
class CacheFile(Generic[Content]):
    """A file of the cache: what a run has found out, and the next one need not."""

    name: str
    kind: type[Content]

    @classmethod
    def of(cls, name: str, kind: type[Content], *facts: object) -> Self:
        """Return the file of a ``name`` for such facts: where one differs, it is another file."""
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        return cls(f"{name}-{digest}.json", kind)

    @property
    def path(self) -> Path:
        """Where it is; FileNotFoundError if the user has no cache."""
        return cache_folder() / self.name

    def read(self) -> Content | None:
        """Return what was kept, or None; a file that cannot be read is logged and ignored."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=self.kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("what %s kept is found out anew: %s", self.name, error)
            return None

    def write(self, content: Content) -> None:
        """Keep ``content``; if that is impossible, log it and continue."""
        try:
            part = self.path.with_suffix(f".{os.getpid()}.part")
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(content))
            part.replace(self.path)
        except OSError as error:
            _log.warning("%s is not kept: %s", self.name, error)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file to write, which then replaces ``path``.

    A process that is killed meanwhile leaves ``path`` unchanged. Two processes must not write the
    same file at once.
    """
    partial = path.with_name(f"{path.name}.partial")
    yield partial
    partial.replace(path)


def write_whole(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``; a process that is killed meanwhile leaves it unchanged."""
    with replacing(path) as partial:
        partial.write_bytes(content)


@cache
def log_once(log: logging.Logger, level: int, message: str) -> None:
    """Log what a process does not need to say twice."""
    log.log(level, message)


# Defaults shared by the API and the command line, in a module that is quick to import.
DRAFT_WIDTH = 256
"""Number of candidates a draft distribution keeps.

With 1,024, the tiny pair commits 3% more per step at temperature 1, and a step takes 6% longer.
"""


def power_of_two(number: int) -> int:
    """Return the least power of two that is at least ``number``, a positive number."""
    return 1 << (number - 1).bit_length()
