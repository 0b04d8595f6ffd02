"""The paged KV pool: keys and values of every layer, with one token a page, and its slot owners.

Slots are numbers, kept on the host; pools are storage. One allocator serves both the target's pool
and the drafter's: the token at position t of a request owns the same slot number in both. A
committed tree node keeps its slot, a rejected one gives it back, and nothing is ever copied.
"""

import heapq
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eaglegbv.devices import runs_kernels
from eaglegbv.errors import InvalidArgument, OutOfSlots
from eaglegbv.utils import power_of_two, require_number

_BLANK, _TAKEN, _KEPT = 0, 1, 2
"""States of a slot. Blank and kept slots are both free, but the contents of a kept one may be used
again."""

_LINE = 64  # bytes of a cache line, to which pools are aligned


class SlotAllocator:
    """Hands out slots 0 ... ``num_slots`` - 1, the lowest blank ones first.

    A free slot may be *kept*: it is handed out only after all blank ones, and until then its keeper
    may take it back with its contents.

        blank --allocate--> taken --release--> blank
                              |  ^
                        keep  v  |  take_back
                             kept  --blank--> blank
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._blank = list(range(num_slots))  # a heap, as a sorted list is one
        self.num_kept = 0  # number of free slots that are kept
        self._state = bytearray(num_slots)
        self._keepers: list[Callable[[int], None]] = []

    @property
    def num_free(self) -> int:
        """Number of free slots, blank or kept."""
        return len(self._blank) + self.num_kept

    @property
    def num_used(self) -> int:
        """Number of slots that are not free."""
        return self.num_slots - self.num_free

    def add_keeper(self, blank: Callable[[int], None]) -> None:
        """Register ``blank(count)``, to be called when blank slots are short by ``count``.

        It must call :meth:`blank` for as many of its kept slots, or for all if it has fewer.
        """
        self._keepers.append(blank)

    def allocate(self, count: int) -> Tensor:
        """Take ``count`` slots and return them: ``[count]`` int64, ascending.

        Raises:
            OutOfSlots: Fewer than ``count`` are free; none is taken then.
        """
        if count > self.num_free:
            raise OutOfSlots(count, self.num_free, self.num_slots)
        for blank in self._keepers:
            if count > len(self._blank):
                blank(count - len(self._blank))
        slots = [heapq.heappop(self._blank) for _ in range(count)]
        for slot in slots:
            self._state[slot] = _TAKEN
        return torch.tensor(slots, dtype=torch.int64)

    def release(self, slots: Tensor) -> None:
        """Give back ``slots``, ``[count]``.

        Raises:
            InvalidArgument: A slot is not taken (released twice, or never handed out); the slots
                before it in ``slots`` are free then.
        """
        for slot in slots.tolist():
            self._change(slot, _TAKEN, _BLANK, "slots that are taken, each released once")
            heapq.heappush(self._blank, slot)

    def keep(self, slots: Tensor) -> None:
        """Give back taken slots so that they are handed out last; InvalidArgument for others."""
        for slot in slots.tolist():
            self._change(slot, _TAKEN, _KEPT, "slots that are taken")
            self.num_kept += 1

    def take_back(self, slots: Tensor) -> None:
        """Take kept slots again, with their contents; InvalidArgument for others."""
        for slot in slots.tolist():
            self._change(slot, _KEPT, _TAKEN, "slots that are kept")
            self.num_kept -= 1

    def blank(self, slots: Tensor) -> None:
        """Stop keeping ``slots``, whose contents nobody needs; InvalidArgument for others."""
        for slot in slots.tolist():
            self._change(slot, _KEPT, _BLANK, "slots that are kept")
            self.num_kept -= 1
            heapq.heappush(self._blank, slot)

    def check(self, owned: Iterable[Tensor]) -> None:
        """Check that every slot occurs once among ``owned``, all owners' slots, and the free ones.

        Raises:
            InvalidArgument: A slot has two owners, an owner holds a free slot, or a taken slot has
                no owner (a leak).
        """
        taken = [state == _TAKEN for state in self._state]
        owners = [False] * self.num_slots
        for slots in owned:
            for slot in slots.tolist():
                if not 0 <= slot < self.num_slots or not taken[slot]:
                    raise InvalidArgument("owned", slot, "slots that are taken")
                if owners[slot]:
                    raise InvalidArgument("owned", slot, "slots with one owner each")
                owners[slot] = True
        if owners != taken:
            leaked = [s for s in range(self.num_slots) if taken[s] and not owners[s]]
            raise InvalidArgument("owned", leaked[:16], "an owner of every taken slot (leak)")
        blank = [slot for slot in range(self.num_slots) if self._state[slot] == _BLANK]
        if sorted(self._blank) != blank:
            raise InvalidArgument("blank", len(self._blank), "every blank slot, once")
        if self._state.count(_KEPT) != self.num_kept:
            raise InvalidArgument("num_kept", self.num_kept, str(self._state.count(_KEPT)))

    def _change(self, slot: int, before: int, after: int, expected: str) -> None:
        if not 0 <= slot < self.num_slots or self._state[slot] != before:
            raise InvalidArgument("slots", slot, expected)
        self._state[slot] = after


class KVPool:
    """Keys and values, by layer and slot.

    Attributes:
        keys: ``[layers, slots, kv_heads, head_dim]``.
        values: ``[layers, slots, kv_heads, head_dim]``.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the pool, all zeros; a CPU's memory is touched as slots come into use."""
        shape = (layers, slots, kv_heads, head_dim)
        self.keys = _zeros(shape, dtype, torch.device(device))
        self.values = _zeros(shape, dtype, torch.device(device))
        # The views are made once: indexing a tensor by layer costs as much as a small kernel.
        self._layers = list(zip(self.keys.unbind(0), self.values.unbind(0), strict=True))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer, each ``[slots, kv_heads, head_dim]``, as views."""
        return self._layers[index]

    def write(
        self, layer: int, slots: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values ``[rows, kv_heads, head_dim]`` of new tokens to one layer.

        ``slots`` ``[rows]`` int64 are on the pool's device. Returns the layer, as :meth:`layer`.
        """
        all_keys, all_values = self.layer(layer)
        if runs_kernels(all_keys.device):
            _write_by_kernel(all_keys, all_values, slots, keys, values)
            return all_keys, all_values
        all_keys.index_copy_(0, slots, keys)
        all_values.index_copy_(0, slots, values)
        return all_keys, all_values

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return self.keys.shape[1]


def _write_by_kernel(
    all_keys: Tensor, all_values: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Write keys and values of new tokens to a layer, by one kernel for both."""
    from eaglegbv.layer_kernels import write_rows

    keys, values = (part if part.stride(2) == 1 else part.contiguous() for part in (keys, values))
    rows, heads, dim = keys.shape
    write_rows[(rows,)](
        keys,
        values,
        slots,
        all_keys,
        all_values,
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        heads,
        dim,
        BLOCK=power_of_two(heads * dim),
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU, they are zero pages that the system provides on first use."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch would write them all: seconds for a large pool, and memory that may not be needed.
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _LINE, dtype=np.uint8)
    start = -memory.ctypes.data % _LINE
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)


def slot_bytes(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values over all layers."""
    return 2 * layers * kv_heads * head_dim * dtype.itemsize


ACCELERATOR_SHARE, CPU_SHARE = 0.8, 0.25
"""Shares of free memory that pools take by default. The rest is for what a step computes and, on a
CPU, for other programs."""

_LIMIT = Path("/sys/fs/cgroup/memory.max")
_USED = Path("/sys/fs/cgroup/memory.current")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The size of the target's and the drafter's pool, which have the same slot numbers."""

    slots: int | None = None  # number of slots; None if memory decides
    # Bytes of all pools together; None for a share of free memory. Excludes `slots`.
    bytes: int | None = None
    # How many sequences of full length to make room for at most, if free memory decides.
    longest_sequences: int = 16
    beside: int = 0  # bytes that a slot takes in the drafter's pool
    # Share of an accelerator's memory for models and pools; None for a share of free memory.
    utilization: float | None = None

    @classmethod
    def of(cls, size: "int | PoolSize") -> "PoolSize":
        """Return the size for a number of slots; a size is returned unchanged."""
        return size if isinstance(size, PoolSize) else cls(slots=size)

    def slots_of(
        self, bytes_per_slot: int, *, max_context: int, least: int, device: torch.device
    ) -> int:
        """Return the number of slots in pools on ``device``.

        Sequences have up to ``max_context`` positions; ``bytes_per_slot`` are those in the target's
        pool.

        Raises:
            InvalidArgument: There are fewer than ``least``.
        """
        if self.slots is not None:
            if self.slots < least:
                raise InvalidArgument("max_slots", self.slots, f"at least {least} slots")
            return self.slots
        each = bytes_per_slot + self.beside
        room = self.bytes
        if room is None:
            # Further slots could never be used: trees and recalled steps are small.
            of_use = self.longest_sequences * max_context + 4096
            room = min(self._room(device), of_use * each)
        if room < least * each:
            expected = f"at least {least * each} bytes: {least} slots of {each} bytes"
            raise InvalidArgument("kv_bytes", room, expected)
        return room // each

    def _room(self, device: torch.device) -> int:
        """Return the bytes that all pools may take, where memory decides."""
        if self.utilization is None:
            share = CPU_SHARE if device.type == "cpu" else ACCELERATOR_SHARE
            return int(share * free_memory(device))
        require_number("gpu_memory_utilization", self.utilization, 0, 1, open_low=True)
        if device.type != "cuda":
            expected = f"None on {device.type}: give engine=EngineConfig(kv_bytes=...)"
            raise InvalidArgument("gpu_memory_utilization", self.utilization, expected)
        total = torch.cuda.get_device_properties(device).total_memory
        return int(self.utilization * total) - (total - free_memory(device))


def free_memory(device: torch.device) -> int:
    """Return the number of free bytes on ``device``."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that PyTorch caches is free too
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    if _MEMINFO.is_file():  # what Linux reports as available
        available = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text())
        limits += [1024 * int(available[1])] if available else []
    if _LIMIT.is_file() and _USED.is_file():  # what a container may still take
        limit = _LIMIT.read_text().strip()
        limits += [int(limit) - int(_USED.read_text())] if limit.isdigit() else []
    return min(limits)
