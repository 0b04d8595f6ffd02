"""Write the generated blocks of pages: tables of what was measured, each from one file.

    python tools/blocks.py              # write all blocks
    python tools/blocks.py --check      # exit with 1 where one is not as it would be written

A block stands between ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``. If NAME is a path,
it shows that file. Otherwise its table is
``[NAME]`` in one of the files docs/results/tables/*.toml: ``headings`` and ``rows`` as commands
printed them, the ``command`` and when and where it ran (``measured``). ``{TABLE|ROW|COLUMN}`` in a
cell is copied from another table: from the row that begins with ROW, under the heading COLUMN.
"""

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "docs" / "results" / "tables"
BLOCK = re.compile(r"(<!-- generated: ([\w./-]+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
BRACKET = re.compile(r" [\[(]")  # before an interval or a ratio, which is not copied
COPIED = re.compile(r"\{([\w-]+)\|([^|}]*)\|([^|}]*)\}")

Tables: TypeAlias = Mapping[str, Mapping[str, Any]]


def read_tables(folder: Path = TABLES) -> Tables:
    """Return all tables by their names."""
    tables: dict[str, Mapping[str, Any]] = {}
    for path in sorted(folder.glob("*.toml")):
        tables |= tomllib.loads(path.read_text(encoding="utf-8"))
    return tables


def pages() -> Iterator[Path]:
    """Yield the pages that may have blocks."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def filled(text: str, tables: Tables) -> str:
    """Return a page with its blocks as they should be."""

    def block(match: re.Match[str]) -> str:
        name = match[2]
        text = code(ROOT / name) if "/" in name else markdown(tables[name], tables)
        return f"{match[1]}\n{text}\n\n{match[3]}"

    return BLOCK.sub(block, text)


def code(path: Path) -> str:
    """Return a file as a page shows it."""
    return f"```python\n{path.read_text(encoding='utf-8')}```"


def markdown(table: Mapping[str, Any], tables: Tables) -> str:
    """Return a table, and how it was measured."""
    headings, rows = table["headings"], table["rows"]
    aligned = ["---", *["---:"] * (len(headings) - 1)]
    if table.get("words"):  # cells that are read, not compared
        aligned = ["---"] * len(headings)
    lines = [f"| {' | '.join(cells)} |" for cells in (headings, aligned, *rows)]
    text = COPIED.sub(lambda match: copied(tables, *match.groups()), "\n".join(lines))
    notes = [f"`{table['command']}`"] if "command" in table else []
    notes += [table[name] for name in ("measured", "note") if name in table]
    return "\n\n".join([text, *([". ".join(notes) + "."] if notes else [])])


def copied(tables: Tables, name: str, row: str, column: str) -> str:
    """Return a cell of a table."""
    table = tables[name]
    place = table["headings"].index(column)
    [cells] = [cells for cells in table["rows"] if cells[0] == row]
    return BRACKET.split(cells[place])[0]


def main() -> None:
    """Write the blocks, or check them."""
    tables, stale = read_tables(), []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        wanted = filled(text, tables)
        if wanted != text:
            stale.append(str(page.relative_to(ROOT)))
            if "--check" not in sys.argv:
                page.write_text(wanted, encoding="utf-8")
    if stale:
        print("\n".join(stale))
        sys.exit("--check" in sys.argv)


if __name__ == "__main__":
    main()
