"""Storage of measured step costs between runs."""

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import torch

from eaglegbv.devices import processor_name
from eaglegbv.scheduler.costs import KnownCosts

FOLDER = "EAGLEGBV_CACHE"
"""Environment variable that names the folder; by default it is in the user's cache."""

_FORMAT = 10

_NAMES = ("_name_or_path", "transformers_version")
"""Entries of a configuration that have no influence on shapes."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CostCache:
    """Cache file for one setting: models, device, threads, and whatever else affects step costs.

    Attributes:
        path: The file; it need not exist.
    """

    path: Path

    @classmethod
    def of(cls, *facts: object, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the cache of a setting.

        Args:
            facts: Other values that affect costs: models, plans, options.
            device: Device of the target.
            dtype: Dtype in which the target computes.
        """
        threads, name = torch.get_num_threads(), _device_name(device)
        known = (_FORMAT, torch.__version__, threads, name, str(dtype), *facts)
        key = hashlib.sha256(repr(known).encode()).hexdigest()[:16]
        return cls(_folder() / f"costs-{key}.json")

    def read(self) -> KnownCosts | None:
        """Return the saved costs, or None; a file that cannot be read is logged and ignored."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=KnownCosts)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("costs of steps are measured again: %s: %s", self.path, error)
            return None

    def write(self, costs: KnownCosts) -> None:
        """Save ``costs``; if that is impossible, log it and continue."""
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(costs))
            part.replace(self.path)
        except OSError as error:
            _log.warning("costs of steps are not kept: %s: %s", self.path, error)


def shape_of(model: str | None) -> str | None:
    """Return what decides a model's costs: its configuration, or its name if it has none here."""
    if model is None or not (Path(model) / "config.json").is_file():
        return model
    config = msgspec.json.decode((Path(model) / "config.json").read_bytes())
    facts = {key: value for key, value in config.items() if key not in _NAMES}
    return str(msgspec.json.encode(facts, order="sorted"))


def _device_name(device: torch.device) -> str:
    """Return a name that tells a device from those of other machines that share the folder."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name() if device.type == "cpu" else str(device)


def _folder() -> Path:
    named = os.environ.get(FOLDER)
    if named:
        return Path(named)
    usual = os.environ.get("XDG_CACHE_HOME")
    return (Path(usual) if usual else Path.home() / ".cache") / "eaglegbv"
