"""Operands as values of a type, and results as registers."""

from collections.abc import Callable

import numpy as np
from gpu.ptx.lanes import Array, Lanes
from gpu.ptx.text import Address, FloatBits, Kernel, Name, Number, Operand, Register

Read = Callable[[Lanes], Array]
Write = Callable[[Lanes, Array], None]
Step = Callable[[Lanes], None]

_SMALLEST_NORMAL = np.float32(2.0**-126)
_KINDS = {"b": "u", "u": "u", "s": "i", "f": "f"}


def number_type(name: str) -> np.dtype:
    """Return the type of numbers that a type of PTX holds: ``s32`` is int32, ``b16`` uint16.

    Raises:
        NotImplementedError: It is not known here.
    """
    if name == "pred":
        return np.dtype(bool)
    if name in ("b8", "u8", "s8") or name[1:] in ("16", "32", "64"):
        return np.dtype(f"{_KINDS[name[0]]}{int(name[1:]) // 8}")
    raise NotImplementedError(f"type {name}")


def bits_of(values: Array, size: int) -> Array:
    """Return values as bits of ``size`` bytes: narrower numbers are extended, wider ones cut."""
    if values.dtype == bool:
        return values
    if values.dtype.itemsize != size:
        values = values.astype(f"{values.dtype.kind}{size}")
    return values.view(f"u{size}")


def float_of_bf16(bits: Array) -> Array:
    """Return ``bfloat16`` numbers, given as uint16, as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_of_float(values: Array) -> Array:
    """Round to ``bfloat16``, to even where there are two nearest; the bits as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def flush(values: Array) -> Array:
    """Return float32 numbers too small for full precision as zeros; others are what they are."""
    if values.dtype != np.float32:
        return values
    tiny = np.abs(values) < _SMALLEST_NORMAL
    return np.where(tiny, np.copysign(np.float32(0), values), values) if tiny.any() else values


class Operands:
    """Makes what reads and writes a kernel's operands."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def read(self, operand: Operand, kind: str) -> Read:
        """Return what reads an operand as a type.

        Raises:
            NotImplementedError: It is not known here.
        """
        dtype = number_type(kind)
        if isinstance(operand, Register):
            return _register(operand, dtype)
        if isinstance(operand, FloatBits):
            constant = operand.bits.view(dtype)
        elif isinstance(operand, Number) and isinstance(operand.value, int) and dtype.kind in "ui":
            constant = _bits(operand.value, dtype)
        elif isinstance(operand, Number):
            constant = np.array([operand.value], dtype)
        elif isinstance(operand, Name) and operand.text.startswith("%"):
            name = operand.text
            return lambda lanes: lanes.special(name).astype(dtype)
        elif isinstance(operand, Name):
            constant = np.array([self._offset(operand.text)], dtype)
        else:
            raise NotImplementedError(operand)
        return lambda _: constant

    def write(self, operand: Operand) -> Write:
        """Return what writes a register."""
        if operand == Name("_"):
            return lambda lanes, values: None
        assert isinstance(operand, Register), operand
        place, size = operand.place, operand.dtype.itemsize
        return lambda lanes, values: lanes.write(place, bits_of(values, size))

    def address(self, operand: Operand, space: str, size: int) -> Read:
        """Return what reads addresses of ``size`` bytes in a kind of memory, and checks them."""
        assert isinstance(operand, Address), operand
        narrow = isinstance(operand.base, Register) and operand.base.dtype.itemsize == 4
        read = self.read(operand.base, "u32" if narrow else "u64")
        offset = _bits(operand.offset, np.dtype(np.uint64))
        check = {"shared": Lanes.shared, "global": Lanes.global_}[space]
        return lambda lanes: check(lanes, read(lanes).astype(np.uint64) + offset, size)

    def several(self, operand: Operand) -> tuple[Operand, ...]:
        """Return the members of a vector, or what is one itself."""
        return operand if isinstance(operand, tuple) else (operand,)

    def _offset(self, name: str) -> int:
        if name in self.kernel.shared:
            return self.kernel.shared[name]
        if name in self.kernel.parameters:
            return self.kernel.parameters[name].offset
        raise NotImplementedError(name)


def _register(register: Register, dtype: np.dtype) -> Read:
    place, size = register.place, dtype.itemsize
    if register.dtype == bool:
        return lambda lanes: lanes.registers[place]
    if register.dtype.itemsize == size:
        return lambda lanes: lanes.registers[place].view(dtype)
    return lambda lanes: lanes.registers[place].astype(f"u{size}").view(dtype)


def _bits(value: int, dtype: np.dtype) -> Array:
    size = dtype.itemsize
    return np.array([value % (1 << 8 * size)], f"u{size}").view(dtype)
