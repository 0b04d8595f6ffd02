"""Matrices that a warp holds together.

Lane ``4 * g + t`` of a warp has, of a matrix of eight rows, row ``g`` and columns ``2 * t`` and
``2 * t + 1``: so the lanes in order hold the matrix row by row.
"""

from collections.abc import Callable

import numpy as np
from gpu.ptx.lanes import WARP, Array, Lanes
from gpu.ptx.text import Instruction
from gpu.ptx.values import Operands, Read, Step, float_of_bf16

_ROW_BYTES = 16
_FOUR_MATRICES = ("m8n8", "x4", "shared", "b16")


def _load(instruction: Instruction, operands: Operands) -> Step:
    """``ldmatrix``: lane ``8 * m + r`` says where row ``r`` of matrix ``m`` is."""
    turned = ("trans",) if "trans" in instruction.name else ()
    if instruction.name != ("ldmatrix", "sync", "aligned", *turned, *_FOUR_MATRICES):
        raise NotImplementedError("other matrices")
    to, source = instruction.operands
    address = operands.address(source, "shared", _ROW_BYTES)
    writes = [operands.write(part) for part in operands.several(to)]

    def load(lanes: Lanes) -> None:
        lanes.check_warps()
        rows = lanes.load(address(lanes), _ROW_BYTES)
        matrices = rows.view(np.uint16).reshape(-1, 4, 8, 8)  # warp, matrix, row, column
        if turned:
            matrices = matrices.transpose(0, 1, 3, 2)
        for number, write in enumerate(writes):
            own = np.ascontiguousarray(matrices[:, number])
            write(lanes, own.reshape(-1).view(np.uint32))

    return load


def _store(instruction: Instruction, operands: Operands) -> Step:
    """``stmatrix``, the way back."""
    if instruction.name != ("stmatrix", "sync", "aligned", *_FOUR_MATRICES):
        raise NotImplementedError("other matrices")
    to, source = instruction.operands
    address = operands.address(to, "shared", _ROW_BYTES)
    reads = [operands.read(part, "u32") for part in operands.several(source)]

    def store(lanes: Lanes) -> None:
        lanes.check_warps()
        parts = np.stack([lanes.wide(read(lanes)).reshape(-1, WARP) for read in reads], 1)
        rows = np.ascontiguousarray(parts).view(np.uint8).reshape(lanes.count, _ROW_BYTES)
        lanes.store(address(lanes), rows)

    return store


def _multiply(instruction: Instruction, operands: Operands) -> Step:
    """``mma``: ``D[16, 8] = A[16, 16] @ B[16, 8] + C[16, 8]`` in every warp.

    ``A`` is four matrices of eight rows, the left ones first, then the right ones; ``B`` two, its
    columns as rows; ``C`` and ``D`` two, with numbers of four bytes.
    """
    name = instruction.name
    shape = ("mma", "sync", "aligned", "m16n8k16", "row", "col", "f32")
    if name[:7] != shape or name[-1] != "f32" or name[7:9] not in (("bf16",) * 2, ("f16",) * 2):
        raise NotImplementedError("other products")
    number = float_of_bf16 if name[7] == "bf16" else _float_of_f16
    to, left, right, added = map(operands.several, instruction.operands)
    reads_a, reads_b = ([operands.read(part, "u32") for part in side] for side in (left, right))
    reads_c = [operands.read(part, "f32") for part in added]
    writes = [operands.write(part) for part in to]

    def eight_rows(lanes: Lanes, read: Read) -> Array:
        halves = np.ascontiguousarray(lanes.wide(read(lanes))).view(np.uint16)
        return number(halves).reshape(-1, 8, 8).astype(np.float64)

    def multiply(lanes: Lanes) -> None:
        lanes.check_warps()
        a = [eight_rows(lanes, read) for read in reads_a]
        left = np.block([[a[0], a[2]], [a[1], a[3]]])
        b = [eight_rows(lanes, read) for read in reads_b]
        right = np.concatenate(b, axis=2).transpose(0, 2, 1)
        c = np.stack([lanes.wide(read(lanes)) for read in reads_c], 1)
        pairs = c.reshape(-1, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4)  # warp, half, row, lane, column
        found = left @ right + pairs.reshape(-1, 16, 8)
        found = found.astype(np.float32).reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4)
        found = found.reshape(lanes.count, 4)
        for place, write in enumerate(writes):
            write(lanes, np.ascontiguousarray(found[:, place]))

    return multiply


def _float_of_f16(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float32)


MATRICES: dict[str, Callable[[Instruction, Operands], Step]] = {
    "ldmatrix": _load,
    "mma": _multiply,
    "stmatrix": _store,
}
