"""Something about a head's files that their reader should know."""

from dataclasses import dataclass
from enum import StrEnum


class RemarkKind(StrEnum):
    """What a remark is about."""

    NOTE = "note"
    """Nothing to worry about."""
    ASSUMED = "assumed"
    """What the files leave open and how they were read."""
    WARNING = "warning"
    """What another engine would make of the files."""


@dataclass(frozen=True, slots=True)
class Remark:
    """A remark."""

    kind: RemarkKind
    text: str
