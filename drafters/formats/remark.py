"""Something a user should know about a head's files."""

from dataclasses import dataclass
from enum import StrEnum


class RemarkKind(StrEnum):
    """What a remark is about."""

    NOTE = "note"
    """Nothing to worry about."""
    ASSUMED = "assumed"
    """How the files were read where they leave something open."""
    WARNING = "warning"
    """How another engine would read the files."""


@dataclass(frozen=True, slots=True)
class Remark:
    """A remark."""

    kind: RemarkKind
    text: str
