"""Reading JSON files into structs, with errors that name the argument a user gave."""

from pathlib import Path
from typing import TypeVar

import msgspec

from eaglegbv.errors import InvalidArgument

Content = TypeVar("Content")


def read_json(path: Path, kind: type[Content], *, argument: str, expected: str) -> Content:
    """Return the content of a file.

    Args:
        path: The file.
        kind: Type of its content.
        argument: The user's name for the file, for messages.
        expected: What the file should be, for messages.

    Raises:
        InvalidArgument: The file cannot be read, or its content is of another type.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidArgument(argument, str(path), f"{expected} ({error})") from error
