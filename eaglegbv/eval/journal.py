"""Entries saved one a line as they come, so that a killed process loses at most one."""

import os
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from eaglegbv.errors import InvalidArgument

Entry = TypeVar("Entry", bound=msgspec.Struct)


class Journal(Generic[Entry]):
    """A file of JSON lines to which one process adds, while others may read it.

    A last line that its writer has not finished, or was killed while writing, is not read.
    """

    def __init__(self, path: Path, kind: type[Entry], content: str) -> None:
        """Name a file, which need not exist yet.

        Args:
            path: The file.
            kind: Type of its entries.
            content: What the entries are, for messages.
        """
        self._path = path
        self._kind = kind
        self._content = content

    def read(self, argument: str = "out") -> list[Entry]:
        """Return all entries without changing the file.

        Args:
            argument: The user's name for the journal's folder, for messages.

        Raises:
            InvalidArgument: The file cannot be read, or a line is not an entry.
        """
        try:
            lines = self._whole_lines().splitlines()
            return [msgspec.json.decode(line, type=self._kind) for line in lines]
        except (OSError, msgspec.DecodeError) as error:
            expected = f"{self._content} ({error})"
            raise InvalidArgument(argument, str(self._path.parent), expected) from error

    def resume(self) -> list[Entry]:
        """Return all entries, and remove a last line that was cut short, so that more can be added.

        Raises:
            InvalidArgument: The file cannot be read, or a line is not an entry.
        """
        entries = self.read()
        if self._path.is_file():
            os.truncate(self._path, len(self._whole_lines()))
        return entries

    def add(self, entry: Entry) -> None:
        """Append an entry to the file."""
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")

    def _whole_lines(self) -> bytes:
        content = self._path.read_bytes() if self._path.is_file() else b""
        return content[: content.rfind(b"\n") + 1]
