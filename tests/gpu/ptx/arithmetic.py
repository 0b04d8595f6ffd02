"""Sums, products, bits and functions of numbers.

Functions that PTX approximates are as good as numpy's here.
"""

from collections.abc import Callable

import numpy as np
from gpu.ptx.lanes import Array, Lanes
from gpu.ptx.text import Instruction
from gpu.ptx.values import Operands, Step, flush, number_type


def _fused(a: Array, b: Array, c: Array) -> Array:
    # Products of two are exact in float64; what is added may round a second time.
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _divided(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return a / b
    return np.where(b == 0, np.iinfo(a.dtype).max, a // np.maximum(b, 1)).astype(a.dtype)


def _largest(a: Array, b: Array) -> Array:
    return np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b)


def _inserted(a: Array, b: Array, start: Array, length: Array) -> Array:
    """``bfi``: the lowest bits of ``a`` in place of some of ``b``'s."""
    ones = (np.uint64(1) << length.astype(np.uint64)) - np.uint64(1)
    mask = ones << start.astype(np.uint64)
    moved = a.astype(np.uint64) << start.astype(np.uint64)
    return (b.astype(np.uint64) & ~mask | moved & mask).astype(a.dtype)


def _shifted(shift: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Return a shift of unsigned numbers, by more than they have bits too."""

    def shifted(a: Array, by: Array) -> Array:
        bits = 8 * a.dtype.itemsize
        return np.where(by < bits, shift(a, np.minimum(by, bits - 1).astype(a.dtype)), 0)

    return shifted


_WHOLE = frozenset({"s32", "s64", "u32", "u64", "b32", "b64"})
_UNSIGNED = frozenset({"u32", "u64", "b32", "b64"})
_BITS = frozenset({"b32", "b64", "pred"})
_APPROXIMATE = {"approx", "ftz"}

Operation = Callable[..., Array]

OPERATIONS: dict[str, tuple[Operation, frozenset[str], set[str]]] = {
    # What it computes, of which types, and what may be said of how.
    "add": (np.add, _WHOLE | {"f32"}, {"ftz"}),
    "and": (np.bitwise_and, _BITS, set()),
    "bfi": (_inserted, frozenset({"b32"}), set()),
    "div": (_divided, frozenset({"f32", "u32"}), _APPROXIMATE),
    "ex2": (np.exp2, frozenset({"f32"}), _APPROXIMATE),
    "fma": (_fused, frozenset({"f32"}), {"rn", "ftz"}),
    "lg2": (np.log2, frozenset({"f32"}), _APPROXIMATE),
    "mad": (lambda a, b, c: a * b + c, _WHOLE, {"lo", "wide"}),
    "max": (_largest, frozenset({"f32", "s32", "u32"}), {"ftz"}),
    "min": (np.minimum, frozenset({"s32", "u32"}), set()),
    "mul": (np.multiply, _WHOLE | {"f32", "f64"}, {"lo", "hi", "wide", "ftz"}),
    "neg": (np.negative, frozenset({"s32", "f32"}), {"ftz"}),
    "not": (np.invert, _BITS, set()),
    "or": (np.bitwise_or, _BITS, set()),
    "rcp": (np.reciprocal, frozenset({"f32"}), _APPROXIMATE),
    "shl": (_shifted(np.left_shift), _UNSIGNED, set()),
    "shr": (_shifted(np.right_shift), _UNSIGNED, set()),
    "sub": (np.subtract, _WHOLE | {"f32"}, {"ftz"}),
    "tanh": (np.tanh, frozenset({"f32"}), _APPROXIMATE),
    "xor": (np.bitwise_xor, _BITS, set()),
}

_COUNTS = {"bfi": (2, 3), "shl": (1,), "shr": (1,)}
"""Operands that are 32-bit numbers whatever the type is."""


def arithmetic(instruction: Instruction, operands: Operands) -> Step:
    """Return what an operation of :data:`OPERATIONS` does.

    Raises:
        NotImplementedError: It is of a kind that is not known here.
    """
    head, kind = instruction.name[0], instruction.type
    operation, types, manners = OPERATIONS[head]
    how = set(instruction.name[1:-1])
    if kind not in types or not how <= manners:
        raise NotImplementedError("another kind of it")
    kinds = ["u32" if i in _COUNTS.get(head, ()) else kind for i in range(4)]
    if how & {"hi", "wide"}:
        operation, kinds = _wider(operation, "hi" in how, kind)
    sources = zip(instruction.operands[1:], kinds, strict=False)
    reads = [operands.read(source, own) for source, own in sources]
    write = operands.write(instruction.operands[0])
    flushed = flush if "ftz" in how else np.asarray

    def step(lanes: Lanes) -> None:
        values = [flushed(read(lanes)) for read in reads]
        write(lanes, flushed(operation(*values)))

    return step


def _wider(operation: Operation, upper: bool, kind: str) -> tuple[Operation, list[str]]:
    """Return an operation over products of twice the size, or their upper half, and its types."""
    narrow, bits = number_type(kind), int(kind[1:])
    if bits > 32:
        raise NotImplementedError("products of 128 bits")
    wide = np.dtype(f"{narrow.kind}{narrow.itemsize * 2}")

    def whole(a: Array, b: Array, *c: Array) -> Array:
        return operation(a.astype(wide), b.astype(wide), *c)

    def upper_half(a: Array, b: Array) -> Array:
        return (whole(a, b) >> wide.type(bits)).astype(narrow)

    return (upper_half, [kind, kind]) if upper else (whole, [kind, kind, f"{kind[0]}{2 * bits}"])
