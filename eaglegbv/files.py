"""Files that are written whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a file to write, which then takes the place of ``path``.

    A process that is killed meanwhile leaves ``path`` as it was. Two processes must not write the
    same file at once.
    """
    partial = path.with_name(f"{path.name}.partial")
    yield partial
    partial.replace(path)


def write_whole(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``; a process that is killed meanwhile leaves it as it was."""
    with replacing(path) as partial:
        partial.write_bytes(content)
