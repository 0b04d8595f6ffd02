"""Data that is not part of the project: used where it is, skipped with a reason where not."""

import os
from pathlib import Path

_CHECKOUT = Path(__file__).parents[2]
_FOLDER = Path(os.environ.get("EAGLEGBV_DATA") or _CHECKOUT.parent / "shared" / "data")


def data_file(relative: str) -> Path | None:
    """Return a file of the data folder, or None where there is none."""
    path = _FOLDER / relative
    return path if path.is_file() else None
