"""The kind of drafter in a folder, told by its tensors, as configurations do not name it."""

from collections.abc import Collection
from enum import StrEnum
from pathlib import Path

from eaglegbv.drafters.formats.weights import read_json, read_weights
from eaglegbv.drafters.tabular import TABULAR


class Kind(StrEnum):
    """Kinds of drafters that are stored in folders."""

    EAGLE = "eagle"
    """A head that reads the target's features."""
    LANGUAGE_MODEL = "language model"
    """A whole transformers model with the target's tokenizer."""
    TABLE = "table"
    """A table of laws, looked up by the last tokens."""


def kind_of(folder: Path) -> Kind:
    """Return what ``folder`` holds.

    Raises:
        DrafterMismatch: There is no configuration or weight file, or one is broken.
    """
    if read_json(folder / "config.json").get("model_type") == TABULAR:
        return Kind.TABLE
    return Kind.EAGLE if _is_head(read_weights(folder).tensors) else Kind.LANGUAGE_MODEL


def _is_head(names: Collection[str]) -> bool:
    """Return whether ``names`` are a head's.

    Only a head fuses features, maps vocabularies, or names its layer without ``model.``.
    """
    plain = {name.removeprefix("model.") for name in names}
    if plain & {"fc.weight", "d2t", "t2d"}:
        return True
    return any(name.startswith(("midlayer.", "layers.0.")) for name in names)
