"""Files of JSON: read into structs, with errors that name the argument a user gave."""

from pathlib import Path
from typing import TypeVar

import msgspec

from eaglegbv.errors import InvalidArgument

Content = TypeVar("Content")


def read_json(path: Path, kind: type[Content], *, argument: str, expected: str) -> Content:
    """Return what a file holds.

    Args:
        path: The file.
        kind: Type of its content.
        argument: What a user called the file, for messages.
        expected: What it should be, likewise.

    Raises:
        InvalidArgument: It cannot be read, or holds something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidArgument(argument, str(path), f"{expected} ({error})") from error
