"""How many tokens the KV pools of a target and its drafter hold: as given, or as memory allows."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from eaglegbv.errors import InvalidArgument

ACCELERATOR_SHARE, CPU_SHARE = 0.8, 0.25
"""Shares of free memory that pools take by default. The rest is for what a step computes and, on a
CPU, for other programs."""

_LIMIT = Path("/sys/fs/cgroup/memory.max")
_USED = Path("/sys/fs/cgroup/memory.current")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The size of the target's and the drafter's pool, which have the same slot numbers.

    Attributes:
        slots: Number of slots; None if memory decides.
        bytes: Bytes of all pools together; None for a share of free memory. Excludes ``slots``.
        longest_texts: How many texts of full length to make room for at most, if free memory
            decides.
        beside: Bytes that a slot takes in the drafter's pool.
    """

    slots: int | None = None
    bytes: int | None = None
    longest_texts: int = 16
    beside: int = 0

    def __post_init__(self) -> None:
        if self.slots is not None and self.bytes is not None:
            raise InvalidArgument("kv_bytes", self.bytes, "None where kv_slots is given")

    @classmethod
    def of(cls, size: "int | PoolSize") -> "PoolSize":
        """Return the size for a number of slots; a size is returned unchanged."""
        return size if isinstance(size, PoolSize) else cls(slots=size)

    def slots_of(
        self, bytes_per_slot: int, *, max_context: int, least: int, device: torch.device
    ) -> int:
        """Return the number of slots.

        Args:
            bytes_per_slot: Bytes that a slot takes in the target's pool.
            max_context: Length of the longest text.
            least: Least number of slots required.
            device: Where the pools will be.

        Raises:
            InvalidArgument: There are too few slots.
        """
        if self.slots is not None:
            if self.slots < least:
                raise InvalidArgument("max_slots", self.slots, f"at least {least} slots")
            return self.slots
        each = bytes_per_slot + self.beside
        room = self.bytes
        if room is None:
            share = CPU_SHARE if device.type == "cpu" else ACCELERATOR_SHARE
            # Further slots could never be used: trees and recalled steps are small.
            of_use = self.longest_texts * max_context + 4096
            room = min(int(share * free_memory(device)), of_use * each)
        if room < least * each:
            expected = f"at least {least * each} bytes: {least} slots of {each} bytes"
            raise InvalidArgument("kv_bytes", room, expected)
        return room // each


def free_memory(device: torch.device) -> int:
    """Return the number of free bytes on ``device``."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that PyTorch caches is free too
        return int(torch.cuda.mem_get_info(device)[0])
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([pages, *_limits()])


def _limits() -> list[int]:
    """Return the bytes that Linux reports as available, and those a container may still take."""
    found: list[int] = []
    if _MEMINFO.is_file():
        available = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text())
        found += [1024 * int(available[1])] if available else []
    if _LIMIT.is_file() and _USED.is_file():
        limit = _LIMIT.read_text().strip()
        found += [int(limit) - int(_USED.read_text())] if limit.isdigit() else []
    return found
