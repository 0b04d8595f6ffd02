"""The tensors of a folder, from safetensors or from what ``torch.save`` wrote, whole or sharded."""

import json
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eaglegbv.errors import DrafterMismatch

SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors by the names they are stored under.

    Attributes:
        files: The files read.
        ignored: Other files with weights in the folder, which repeat these.
        tensors: On the CPU; mapped from the file, so that they are read only when used.
    """

    files: tuple[str, ...]
    ignored: tuple[str, ...]
    tensors: dict[str, Tensor]


def read_weights(folder: Path) -> Weights:
    """Read all tensors of ``folder``; safetensors come before pickled ones.

    Raises:
        DrafterMismatch: There is no weight file, or one is truncated, broken or holds anything
            but tensors; the message names it.
    """
    candidates = (SAFETENSORS, f"{SAFETENSORS}.index.json", PICKLED, f"{PICKLED}.index.json")
    found = [name for name in candidates if (folder / name).is_file()]
    if not found:
        expected = f"{SAFETENSORS} or {PICKLED} in the folder"
        raise DrafterMismatch("drafter", str(folder), expected)
    files = _shards(folder / found[0]) if found[0].endswith(".json") else (found[0],)
    tensors: dict[str, Tensor] = {}
    for name in files:
        for key, tensor in _read_file(folder / name).items():
            if key in tensors:
                raise DrafterMismatch(key, f"in two files of {list(files)}", "in one of them")
            tensors[key] = tensor
    return Weights(files, tuple(found[1:]), tensors)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        DrafterMismatch: It cannot be read or is something else.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DrafterMismatch("drafter", str(path), f"a readable JSON file ({error})") from error
    if not isinstance(content, dict):
        raise DrafterMismatch("drafter", str(path), "a JSON object")
    return content


def _shards(index: Path) -> tuple[str, ...]:
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise DrafterMismatch("drafter", str(index), "a weight_map from tensors to files")
    files = {str(name) for name in named.values()}
    for name in files:
        if Path(name).name != name:
            raise DrafterMismatch("drafter", str(index), f"files beside it, not {name!r}")
    return tuple(sorted(files))


def _read_file(path: Path) -> dict[str, Tensor]:
    return _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickled(path)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        expected = f"a complete safetensors file ({error})"
        raise DrafterMismatch("drafter", str(path), expected) from error


def _read_pickled(path: Path) -> dict[str, Tensor]:
    try:
        # Only tensors: a pickle may run any code. Mapping needs the zip layout of today's files.
        content = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        expected = f"a complete file of tensors alone ({reason})"
        raise DrafterMismatch("drafter", str(path), expected) from error
    if not isinstance(content, dict):
        raise DrafterMismatch("drafter", str(path), "a dictionary of tensors")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise DrafterMismatch(str(name), type(tensor).__name__, f"a tensor in {path.name}")
    return {name: tensor.detach() for name, tensor in content.items()}
