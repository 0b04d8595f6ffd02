"""Figures as tables, and tables as text."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from eaglegbv.eval.figures import ACCEPTANCE, SPEED, WALL_SPEED, Estimate, Figure, Sums
from eaglegbv.eval.settings import Setting

Cell: TypeAlias = "str | int | Estimate | Beside | None"


class Beside(msgspec.Struct, frozen=True):
    """A cell, and in brackets another one to compare it with, such as a paper's own figure."""

    cell: Cell
    other: Cell


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table: numbers and words, which are text only when they are shown."""

    title: str = ""
    rows: Sequence[Sequence[Cell]]  # headings first, rows of one width
    notes: tuple[str, ...] = ()  # what a reader has to know

    @property
    def texts(self) -> list[list[str]]:
        """Its rows as they are shown."""
        return [list(map(shown, row)) for row in self.rows]

    @property
    def text(self) -> str:
        """It for a terminal."""
        title = f"{self.title}\n" if self.title else ""
        return title + plain_text(self.texts) + "".join(f"\n({note})" for note in self.notes)

    @property
    def markdown(self) -> str:
        """Its rows in Markdown, with the first column left-aligned."""
        headings, *body = self.texts
        align = ["---", *["---:"] * (len(headings) - 1)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, align, *body))


def shown(cell: Cell) -> str:
    """Return a cell as it is shown: a figure with its interval, "-" for what is not known."""
    if isinstance(cell, Beside):
        return f"{shown(cell.cell)} ({shown(cell.other)})"
    if isinstance(cell, Estimate):
        return cell.text
    return "-" if cell is None else str(cell)


def plain(cell: Cell) -> object:
    """Return a cell for JSON: a number, or an object where there is an interval or a comparison."""
    if isinstance(cell, Beside):
        return {"value": plain(cell.cell), "beside": plain(cell.other)}
    if not isinstance(cell, Estimate):
        return cell
    if cell.low == cell.high:
        return cell.value
    names = ("value", "low", "high", "units") if cell.units else ()
    return {name: getattr(cell, name) for name in names} or None


Column: TypeAlias = Callable[[Sums, Setting], Cell]
"""What a table shows of a setting."""


def named(sums: Sums, setting: Setting) -> str:
    """Return a setting's name, as a column."""
    del sums
    return setting.name


def figured(figure: Figure) -> Column:
    """Return the column of a figure, with intervals."""
    return lambda sums, setting: sums.estimate(figure, setting.name)


def valued(figure: Figure) -> Column:
    """Return the column of a figure, without intervals; nothing where none was counted."""

    def cell(sums: Sums, setting: Setting) -> Cell:
        if not sums.total(setting.name, figure.below):
            return None
        return Estimate.exactly(sums.value(figure, setting.name), figure.digits)

    return cell


def counted(name: str) -> Column:
    """Return the column of a sum over all units."""
    return lambda sums, setting: round(sums.total(setting.name, name))


def speed_up(figure: Figure) -> Column:
    """Return the column of a figure's ratio to plain decoding's."""
    return lambda sums, setting: over_plain(sums, figure, setting)


def over_plain(sums: Sums, figure: Figure, setting: Setting, digits: int = 2) -> Estimate | None:
    """Return a figure's ratio to plain decoding's at the same load, if that is measured."""
    plain = setting.plainly.name
    return sums.over(figure, setting.name, plain, digits) if sums.has(plain) else None


SPEEDS: Mapping[str, Column] = {
    "setting": named,
    ACCEPTANCE.name: figured(ACCEPTANCE),
    SPEED.name: figured(SPEED),
    "speed-up": speed_up(SPEED),
    "with prefill": speed_up(WALL_SPEED),
}
"""The columns of a run of conversations."""


def by_setting(
    sums: Sums, settings: Iterable[Setting], columns: Mapping[str, Column] = SPEEDS, title: str = ""
) -> Table:
    """Return a row for each setting that was observed."""
    observed = (setting for setting in settings if setting.name in sums.settings)
    rows = [[column(sums, setting) for column in columns.values()] for setting in observed]
    return Table(title=title, rows=[list(columns), *rows])


def pivot(corner: str, cells: Mapping[tuple[str, str], Cell], title: str = "") -> Table:
    """Return cells by row and column, in order of appearance."""
    rows, columns = (dict.fromkeys(key[side] for key in cells) for side in (0, 1))
    body = [[row, *(cells.get((row, column)) for column in columns)] for row in rows]
    return Table(title=title, rows=[[corner, *columns], *body])


def plain_text(rows: Sequence[Sequence[str]]) -> str:
    """Return ``rows`` in aligned columns for a terminal, with the first column left-aligned."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = ([name.ljust(first), *map(str.rjust, cells, others)] for name, *cells in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)
