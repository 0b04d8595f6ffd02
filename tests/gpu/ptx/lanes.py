"""Threads of several blocks as lanes of arrays: registers, memory, and where each of them is.

    counters   [ 4 4 4 4 | 7 7 4 4 ]      the lowest go on, by a basic block: here those at 4
    active     [ x x x x | . . x x ]      until they reach 7, or end

So lanes that took different ways meet again where their ways do, and whoever waits at a barrier is
met there by the others.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
from gpu.ptx.text import Guard, Kernel

Array = np.ndarray
WARP = 32
ENDED = 1 << 40
"""The counter of a lane that has ended."""

_FIRST, _LAST = 1 << 16, 1 << 48
_LINE = 128
"""Bytes that blocks' shared memory begins at multiples of."""


class MemoryFault(Exception):
    """A kernel reads or writes where it must not."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """Memory that may be touched: ``[n]`` first addresses in order, and those behind the ends."""

    starts: Array
    ends: Array

    def hold(self, addresses: Array, size: int) -> Array:
        """Return for each address whether ``size`` bytes from there may be touched."""
        place = np.searchsorted(self.starts, addresses, side="right") - 1
        return (place >= 0) & (addresses + np.uint64(size) <= self.ends[np.maximum(place, 0)])


@dataclass(frozen=True, slots=True)
class Launch:
    """What a kernel is launched with.

    Attributes:
        grid: Blocks along x, y and z.
        block: Threads of a block along x, y and z.
        parameters: Their bytes, laid out as the kernel says.
        shared_bytes: Shared memory beyond what the kernel declares.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    parameters: bytes
    shared_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.threads <= 1024 or min(self.grid) < 1 or self.shared_bytes > 232448:
            raise ValueError(f"no device launches {self.grid} blocks of {self.block} threads")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.block[0] * self.block[1] * self.block[2]


class Lanes:
    """The threads of some blocks of a launch.

    Attributes:
        count: How many threads there are.
        registers: ``[count]`` each, by their bits.
        active: ``[count]`` bool, whose turn it is.
        all_active: Whether it is everyone's.
        counters: ``[count]`` int64, the basic blocks that threads are at.
    """

    def __init__(
        self, kernel: Kernel, launch: Launch, blocks: Sequence[int], allowed: Ranges | None
    ) -> None:
        """Begin at the first basic block.

        Args:
            kernel: What is run.
            launch: How it was launched.
            blocks: Numbers of the blocks, x first.
            allowed: Global memory that may be touched; None for any.
        """
        self.launch = launch
        self.count = len(blocks) * launch.threads
        assert launch.threads % WARP == 0, launch.block
        # Writing puts a new array in a register's place, so all may begin with the same nonsense.
        nonsense = {kind: _nonsense(self.count, kind) for kind in set(kernel.registers)}
        self.registers = [nonsense[kind] for kind in kernel.registers]
        self.counters = np.zeros(self.count, np.int64)
        self.everyone = np.ones(self.count, bool)
        self.active, self.all_active = self.everyone, True
        self._blocks = np.repeat(np.asarray(blocks), launch.threads)
        self._threads = np.tile(np.arange(launch.threads), len(blocks))
        self._allowed = allowed
        self._shared_bytes = kernel.shared_bytes + launch.shared_bytes
        stride = -(-self._shared_bytes // _LINE) * _LINE
        self._shared = _nonsense(len(blocks) * stride + _LINE, np.dtype(np.uint8))
        first = -(-self._shared.ctypes.data // _LINE) * _LINE
        starts = first + stride * np.arange(len(blocks))
        self._shared_starts = np.repeat(starts, launch.threads).astype(np.uint64)

    @contextmanager
    def only(self, some: Array) -> Iterator[None]:
        """Have only some of the active lanes be so."""
        before = self.active, self.all_active
        self.active = self.active & some
        self.all_active = bool(self.active.all())
        yield
        self.active, self.all_active = before

    def passing(self, guard: Guard) -> Array:
        """Return ``[count]`` bool, which lanes a guard lets pass, active or not."""
        return self.registers[guard.register.place] != guard.negated

    def wide(self, values: Array) -> Array:
        """Return ``[count]`` of what may be one value for all."""
        return values if len(values) == self.count else np.repeat(values, self.count)

    def write(self, place: int, values: Array) -> None:
        """Write a register where lanes are active."""
        values = self.wide(values)
        if not self.all_active:
            values = np.where(self.active, values, self.registers[place])
        self.registers[place] = values

    def special(self, name: str) -> Array:
        """Return a special register.

        Raises:
            NotImplementedError: It is not known here.
        """
        head, _, axis = name.partition(".")
        along = "xyz".find(axis) if axis else 0
        if head == "%tid":
            return _coordinate(self._threads, self.launch.block, along)
        if head == "%ctaid":
            return _coordinate(self._blocks, self.launch.grid, along)
        if head in ("%ntid", "%nctaid"):
            sizes = self.launch.block if head == "%ntid" else self.launch.grid
            return np.array([sizes[along]])
        raise NotImplementedError(name)

    def shared(self, offsets: Array, size: int) -> Array:
        """Return addresses of shared memory.

        Raises:
            MemoryFault: Some lie outside of it.
        """
        last = self._shared_bytes - size  # offsets below zero are large ones
        if np.any(self.active & (offsets > max(last, 0))) or last < 0:
            raise MemoryFault(f"beyond {self._shared_bytes} bytes of shared memory")
        return self._shared_starts + offsets

    def global_(self, addresses: Array, size: int) -> Array:
        """Return addresses of global memory.

        Raises:
            MemoryFault: Some lie outside of what may be touched.
        """
        addresses = self.wide(addresses)
        if self._allowed is not None:
            outside = self.active & ~self._allowed.hold(addresses, size)
            if outside.any():
                raise MemoryFault(f"{size} bytes at {addresses[outside][0]:#x}, which are no one's")
        return addresses

    def load(self, addresses: Array, size: int) -> Array:
        """Return ``[count, size]`` bytes; those of lanes that are not active are zeros."""
        found = np.zeros((self.count, size), np.uint8)
        found[self.active] = _memory(size)[_places(addresses[self.active], size)]
        return found

    def store(self, addresses: Array, values: Array) -> None:
        """Write ``[count, size]`` bytes where lanes are active."""
        size = values.shape[1]
        _memory(size)[_places(addresses[self.active], size)] = values[self.active]

    def check_warps(self) -> None:
        """Check that lanes of a warp are active together: they are about to exchange numbers."""
        active = self.active.reshape(-1, WARP)
        assert (active.all(1) | ~active.any(1)).all(), "a warp is split"

    def barrier(self) -> None:
        """Check that no thread of a block is missing: those that are active go on."""
        active = self.active.reshape(-1, self.launch.threads)
        waited_for = (self.counters < ENDED).reshape(-1, self.launch.threads)
        assert ((active == waited_for) | ~active.any(1, keepdims=True)).all(), "a thread is missing"


def _coordinate(numbers: Array, sizes: tuple[int, int, int], along: int) -> Array:
    return numbers // np.prod(sizes[:along], dtype=np.int64) % sizes[along]


def _nonsense(count: int, dtype: np.dtype) -> Array:
    """Return what has not been written: all bits are ones, so that fractions are no numbers."""
    ones = True if dtype.kind == "b" else np.iinfo(dtype).max
    return np.full(count, ones, dtype)


@cache
def _memory(size: int) -> Array:
    """Return all memory of this process, from :data:`_FIRST` on, in pieces of ``size`` bytes."""
    pieces = (_LAST - _FIRST) // size
    everything = (ctypes.c_uint8 * (pieces * size)).from_address(_FIRST)
    return np.ctypeslib.as_array(everything).reshape(pieces, size)


def _places(addresses: Array, size: int) -> Array:
    if (addresses % np.uint64(size)).any():
        raise MemoryFault(f"{size} bytes at an address that is no multiple of it")
    return (addresses - np.uint64(_FIRST)) // np.uint64(size)
