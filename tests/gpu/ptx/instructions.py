"""What instructions do to lanes (PTX ISA 9.0, chapter 9)."""

from collections.abc import Callable

import numpy as np
from gpu.ptx.arithmetic import OPERATIONS, arithmetic
from gpu.ptx.lanes import WARP, Array, Lanes
from gpu.ptx.matrices import MATRICES
from gpu.ptx.text import Address, Instruction, Number, Register
from gpu.ptx.values import Operands, Read, Step, bf16_of_float, float_of_bf16, flush, number_type

_COPIED = 16
_COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def meaning(instruction: Instruction, operands: Operands) -> Step:
    """Return what an instruction does where lanes are active.

    Raises:
        NotImplementedError: It is not known here.
    """
    try:
        step = _unguarded(instruction, operands)
    except NotImplementedError as error:
        raise NotImplementedError(f"{instruction.text}: {error}") from error
    guard = instruction.guard
    if guard is None:
        return step

    def guarded(lanes: Lanes) -> None:
        with lanes.only(lanes.passing(guard)):
            if lanes.active.any():
                step(lanes)

    return guarded


def _unguarded(instruction: Instruction, operands: Operands) -> Step:
    head = instruction.name[0]
    if head in MATRICES:
        return MATRICES[head](instruction, operands)
    if head in _MEANINGS:
        return _MEANINGS[head](instruction, operands)
    if head in OPERATIONS:
        return arithmetic(instruction, operands)
    raise NotImplementedError(head)


def _said(instruction: Instruction, *known: str) -> set[str]:
    """Return what is said between an instruction's name and its type.

    Raises:
        NotImplementedError: Something that is not known here.
    """
    said = set(instruction.name[1:-1])
    if not said <= set(known):
        raise NotImplementedError(f"{said - set(known)}")
    return said


def _nothing(instruction: Instruction, operands: Operands) -> Step:
    """Order among kernels, which are in order here."""
    return lambda lanes: None


def _barrier(instruction: Instruction, operands: Operands) -> Step:
    if instruction.name[1:] != ("sync",) or len(instruction.operands) != 1:
        raise NotImplementedError("barrier of some of the threads")
    return Lanes.barrier


def _move(instruction: Instruction, operands: Operands) -> Step:
    to, source = instruction.operands
    if isinstance(to, tuple) or isinstance(source, tuple):
        return _repack(instruction, operands)
    _said(instruction, "to", "global")  # what is global has the same address as any
    read, write = operands.read(source, instruction.type), operands.write(to)
    return lambda lanes: write(lanes, read(lanes))


def _repack(instruction: Instruction, operands: Operands) -> Step:
    """Two halves as a whole, or a whole as halves; the lower one comes first."""
    to, source = instruction.operands
    whole = number_type(instruction.type)
    half = np.dtype(f"u{whole.itemsize // 2}")
    if isinstance(source, tuple):
        parts = [operands.read(part, f"u{half.itemsize * 8}") for part in source]
        write = operands.write(to)
        return lambda lanes: write(lanes, _joined([part(lanes) for part in parts], lanes, whole))
    read = operands.read(source, instruction.type)
    writes = [operands.write(part) for part in operands.several(to)]

    def unpack(lanes: Lanes) -> None:
        found = np.ascontiguousarray(read(lanes)).view(half).reshape(-1, 2)
        for place, write in enumerate(writes):
            write(lanes, found[:, place])

    return unpack


def _joined(halves: list[Array], lanes: Lanes, whole: np.dtype) -> Array:
    return np.stack([lanes.wide(half) for half in halves], 1).view(whole)[:, 0]


def _load(instruction: Instruction, operands: Operands) -> Step:
    said = _said(instruction, "param", "shared", "global", "nc", "ca", "v2", "v4")
    to, source = instruction.operands
    dtype = number_type(instruction.type)
    writes = [operands.write(part) for part in operands.several(to)]
    size = dtype.itemsize * len(writes)
    if "param" in said:
        found = _parameter(source, size, operands)
    else:
        space = "shared" if "shared" in said else "global"
        address = operands.address(source, space, size)

        def found(lanes: Lanes) -> Array:
            return lanes.load(address(lanes), size)

    def load(lanes: Lanes) -> None:
        values = found(lanes).view(dtype)
        for place, write in enumerate(writes):
            write(lanes, np.ascontiguousarray(values[:, place]))

    return load


def _parameter(source: object, size: int, operands: Operands) -> Read:
    assert isinstance(source, Address), source
    base = operands.read(source.base, "u64")

    def read(lanes: Lanes) -> Array:
        offsets = (lanes.wide(base(lanes)).astype(np.int64) + source.offset) * lanes.active
        values = np.frombuffer(lanes.launch.parameters, np.uint8)
        return values[offsets[:, None] + np.arange(size)]

    return read


def _store(instruction: Instruction, operands: Operands) -> Step:
    said = _said(instruction, "shared", "global", "v2", "v4")
    to, source = instruction.operands
    dtype = number_type(instruction.type)
    reads = [operands.read(part, instruction.type) for part in operands.several(source)]
    space = "shared" if "shared" in said else "global"
    address = operands.address(to, space, dtype.itemsize * len(reads))

    def store(lanes: Lanes) -> None:
        values = np.stack([lanes.wide(read(lanes)) for read in reads], 1)
        lanes.store(address(lanes), values.view(np.uint8))

    return store


def _copy(instruction: Instruction, operands: Operands) -> Step:
    """``cp.async``, done at once, whoever waits for it; zeros stand in for what is not read."""
    if instruction.name[2] in ("commit_group", "wait_group"):
        return _nothing(instruction, operands)
    if instruction.name[:5] != ("cp", "async", "cg", "shared", "global"):
        raise NotImplementedError("another copy")
    to, source, size, *given = instruction.operands
    if size != Number(_COPIED) or not all(_is_count(some) for some in given):
        raise NotImplementedError("another size, or a policy")
    written = operands.address(to, "shared", _COPIED)
    read = operands.address(source, "global", _COPIED)
    count = operands.read(given[0] if given else size, "u32")

    def copy(lanes: Lanes) -> None:
        some = lanes.wide(count(lanes))
        with lanes.only(some > 0):
            found = lanes.load(read(lanes), _COPIED)
        lanes.store(written(lanes), found * (np.arange(_COPIED) < some[:, None]))

    return copy


def _is_count(operand: object) -> bool:
    if isinstance(operand, Register):  # predicates and policies have other widths
        return operand.dtype.itemsize == 4
    return isinstance(operand, Number)


def _compare(instruction: Instruction, operands: Operands) -> Step:
    name = instruction.name[1]
    unordered = len(name) == 3  # neu, ltu ...: true of what is no number
    said = _said(instruction, name, "ftz")
    if name[:2] not in _COMPARISONS or name[2:] not in ("", "u"):
        raise NotImplementedError(name)
    compare = _COMPARISONS[name[:2]]
    to, *sources = instruction.operands
    write = operands.write(to)
    left, right = (operands.read(part, instruction.type) for part in sources)
    flushed = flush if "ftz" in said else np.asarray

    def step(lanes: Lanes) -> None:
        a, b = flushed(left(lanes)), flushed(right(lanes))
        found = compare(a, b)
        if a.dtype.kind == "f":
            no_number = np.isnan(a) | np.isnan(b)
            found = found | no_number if unordered else found & ~no_number
        write(lanes, found)

    return step


def _select(instruction: Instruction, operands: Operands) -> Step:
    to, yes, no, which = instruction.operands
    kind = instruction.type
    _said(instruction)
    reads = operands.read(which, "pred"), operands.read(yes, kind), operands.read(no, kind)
    write = operands.write(to)
    return lambda lanes: write(lanes, np.where(*(read(lanes) for read in reads)))


_ROUNDED: dict[str, Callable[[Array], Array]] = {
    "bf16": bf16_of_float,
    "f16": lambda values: values.astype(np.float16),
}


def _convert(instruction: Instruction, operands: Operands) -> Step:
    to, source = instruction.name[-2:]
    write = operands.write(instruction.operands[0])
    if to in ("bf16x2", "f16x2"):  # the first operand goes to the upper half
        _said(instruction, "rn", to)
        rounded = _ROUNDED[to.removesuffix("x2")]
        parts = [operands.read(part, source) for part in reversed(instruction.operands[1:])]
        whole = np.dtype(np.uint32)
        return lambda lanes: write(
            lanes, _joined([rounded(part(lanes)) for part in parts], lanes, whole)
        )
    read = operands.read(instruction.operands[1], "u16" if source == "bf16" else source)
    convert = _conversion(instruction, to, source)
    return lambda lanes: write(lanes, convert(read(lanes)))


def _conversion(instruction: Instruction, to: str, source: str) -> Callable[[Array], Array]:
    said = _said(instruction, "rn", "ftz", to)
    if (to, source) == ("f32", "bf16"):
        return float_of_bf16
    if to in _ROUNDED and source == "f32" and "rn" in said:
        return _ROUNDED[to]
    dtype, before = number_type(to), number_type(source)
    if (dtype.kind == "f") != (before.kind == "f"):
        raise NotImplementedError("between fractions and whole numbers")
    narrowed = dtype.kind == "f" and dtype.itemsize < before.itemsize
    if narrowed != ("rn" in said):
        raise NotImplementedError("another rounding")
    flushed = flush if "ftz" in said else np.asarray
    return lambda values: flushed(flushed(values).astype(dtype))


def _shuffle(instruction: Instruction, operands: Operands) -> Step:
    if instruction.name != ("shfl", "sync", "bfly", "b32"):
        raise NotImplementedError("another exchange")
    to, source, other, bounds, members = instruction.operands
    if not isinstance(bounds, Number) or bounds.value != WARP - 1:
        raise NotImplementedError("parts of a warp")
    if not isinstance(members, Number) or members.value not in (-1, (1 << WARP) - 1):
        raise NotImplementedError("some of a warp")
    read, by, write = operands.read(source, "u32"), operands.read(other, "u32"), operands.write(to)

    def shuffle(lanes: Lanes) -> None:
        lanes.check_warps()
        places = np.arange(lanes.count) ^ (by(lanes).astype(np.int64) & (WARP - 1))
        write(lanes, lanes.wide(read(lanes))[places])

    return shuffle


_MEANINGS: dict[str, Callable[[Instruction, Operands], Step]] = {
    "bar": _barrier,
    "barrier": _barrier,
    "cp": _copy,
    "cvt": _convert,
    "cvta": _move,
    "griddepcontrol": _nothing,
    "ld": _load,
    "mov": _move,
    "selp": _select,
    "setp": _compare,
    "shfl": _shuffle,
    "st": _store,
}
