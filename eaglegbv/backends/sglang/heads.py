"""Draft heads in the format that SGLang reads."""

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from eaglegbv.drafters.checkpoint import Checkpoint, export_head, fit, read_checkpoint
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.drafters.formats.read import FormatName
from eaglegbv.models.hf import load_config


@dataclass(frozen=True, slots=True)
class ServedHead:
    """A head in SGLang's format.

    Attributes:
        folder: Folder of the head.
        eagle3: Whether it is an EAGLE-3 head.
    """

    folder: Path
    eagle3: bool

    @property
    def algorithm(self) -> str:
        """The ``--speculative-algorithm`` that serves it."""
        return "EAGLEGBV3" if self.eagle3 else "EAGLEGBV"


def served_head(
    folder: str | Path,
    model: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> ServedHead:
    """Check a head against its target, and convert it for SGLang if it is in another format.

    Args:
        folder: A head in any format that :mod:`eaglegbv.drafters.formats` reads.
        model: Folder or hub name of the target.
        revision: Revision of the target on the hub; None for the newest.
        trust_remote_code: Whether to run code from the target's repository.

    Raises:
        DrafterMismatch: The head is broken, or does not fit the target.
    """
    checkpoint = read_checkpoint(Path(folder))
    target = load_config(model, revision=revision, trust_remote_code=trust_remote_code)
    eagle3 = fit(checkpoint, target).config.arch is Arch.EAGLE3
    if checkpoint.format is FormatName.SGLANG:
        return ServedHead(Path(folder), eagle3)
    return ServedHead(_converted(checkpoint), eagle3)


def _converted(checkpoint: Checkpoint) -> Path:
    """Write the head into the temporary folder, unless an earlier server did."""
    written = sorted(
        (name, (checkpoint.folder / name).stat().st_mtime_ns)
        for name in ("config.json", *checkpoint.files)
    )
    key = hashlib.sha256(repr((str(checkpoint.folder.resolve()), written)).encode()).hexdigest()
    place = Path(tempfile.gettempdir()) / f"eaglegbv-head-{key[:16]}"
    if not (place / "config.json").is_file():
        export_head(checkpoint, FormatName.SGLANG, place)
    return place
