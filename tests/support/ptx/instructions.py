"""What instructions do to lanes (PTX ISA 9.0, chapter 9)."""

from collections.abc import Callable

import numpy as np

from support.ptx.arithmetic import OPERATIONS, arithmetic
from support.ptx.lanes import WARP, Array, Lanes
from support.ptx.matrices import MATRICES
from support.ptx.text import Address, Instruction, Name, Number, Register
from support.ptx.values import (
    Operands,
    Read,
    Step,
    bf16_of_float,
    bits_of,
    float_of_bf16,
    number_type,
)

_COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_TRUTH = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_ROUNDED = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


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
    place, negated = guard.register.place, guard.negated

    def guarded(lanes: Lanes) -> None:
        before = lanes.active, lanes.all_active
        allowed = lanes.registers[place] != negated
        lanes.active = lanes.active & allowed
        if lanes.active.any():
            lanes.all_active = bool(lanes.active.all())
            step(lanes)
        lanes.active, lanes.all_active = before

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


def _nothing(instruction: Instruction, operands: Operands) -> Step:
    """Order among kernels or in memory, which are in order here."""
    return lambda lanes: None


def _barrier(instruction: Instruction, operands: Operands) -> Step:
    if instruction.name[1] == "warp":
        return _nothing(instruction, operands)
    if instruction.name[1:] != ("sync",) or len(instruction.operands) != 1:
        raise NotImplementedError("barrier of some of the threads")
    return Lanes.barrier


def _move(instruction: Instruction, operands: Operands) -> Step:
    to, source = instruction.operands
    kind = instruction.type
    if isinstance(to, tuple) or isinstance(source, tuple):
        return _repack(instruction, operands)
    read, write = operands.read(source, kind), operands.write(to)
    return lambda lanes: write(lanes, read(lanes))


def _repack(instruction: Instruction, operands: Operands) -> Step:
    """Two halves as a whole, or a whole as halves; the lower one comes first."""
    to, source = instruction.operands
    whole = number_type(instruction.type)
    half = np.dtype(f"u{whole.itemsize // 2}")
    if isinstance(source, tuple):
        low, high = (operands.read(part, f"u{half.itemsize * 8}") for part in source)
        write = operands.write(to)

        def pack(lanes: Lanes) -> None:
            parts = np.stack([lanes.wide(low(lanes)), lanes.wide(high(lanes))], 1)
            write(lanes, parts.view(whole)[:, 0])

        return pack
    read = operands.read(source, instruction.type)
    writes = [operands.write(part) for part in operands.several(to)]

    def unpack(lanes: Lanes) -> None:
        parts = np.ascontiguousarray(read(lanes)).view(half).reshape(-1, 2)
        for place, write in enumerate(writes):
            write(lanes, parts[:, place])

    return unpack


def _to_generic(instruction: Instruction, operands: Operands) -> Step:
    if "shared" in instruction.name or "local" in instruction.name:
        raise NotImplementedError("generic addresses of such memory")
    return _move(instruction, operands)


def _address(operand: object, space: str, size: int, operands: Operands) -> Read:
    """Return what reads addresses of ``size`` bytes, checked."""
    assert isinstance(operand, Address), operand
    narrow = isinstance(operand.base, Register) and operand.base.dtype.itemsize == 4
    read = operands.read(operand.base, "u32" if narrow else "u64")
    offset = np.array([operand.offset % (1 << 64)], np.uint64)
    check = Lanes.shared if space == "shared" else Lanes.global_
    return lambda lanes: check(lanes, read(lanes).astype(np.uint64) + offset, size)


def _load(instruction: Instruction, operands: Operands) -> Step:
    to, source = instruction.operands
    dtype = number_type(instruction.type)
    writes = [operands.write(part) for part in operands.several(to)]
    size = dtype.itemsize * len(writes)
    if "param" in instruction.name:
        found = _parameter(source, size, operands)
    else:
        space = "shared" if "shared" in instruction.name else "global"
        address = _address(source, space, size, operands)

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
    to, source = instruction.operands
    dtype = number_type(instruction.type)
    reads = [operands.read(part, instruction.type) for part in operands.several(source)]
    size = dtype.itemsize * len(reads)
    space = "shared" if "shared" in instruction.name else "global"
    address = _address(to, space, size, operands)

    def store(lanes: Lanes) -> None:
        values = np.stack([lanes.wide(read(lanes)) for read in reads], 1)
        lanes.store(address(lanes), values.view(np.uint8))

    return store


def _copy(instruction: Instruction, operands: Operands) -> Step:
    """``cp.async``: done at once; how many of its bytes are read is its fourth operand."""
    if instruction.name[2] in ("commit_group", "wait_group", "wait_all"):
        return _nothing(instruction, operands)
    to, source, length, *read_bytes = instruction.operands
    assert isinstance(length, Number), instruction.text
    size = int(length.value)
    written = _address(to, "shared", size, operands)
    read = _address(source, "global", size, operands)
    given = operands.read(read_bytes[0] if read_bytes else length, "u32")

    def copy(lanes: Lanes) -> None:
        before = lanes.active, lanes.all_active
        some = lanes.wide(given(lanes))
        lanes.active, lanes.all_active = before[0] & (some > 0), False
        found = lanes.load(read(lanes), size)
        lanes.active = before[0]
        found[np.arange(size) >= some[:, None]] = 0
        lanes.store(written(lanes), found)
        lanes.active, lanes.all_active = before

    return copy


def _compare(instruction: Instruction, operands: Operands) -> Step:
    name = instruction.name[1]
    unordered = len(name) == 3  # neu, ltu ...: true of what is no number
    compare = _COMPARISONS[name[:2]]
    truth = next((_TRUTH[part] for part in instruction.name[2:-1] if part in _TRUTH), None)
    if isinstance(instruction.operands[0], Name):
        raise NotImplementedError("two predicates")
    write = operands.write(instruction.operands[0])
    left, right = (operands.read(part, instruction.type) for part in instruction.operands[1:3])
    also = operands.read(instruction.operands[3], "pred") if truth else None
    is_float = number_type(instruction.type).kind == "f"

    def step(lanes: Lanes) -> None:
        a, b = left(lanes), right(lanes)
        found = compare(a, b)
        if is_float:
            no_number = np.isnan(a) | np.isnan(b)
            found = found | no_number if unordered else found & ~no_number
        if truth is not None and also is not None:
            found = truth(found, also(lanes))
        write(lanes, found)

    return step


def _select(instruction: Instruction, operands: Operands) -> Step:
    to, yes, no, which = instruction.operands
    kind = instruction.type
    reads = operands.read(which, "pred"), operands.read(yes, kind), operands.read(no, kind)
    write = operands.write(to)
    return lambda lanes: write(lanes, np.where(*(read(lanes) for read in reads)))


def _convert(instruction: Instruction, operands: Operands) -> Step:
    *how, to, source = instruction.name[1:]
    write = operands.write(instruction.operands[0])
    if to == "bf16x2":  # the first operand goes to the upper half
        high, low = (operands.read(part, source) for part in instruction.operands[1:])

        def pack(lanes: Lanes) -> None:
            halves = [bf16_of_float(lanes.wide(part(lanes))) for part in (low, high)]
            write(lanes, np.stack(halves, 1).view(np.uint32)[:, 0])

        return pack
    if to == "f16x2":
        high, low = (operands.read(part, source) for part in instruction.operands[1:])

        def pack_halves(lanes: Lanes) -> None:
            halves = [lanes.wide(part(lanes)).astype(np.float16) for part in (low, high)]
            write(lanes, np.stack(halves, 1).view(np.uint32)[:, 0])

        return pack_halves
    read = operands.read(instruction.operands[1], "u16" if source == "bf16" else source)
    convert = _conversion(how, to, source)
    return lambda lanes: write(lanes, convert(read(lanes)))


def _conversion(how: list[str], to: str, source: str) -> Callable[[Array], Array]:
    if to == "bf16" and source == "f32":
        return bf16_of_float
    if to == "f32" and source == "bf16":
        return float_of_bf16
    dtype, before = number_type(to), number_type(source)
    if "sat" in how:
        raise NotImplementedError("saturation")
    if before.kind != "f" or dtype.kind == "f":
        return lambda values: values.astype(dtype)
    rounded = next(_ROUNDED[part] for part in how if part in _ROUNDED)
    limits = np.iinfo(dtype)

    def to_integer(values: Array) -> Array:
        found = np.nan_to_num(rounded(values.astype(np.float64)), nan=0.0)
        # The largest of 64 bits is no float64: what is beyond is cut after rounding.
        return np.clip(found, float(limits.min), np.nextafter(float(limits.max), 0)).astype(dtype)

    return to_integer


def _shuffle(instruction: Instruction, operands: Operands) -> Step:
    mode = instruction.name[2]
    to, source, other, limits, *_ = instruction.operands
    read = operands.read(source, "u32")
    by, clamp = operands.read(other, "u32"), operands.read(limits, "u32")
    write = operands.write(to)

    def shuffle(lanes: Lanes) -> None:
        lane = np.arange(lanes.count) % WARP
        distance = by(lanes).astype(np.int64)
        bounds = clamp(lanes).astype(np.int64)
        segment = bounds >> 8 & 31
        last = lane & segment | bounds & 31 & ~segment
        wanted = {
            "bfly": lane ^ distance,
            "down": lane + distance,
            "up": lane - distance,
            "idx": lane & segment | distance & ~segment,
        }[mode]
        within = wanted >= last if mode == "up" else wanted <= last
        places = np.arange(lanes.count) - lane + np.where(within, wanted, lane)
        assert (lanes.active[places] | ~lanes.active).all(), "a value of a thread that is away"
        write(lanes, lanes.wide(read(lanes))[places])

    return shuffle


def _vote(instruction: Instruction, operands: Operands) -> Step:
    if instruction.name[:2] != ("vote", "sync") or instruction.name[2] != "ballot":
        raise NotImplementedError("votes of other kinds")
    write = operands.write(instruction.operands[0])
    read = operands.read(instruction.operands[1], "pred")

    def vote(lanes: Lanes) -> None:
        ayes = (lanes.wide(read(lanes)) & lanes.active).reshape(-1, WARP)
        bits = (ayes.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(1)
        write(lanes, np.repeat(bits_of(bits, 4), WARP))

    return vote


_MEANINGS: dict[str, Callable[[Instruction, Operands], Step]] = {
    "bar": _barrier,
    "barrier": _barrier,
    "cp": _copy,
    "cvt": _convert,
    "cvta": _to_generic,
    "griddepcontrol": _nothing,
    "ld": _load,
    "membar": _nothing,
    "mov": _move,
    "selp": _select,
    "setp": _compare,
    "shfl": _shuffle,
    "st": _store,
    "vote": _vote,
}
