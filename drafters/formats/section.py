"""A part of a config.json, read with the expected types."""

from collections.abc import Mapping
from typing import Any

from eaglegbv.errors import DrafterMismatch


class Section:
    """Keys of a JSON object; a value of another type is an error that names its key.

    A missing key and a null one count as the same.
    """

    def __init__(self, content: Mapping[str, Any], path: str = "") -> None:
        """Wrap ``content``, found under ``path`` in the file."""
        self._content = content
        self._path = path

    def integer(self, key: str) -> int:
        """Return a required positive integer."""
        value = self.optional_integer(key)
        if value is None:
            raise self.mismatch(key, "a positive integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        """Return a positive integer or None."""
        value = self._content.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.mismatch(key, "a positive integer")
        return value

    def integers(self, key: str) -> tuple[int, ...] | None:
        """Return one or more integers from 0, or None."""
        value = self._content.get(key)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or not value
            or any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in value)
        ):
            raise self.mismatch(key, "a list of integers from 0")
        return tuple(value)

    def flag(self, key: str) -> bool | None:
        """Return true, false or None."""
        value = self._content.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.mismatch(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        """Return a string or None."""
        value = self._content.get(key)
        if value is not None and not isinstance(value, str):
            raise self.mismatch(key, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return strings; none where the key is missing."""
        value = self._content.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or any(not isinstance(entry, str) for entry in value):
            raise self.mismatch(key, "a list of strings")
        return tuple(value)

    def inner(self, key: str) -> "Section":
        """Return an object inside this one; an empty one where the key is missing."""
        return Section(self._object(key), f"{self._path}{key}.")

    def merged(self, key: str) -> "Section":
        """Return this section with the keys of the object ``key`` laid over it.

        Raises:
            DrafterMismatch: Both have a key, with different values.
        """
        over = self._object(key)
        for name, value in over.items():
            if value is not None and self._content.get(name) not in (None, value):
                raise self.mismatch(name, f"{value!r}, as in {key}")
        kept = {name: value for name, value in over.items() if value is not None}
        return Section({**self._content, **kept}, self._path)

    def picked(self, keys: tuple[str, ...]) -> dict[str, Any]:
        """Return those of ``keys`` that are there, as they are."""
        return {key: value for key in keys if (value := self._content.get(key)) is not None}

    def mismatch(self, key: str, expected: str) -> DrafterMismatch:
        """Return the error that the value of ``key`` is not as expected."""
        return DrafterMismatch(
            f"config.json key {self._path}{key}", self._content.get(key), expected
        )

    def _object(self, key: str) -> Mapping[str, Any]:
        value = self._content.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.mismatch(key, "an object")
        return value
