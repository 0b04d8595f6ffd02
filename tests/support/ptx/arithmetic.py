"""Sums, products, bits and functions of numbers.

Functions that PTX approximates are exact here, and products added in one step are rounded once.
"""

from collections.abc import Callable

import numpy as np

from support.ptx.lanes import Array, Lanes
from support.ptx.text import Instruction
from support.ptx.values import Operands, Step, number_type

_SMALLEST_NORMAL = np.float32(2.0**-126)


def _fused(a: Array, b: Array, c: Array) -> Array:
    if a.dtype == np.float32:  # products of two are exact in float64
        return (a.astype(np.float64) * b + c).astype(np.float32)
    raise NotImplementedError("fused products of wide numbers")


def _divided(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return a / b
    if a.dtype.kind == "i":
        raise NotImplementedError("quotients of signed numbers")
    return np.where(b == 0, np.iinfo(a.dtype).max, a // np.maximum(b, 1)).astype(a.dtype)


def _remainder(a: Array, b: Array) -> Array:
    if a.dtype.kind == "i":
        raise NotImplementedError("remainders of signed numbers")
    return np.where(b == 0, a, a % np.maximum(b, 1)).astype(a.dtype)


def _largest(a: Array, b: Array) -> Array:
    return np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b)


def _smallest(a: Array, b: Array) -> Array:
    return np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b)


def _inverse(a: Array) -> Array:
    return a.dtype.type(1) / a


def _inverse_root(a: Array) -> Array:
    return a.dtype.type(1) / np.sqrt(a)


def _inserted(a: Array, b: Array, start: Array, length: Array) -> Array:
    """``bfi``: the lowest bits of ``a`` in place of some of ``b``'s."""
    mask = _ones(length) << start.astype(np.uint64)
    moved = a.astype(np.uint64) << start.astype(np.uint64)
    return (b.astype(np.uint64) & ~mask | moved & mask).astype(a.dtype)


def _extracted(a: Array, start: Array, length: Array) -> Array:
    """``bfe`` of unsigned numbers."""
    if a.dtype.kind == "i":
        raise NotImplementedError("bits of signed numbers")
    return (a.astype(np.uint64) >> start.astype(np.uint64) & _ones(length)).astype(a.dtype)


def _permuted(a: Array, b: Array, choice: Array) -> Array:
    """``prmt``: any four of the eight bytes."""
    octets = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    found = np.zeros(1, np.uint64)
    for place in range(4):
        which = choice.astype(np.uint64) >> np.uint64(4 * place) & np.uint64(15)
        if (which > 7).any():
            raise NotImplementedError("signs of bytes")
        octet = octets >> which * np.uint64(8) & np.uint64(255)
        found = found | octet << np.uint64(8 * place)
    return found.astype(np.uint32)


def _ones(length: Array) -> Array:
    return (np.uint64(1) << length.astype(np.uint64)) - np.uint64(1)


def _shifted_left(a: Array, by: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    return np.where(by < bits, a << np.minimum(by, bits - 1).astype(a.dtype), 0).astype(a.dtype)


def _shifted_right(a: Array, by: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    moved = a >> np.minimum(by, bits - 1).astype(a.dtype)
    return moved if a.dtype.kind == "i" else np.where(by < bits, moved, 0).astype(a.dtype)


def _set_bits(a: Array) -> Array:
    return np.bitwise_count(a).astype(np.uint32)


OPERATIONS: dict[str, Callable[..., Array]] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "bfe": _extracted,
    "bfi": _inserted,
    "cos": np.cos,
    "div": _divided,
    "ex2": np.exp2,
    "fma": _fused,
    "lg2": np.log2,
    "mad": lambda a, b, c: a * b + c,
    "max": _largest,
    "min": _smallest,
    "mul": np.multiply,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "popc": _set_bits,
    "prmt": _permuted,
    "rcp": _inverse,
    "rem": _remainder,
    "rsqrt": _inverse_root,
    "shl": _shifted_left,
    "shr": _shifted_right,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "sub": np.subtract,
    "tanh": np.tanh,
    "xor": np.bitwise_xor,
}

_NARROW = {"bfe": (1, 2), "bfi": (2, 3), "shl": (1,), "shr": (1,)}
"""Operands that are 32-bit numbers whatever the type is."""

_UNKNOWN = {"sat", "cc", "rz", "rm", "rp"}


def arithmetic(instruction: Instruction, operands: Operands) -> Step:
    """Return what an operation of :data:`OPERATIONS` does.

    Raises:
        NotImplementedError: It is of a kind that is not known here.
    """
    head, kind = instruction.name[0], instruction.type
    how = set(instruction.name[1:-1])
    if how & _UNKNOWN:
        raise NotImplementedError("such rounding")
    operation = OPERATIONS[head]
    kinds = ["u32" if i in _NARROW.get(head, ()) else kind for i in range(4)]
    if how & {"hi", "wide"}:
        operation, kinds = _wider(operation, "hi" in how, kind)
    sources = zip(instruction.operands[1:], kinds, strict=False)
    reads = [operands.read(source, own) for source, own in sources]
    write = operands.write(instruction.operands[0])
    flushed = "ftz" in how and number_type(kind) == np.float32

    def step(lanes: Lanes) -> None:
        values = [read(lanes) for read in reads]
        with np.errstate(all="ignore"):
            found = operation(*map(_flush, values)) if flushed else operation(*values)
        write(lanes, _flush(found) if flushed else found)

    return step


def _flush(values: Array) -> Array:
    """Return numbers that are too small for their type's full precision as zeros."""
    tiny = np.abs(values) < _SMALLEST_NORMAL
    return np.where(tiny, np.copysign(np.float32(0), values), values) if tiny.any() else values


def _wider(
    operation: Callable[..., Array], upper: bool, kind: str
) -> tuple[Callable[..., Array], list[str]]:
    """Return an operation over products of twice the size, or their upper half, and its types."""
    narrow, bits = number_type(kind), int(kind[1:])
    if bits > 32:
        raise NotImplementedError("products of 128 bits")
    wide = np.dtype(f"{narrow.kind}{narrow.itemsize * 2}")
    if not upper:
        kinds = [kind, kind, f"{kind[0]}{2 * bits}"]
        return lambda a, b, *c: operation(a.astype(wide), b.astype(wide), *c), kinds

    def upper_half(a: Array, b: Array, *c: Array) -> Array:
        product = (a.astype(wide) * b.astype(wide) >> wide.type(bits)).astype(narrow)
        return product + c[0] if c else product

    return upper_half, [kind] * 3
