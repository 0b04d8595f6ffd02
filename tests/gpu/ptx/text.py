"""PTX as it is written: kernels, their basic blocks, instructions and operands."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Register:
    """A place in the register file of a thread."""

    place: int
    dtype: np.dtype


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it is written, of whatever type the instruction has."""

    value: float


@dataclass(frozen=True, slots=True)
class FloatBits:
    """A floating-point number by its bits."""

    bits: np.ndarray


@dataclass(frozen=True, slots=True)
class Name:
    """A label, a special register, a parameter, or a place in shared memory."""

    text: str


@dataclass(frozen=True, slots=True)
class Address:
    """Where memory is read or written."""

    base: "Operand"
    offset: int


Operand = Register | Number | FloatBits | Name | Address | tuple["Operand", ...]


@dataclass(frozen=True, slots=True)
class Guard:
    """A predicate that turns lanes off."""

    register: Register
    negated: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; ``name`` holds its parts: ``("add", "s32")``."""

    name: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Guard | None
    text: str

    @property
    def type(self) -> str:
        """What the last part says of its operands."""
        return self.name[-1]


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes among the parameters."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """An entry of a module.

    Attributes:
        name: Mangled.
        parameters: By name, in order.
        shared: Offsets in shared memory by name; what is sized at launch comes last.
        shared_bytes: Shared memory before what is sized at launch.
        registers: Types of a thread's registers.
        blocks: Basic blocks. Control leaves a block at its end only.
        labels: Blocks by label.
    """

    name: str
    parameters: Mapping[str, Span]
    shared: Mapping[str, int]
    shared_bytes: int
    registers: Sequence[np.dtype]
    blocks: Sequence[Sequence[Instruction]]
    labels: Mapping[str, int]

    @property
    def parameter_bytes(self) -> int:
        """Size of all parameters."""
        return max((span.offset + span.size for span in self.parameters.values()), default=0)


JUMPS = ("bra", "ret")

_SHARED_ALIGNMENT = 128
"""Of what is sized at launch: more than any kernel asks for."""

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(([^)]*)\)[^{]*\{")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z]+)(\d+)\s+(\w+)(?:\[(\d+)\])?")
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.[a-z]+(\d+)\s+(\w+)(\[\d*\])?;")
_GUARD = re.compile(r"@(!?)([%\w]+)\s+")
_LABEL = re.compile(r"(\$?\w+):(?!:)")
_INTEGER = re.compile(r"-?(?:0x[\da-fA-F]+|\d+)U?$")
_REAL = re.compile(r"-?\d+\.\d*$")
_NOTES = re.compile(r"//[^\n]*|^\s*\.(?:loc|file|pragma)\b[^\n]*", re.MULTILINE)


def parse(text: str) -> dict[str, Kernel]:
    """Return the kernels of a module by name."""
    text = _NOTES.sub("", text)
    return {entry[1]: _kernel(text, entry) for entry in _ENTRY.finditer(text)}


def register_type(name: str) -> np.dtype:
    """Return how registers of a type are kept: by their bits, predicates as truth values."""
    if name == "pred":
        return np.dtype(bool)
    return np.dtype(f"u{int(name[1:]) // 8}")


def _kernel(text: str, entry: re.Match[str]) -> Kernel:
    text_of_body = text[entry.end() : _end_of_block(text, entry.end())]
    shared, size = _shared(text[: entry.start()], text_of_body)
    body = _Body()
    body.read(_SHARED.sub("", text_of_body))
    parameters = _parameters(entry[2])
    return Kernel(entry[1], parameters, shared, size, body.registers, body.blocks, body.labels)


def _end_of_block(text: str, start: int) -> int:
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return brace.start()
    raise ValueError("PTX: a block has no end")


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _parameters(text: str) -> dict[str, Span]:
    spans: dict[str, Span] = {}
    end = 0
    for alignment, _, bits, name, count in _PARAMETER.findall(text):
        size = int(bits) // 8
        start = _aligned(end, int(alignment or size))
        end = start + size * int(count or 1)
        spans[name] = Span(start, end - start)
    if len(spans) != text.count(".param"):
        raise NotImplementedError(f"parameters: {text}")
    return spans


def _shared(module: str, body: str) -> tuple[dict[str, int], int]:
    """Lay out shared memory: what has a size, behind it what gets one at launch."""
    offsets: dict[str, int] = {}
    end, open_ended = 0, []
    for alignment, bits, name, count in _SHARED.findall(module + body):
        size = int(bits) // 8
        if count == "[]":
            open_ended.append(name)
        elif re.search(rf"\b{name}\b", body):
            offsets[name] = _aligned(end, int(alignment or size))
            end = offsets[name] + size * int(count.strip("[]") or 1)
    end = _aligned(end, _SHARED_ALIGNMENT)
    return offsets | dict.fromkeys(open_ended, end), end


class _Body:
    """Reads the statements of a kernel into its blocks."""

    def __init__(self) -> None:
        self.registers: list[np.dtype] = []
        self.blocks: list[list[Instruction]] = [[]]
        self.labels: dict[str, int] = {}
        self._scopes: list[dict[str, Register]] = [{}]

    def read(self, body: str) -> None:
        place = 0
        while place < len(body):
            if body[place].isspace() or body[place] == ";":
                place += 1
            elif body[place] == "{":
                self._scopes.append({})
                place += 1
            elif body[place] == "}":
                self._scopes.pop()
                place += 1
            elif label := _LABEL.match(body, place):
                if label[1] in self.labels:
                    raise NotImplementedError(f"another label {label[1]}")
                self.labels[label[1]] = self._next_block()
                place = label.end()
            else:
                end = body.index(";", place)
                self._statement(body[place:end].strip())
                place = end + 1

    def _next_block(self) -> int:
        self.blocks.append([])
        return len(self.blocks) - 1

    def _statement(self, text: str) -> None:
        if text.startswith(".reg"):
            _, kind, names = text.split(None, 2)
            for name in names.split(","):
                self._declare(name.strip(), register_type(kind[1:]))
        else:
            instruction = self._instruction(text)
            self.blocks[-1].append(instruction)
            if instruction.name[0] in JUMPS:
                self._next_block()

    def _declare(self, name: str, dtype: np.dtype) -> None:
        several = re.match(r"(.+)<(\d+)>$", name)
        names = [f"{several[1]}{i}" for i in range(int(several[2]))] if several else [name]
        for own in names:
            self._scopes[-1][own] = Register(len(self.registers), dtype)
            self.registers.append(dtype)

    def _instruction(self, text: str) -> Instruction:
        guard = None
        if found := _GUARD.match(text):
            register = self._register(found[2])
            assert register is not None, text
            guard = Guard(register, negated=bool(found[1]))
        name, _, rest = text[found.end() if found else 0 :].replace("\t", " ").partition(" ")
        operands = tuple(self._operand(part) for part in _parts(rest))
        return Instruction(tuple(name.split(".")), operands, guard, text)

    def _register(self, name: str) -> Register | None:
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), None)

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return tuple(self._operand(part) for part in _parts(text[1:-1]))
        if text.startswith("["):
            base, _, offset = text[1:-1].partition("+")
            return Address(self._operand(base.strip()), int(offset or "0", 0))
        if register := self._register(text):
            return register
        if text[:2] in ("0f", "0F"):
            return FloatBits(np.array([int(text[2:], 16)], np.uint32))
        if text[:2] in ("0d", "0D"):
            return FloatBits(np.array([int(text[2:], 16)], np.uint64))
        if _INTEGER.match(text):
            return Number(int(text.rstrip("U"), 0))
        return Number(float(text)) if _REAL.match(text) else Name(text)


def _parts(text: str) -> Iterator[str]:
    """Split at the commas outside of brackets."""
    depth, start = 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and not depth:
            yield text[start:place].strip()
            start = place + 1
    if text[start:].strip():
        yield text[start:].strip()
