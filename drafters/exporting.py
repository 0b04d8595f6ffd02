"""Exporting a head for other engines."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from eaglegbv.drafters.checkpoint import Checkpoint
from eaglegbv.drafters.formats.base import Contents
from eaglegbv.drafters.formats.names import EMBEDDING
from eaglegbv.drafters.formats.registry import find_format
from eaglegbv.drafters.formats.writing import write_head
from eaglegbv.errors import DrafterMismatch, InvalidArgument


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """The target a head is exported for.

    Attributes:
        name: Name or path, written where the format has a place for it.
        architectures: Its class names.
        num_layers: Its decoder layers.
        read_embedding: Returns its token embedding, ``[vocab, hidden]``.
    """

    name: str
    architectures: tuple[str, ...]
    num_layers: int
    read_embedding: Callable[[], Tensor]


def export_head(
    checkpoint: Checkpoint, format_name: str, folder: Path, target: ExportTarget | None = None
) -> None:
    """Write a checkpoint into ``folder`` in another format; tensors keep every bit.

    Layer ids are written the way the format counts. A checkpoint that names no layers leaves them
    to the default, which is the same in all engines. Known tensors that are not needed are not
    written.

    Args:
        checkpoint: The head to export.
        format_name: One of :class:`FormatName`.
        folder: Destination; it must be empty or not exist.
        target: Needed where the format wants the embedding and the checkpoint has none; its name
            is written where the format has a place for it.

    Raises:
        InvalidArgument: There is no such format, or the folder is not empty.
        DrafterMismatch: The format cannot express the head, or an embedding is missing.
    """
    kind = find_format(format_name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidArgument("directory", str(folder), "a folder that is empty or not there yet")
    kind.check_holds(checkpoint.config)
    tensors = dict(checkpoint.named.tensors)
    if kind.carries_embedding and EMBEDDING not in tensors:
        if target is None:
            expected = f"the target's, which {kind.name} heads carry; name the target"
            raise DrafterMismatch(EMBEDDING, None, expected)
        tensors[EMBEDDING] = target.read_embedding()
    layers = _layers(checkpoint, target)
    contents = Contents(
        config=checkpoint.config,
        layers=layers,
        dtype=tensors["fc.weight"].dtype,
        passed_on=checkpoint.passed_on,
        verifier=checkpoint.verifier if target is None else target.name,
        verifier_architectures=() if target is None else target.architectures,
    )
    write_head(folder, kind, contents, tensors)


def _layers(checkpoint: Checkpoint, target: ExportTarget | None) -> tuple[int, ...] | None:
    """Return the layers to name in the file; None where the checkpoint leaves them open."""
    if checkpoint.layers is None or checkpoint.layers.ids is None:
        return None
    resolved = checkpoint.layers.resolve(None if target is None else target.num_layers)
    return None if resolved is None else resolved.inputs
