"""Tokens by room against ceilings; exits with 1 where a room is above one.

    python tools/tokens.py

A token is a name, an operator or a number. Comments, docstrings and what they take of lines do not
count, strings are lines of code without tokens. All is counted on a copy that ruff formats at 100
columns without magic trailing commas, so that tokens a line fall by simpler statements only. A
statement is a logical line.
"""

import ast
import io
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

ROOT = Path(__file__).resolve().parents[1]


class Ceiling(NamedTuple):
    """The most that a room may have."""

    tokens: int
    a_line: float


# A room is what is in its folders and in none of another room. Lower a ceiling with the change that
# makes room; a new capability raises those of its own rooms, in the commit that adds it. "Slack"
# marks a ceiling above what is there now, for capabilities that are being written.
CEILINGS = {
    "eaglegbv": Ceiling(65_100, 8.8),  # to come down to 57,000
    "eaglegbv/models": Ceiling(7_050, 9.0),
    "eaglegbv/attention": Ceiling(10_710, 10.0),
    "eaglegbv/backends/sglang": Ceiling(21_000, 9.2),
    "eaglegbv/cli": Ceiling(22_500, 8.4),
    "eaglegbv/native": Ceiling(2_700, 8.9),  # to come down to 2,500
    "eaglegbv/eval": Ceiling(57_530, 9.8),  # to come down to 44,000
    "eaglegbv/eval/audit/served": Ceiling(12_450, 10.3),  # to come down to 8,000
    "drafters": Ceiling(31_700, 10.1),  # to come down to 23,500
    "drafters/formats": Ceiling(7_400, 8.5),
    "drafters/training": Ceiling(13_000, 10.0),  # to come down to 11,500
    "verifiers": Ceiling(25_800, 10.6),
    "verifiers/proof + scheduler": Ceiling(13_800, 9.7),
}
# What kernels have counts in their rooms' tokens, but not in their tokens a line.
KERNELS_A_LINE = 10.8
ALL_A_LINE = 9.5
FUNCTION_LINES = 26  # 95 of 100 functions have at most so many
DENSEST = 10
SHORTEST_DENSE = 5  # lines of code: shorter functions are not called dense

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER}
LAYOUT = {tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.COMMENT, tokenize.ENDMARKER}


@dataclass
class Count:
    """What some code has."""

    tokens: int = 0
    lines: int = 0

    @property
    def a_line(self) -> float:
        return self.tokens / max(1, self.lines)

    def add(self, other: "Count") -> None:
        self.tokens += other.tokens
        self.lines += other.lines


class Function(NamedTuple):
    """A function, and what it has."""

    name: str
    length: int  # lines, without the docstring
    count: Count


@dataclass(frozen=True)
class Module:
    """A file's counts."""

    path: str
    count: Count
    statements: Sequence[int]  # tokens of each
    functions: Sequence[Function]


def read_module(path: str, source: str) -> Module:
    """Return the counts of a formatted source."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    by_line: dict[int, int] = {}
    statements: list[int] = []
    for statement in _statements(tokens):
        statements.append(sum(token.type in COUNTED for token in statement))
        for token in statement:
            for line in range(token.start[0], token.end[0] + 1):
                by_line.setdefault(line, 0)
            by_line[token.start[0]] += token.type in COUNTED
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, FUNCTIONS)]
    functions = [_function(path, node, by_line) for node in nodes]
    return Module(path, Count(sum(by_line.values()), len(by_line)), statements, functions)


def _statements(tokens: Iterable[tokenize.TokenInfo]) -> Iterator[list[tokenize.TokenInfo]]:
    """Yield the tokens of each logical line that is more than a docstring."""
    statement: list[tokenize.TokenInfo] = []
    for token in tokens:
        if token.type == tokenize.NEWLINE:
            if any(part.type != tokenize.STRING for part in statement):
                yield statement
            statement = []
        elif token.type not in LAYOUT:
            statement.append(token)


def _function(path: str, node: FunctionNode, by_line: dict[int, int]) -> Function:
    last = node.end_lineno or node.lineno
    length = 1 + last - node.lineno
    if ast.get_docstring(node, clean=False) is not None:
        docstring = node.body[0]
        length -= 1 + (docstring.end_lineno or docstring.lineno) - docstring.lineno
    tokens = [count for line, count in by_line.items() if node.lineno <= line <= last]
    return Function(f"{path}:{node.lineno} {node.name}", length, Count(sum(tokens), len(tokens)))


def read_modules(root: Path) -> list[Module]:
    """Return the counts of all modules of a project's rooms."""
    tops = sorted({folder.partition("/")[0] for room in CEILINGS for folder in _folders(room)})
    paths = sorted(path for top in tops for path in (root / top).rglob("*.py"))
    with tempfile.TemporaryDirectory() as folder:
        copies = {Path(folder) / f"{number}.py": path for number, path in enumerate(paths)}
        for copy, path in copies.items():
            copy.write_bytes(path.read_bytes())
        options = ("line-length=100", "format.skip-magic-trailing-comma=true")
        command = [sys.executable, "-m", "ruff", "format", "--quiet", "--isolated", folder]
        subprocess.run([*command, *(f"--config={option}" for option in options)], check=True)
        return [
            read_module(path.relative_to(root).as_posix(), copy.read_text("utf-8"))
            for copy, path in copies.items()
        ]


def _folders(room: str) -> list[str]:
    return room.split(" + ")


def room_of(path: str) -> str:
    """Return the room of a file: that of the innermost of its folders that has one."""
    rooms = {folder: room for room in CEILINGS for folder in _folders(room)}
    return next(rooms[str(parent)] for parent in Path(path).parents if str(parent) in rooms)


def report(modules: Sequence[Module]) -> tuple[list[str], list[str]]:
    """Return the lines of a table of all rooms, and a line for each ceiling that is broken."""
    total, kernels = Count(), Count()
    rooms = {room: Count() for room in CEILINGS}
    plain = {room: Count() for room in CEILINGS}  # without kernels
    for module in modules:
        room = room_of(module.path)
        total.add(module.count)
        rooms[room].add(module.count)
        kind = kernels if module.path.endswith("kernels.py") else plain[room]
        kind.add(module.count)
    lines = [f"{'room':28s} {'tokens':>8s} {'ceiling':>8s} {'a line':>7s} {'ceiling':>8s}"]
    broken: list[str] = []

    def add(name: str, tokens: int, most: int, a_line: float, most_a_line: float) -> None:
        numbers = f"{tokens:8,} {most:8,} {a_line:7.2f} {most_a_line:8.2f}"
        lines.append(f"{name:28s} {numbers}")
        if tokens > most:
            broken.append(f"{name}: {tokens:,} tokens, at most {most:,}")
        if a_line > most_a_line:
            broken.append(f"{name}: {a_line:.2f} tokens a line, at most {most_a_line:.2f}")

    for room, ceiling in CEILINGS.items():
        add(room, rooms[room].tokens, ceiling.tokens, plain[room].a_line, ceiling.a_line)
    most = sum(ceiling.tokens for ceiling in CEILINGS.values())
    add("kernels, in rooms above", kernels.tokens, most, kernels.a_line, KERNELS_A_LINE)
    add("all", total.tokens, most, total.a_line, ALL_A_LINE)
    functions = [function for module in modules for function in module.functions]
    length = percentile([function.length for function in functions], 95)
    lines.append(f"lines a function: p95 {length}, at most {FUNCTION_LINES}")
    if length > FUNCTION_LINES:
        broken.append(f"functions: p95 is {length} lines, at most {FUNCTION_LINES}")
    statements = [count for module in modules for count in module.statements]
    median, high = statistics.median(statements), percentile(statements, 95)
    lines.append(f"tokens a statement: median {median:g}, p95 {high}")
    return [*lines, *densest(functions)], broken


def densest(functions: Sequence[Function]) -> list[str]:
    """Return lines on the functions with the most tokens a line."""
    long_enough = [function for function in functions if function.count.lines >= SHORTEST_DENSE]
    long_enough.sort(key=lambda function: function.count.a_line, reverse=True)
    rows = [f"  {function.count.a_line:5.2f}  {function.name}" for function in long_enough]
    return ["densest functions, in tokens a line:", *rows[:DENSEST]]


def percentile(values: Sequence[int], percent: int) -> int:
    """Return the least value that so many of 100 do not exceed."""
    return sorted(values)[(len(values) * percent - 1) // 100]


def main() -> int:
    """Print the table; return 1 where a ceiling is broken."""
    lines, broken = report(read_modules(ROOT))
    print(*lines, sep="\n", flush=True)
    for line in broken:
        print(f"above its ceiling: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
