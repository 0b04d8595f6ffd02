"""Costs of steps on this machine: what a run learned of them, kept on disk for the next one.

Whatever is kept is a guess, which the next run's first steps scale to what they took
(:mod:`eaglegbv.scheduler.planner`). So a machine that was busy for a minute does no lasting harm.
"""

import json
from pathlib import Path

import torch

from eaglegbv.devices import machine_facts
from eaglegbv.scheduler import KnownCosts
from eaglegbv.utils import CacheFile

_FORMAT = 12
_NAMES = ("_name_or_path", "transformers_version")  # of a configuration: they decide no cost


def cost_cache(*facts: object, device: torch.device, dtype: torch.dtype) -> CacheFile[KnownCosts]:
    """Return the cache of a target's device and dtype, and other ``facts`` of its costs."""
    return CacheFile.of("costs", KnownCosts, _FORMAT, *machine_facts(device), str(dtype), *facts)


def shape_of(model: str | None) -> str | None:
    """Return what decides a model's costs: its configuration, or its name if it has none here."""
    if model is None or not (Path(model) / "config.json").is_file():
        return model
    # Python's JSON has Infinity, which configurations have too.
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8-sig"))
    facts = {key: value for key, value in config.items() if key not in _NAMES}
    return json.dumps(facts, sort_keys=True)
