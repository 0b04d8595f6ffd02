"""Writing files completely or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
