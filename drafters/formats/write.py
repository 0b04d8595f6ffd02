"""Writing a head's folder in a format."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from eaglegbv.drafters.formats.read import SAFETENSORS, Contents, Format
from eaglegbv.utils import replacing, write_whole


def write_head(
    folder: Path, kind: Format, contents: Contents, tensors: Mapping[str, Tensor]
) -> None:
    """Write ``config.json`` and ``model.safetensors``.

    Args:
        folder: Created if missing.
        kind: The format.
        contents: What config.json is written from.
        tensors: Tensors by their names inside this package. They are written unchanged, along with
            those that the format adds (:meth:`Format.added`).

    Raises:
        DrafterMismatch: The format cannot express the head.
    """
    kind.check_holds(contents.config)
    arch = contents.config.arch
    added = {name: t.to(contents.dtype) for name, t in kind.added(contents.config).items()}
    stored = {
        kind.stored_name(name, arch): tensor.contiguous()
        for name, tensor in {**tensors, **added}.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / SAFETENSORS) as partial:
        save_file(stored, partial, metadata={"format": "pt"})
    text = json.dumps(kind.config(contents), indent=2)
    write_whole(folder / "config.json", f"{text}\n".encode())
