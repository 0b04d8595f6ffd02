"""Costs of steps on this machine: what a run learned of them, kept on disk for the next one.

Whatever is kept is a guess, which the next run's first steps scale to what they took
(:mod:`eaglegbv.scheduler.planner`). So a machine that was busy for a minute does no lasting harm.
"""

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import torch

from eaglegbv.devices import processor_name
from eaglegbv.scheduler import KnownCosts
from eaglegbv.utils import cache_folder

_FORMAT = 12
_NAMES = ("_name_or_path", "transformers_version")  # of a configuration: they decide no cost
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CostCache:
    """The file of one setting: models, device, threads, and whatever else affects step costs."""

    name: str  # of the file in the user's cache; neither need exist

    @classmethod
    def of(cls, *facts: object, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the cache of a target's device and dtype, and other ``facts`` of its costs."""
        # A folder may be shared by machines, so the processor counts too.
        names = {"cuda": torch.cuda.get_device_name, "cpu": lambda _: processor_name()}
        name = names.get(device.type, str)(device)
        known = (_FORMAT, torch.__version__, torch.get_num_threads(), name, str(dtype), *facts)
        key = hashlib.sha256(repr(known).encode()).hexdigest()[:16]
        return cls(f"costs-{key}.json")

    @property
    def path(self) -> Path:
        """The file; FileNotFoundError if the user has no cache."""
        return cache_folder() / self.name

    def read(self) -> KnownCosts | None:
        """Return the saved costs, or None; a file that cannot be read is logged and ignored."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=KnownCosts)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("costs of steps are learned anew: %s: %s", self.name, error)
            return None

    def write(self, costs: KnownCosts) -> None:
        """Save ``costs``; if that is impossible, log it and continue."""
        try:
            part = self.path.with_suffix(f".{os.getpid()}.part")
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(costs))
            part.replace(self.path)
        except OSError as error:
            _log.warning("costs of steps are not kept: %s", error)


def shape_of(model: str | None) -> str | None:
    """Return what decides a model's costs: its configuration, or its name if it has none here."""
    if model is None or not (Path(model) / "config.json").is_file():
        return model
    # Python's JSON has Infinity, which configurations have too.
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8-sig"))
    facts = {key: value for key, value in config.items() if key not in _NAMES}
    return json.dumps(facts, sort_keys=True)
