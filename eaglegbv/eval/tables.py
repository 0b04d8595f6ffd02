"""Figures as tables, and tables as text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from eaglegbv.eval.figures import ACCEPTANCE, SPEED, WALL_SPEED, Estimate, Figure, Sums
from eaglegbv.eval.settings import Axis, Setting


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table as it is printed."""

    title: str = ""
    rows: list[list[str]]  # headings first, rows of one width
    notes: tuple[str, ...] = ()  # what a reader has to know

    @property
    def text(self) -> str:
        """It for a terminal."""
        title = f"{self.title}\n" if self.title else ""
        return title + plain_text(self.rows) + "".join(f"\n({note})" for note in self.notes)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table of settings."""

    heading: str
    figure: Figure
    over_plain: bool = False  # as a ratio to plain decoding
    digits: int = 2


SPEEDS = (
    Column(ACCEPTANCE.name, ACCEPTANCE),
    Column(SPEED.name, SPEED, digits=1),
    Column("speed-up", SPEED, over_plain=True),
    Column("with prefill", WALL_SPEED, over_plain=True),
)
"""The columns of a run of conversations."""


def by_setting(
    sums: Sums, settings: Sequence[Setting], columns: Sequence[Column] = SPEEDS
) -> list[list[str]]:
    """Return a row for each setting, headings first."""
    rows = [["setting", *(column.heading for column in columns)]]
    for setting in settings:
        if sums.has(setting.name):
            shown = (_shown(sums, settings, setting, column) for column in columns)
            rows.append([setting.name, *shown])
    return rows


def _shown(sums: Sums, settings: Sequence[Setting], setting: Setting, column: Column) -> str:
    if not column.over_plain:
        return sums.estimate(column.figure, setting.name).text(column.digits)
    plain = plain_of(settings, setting)
    if plain is None or not sums.has(plain.name):
        return "-"
    return shown(sums.ratio(column.figure, [setting.name], [plain.name]), column.digits)


def shown(estimate: Estimate | None, digits: int = 2) -> str:
    """Return a figure with its interval, "-" for what nothing is known of."""
    if estimate is None or estimate.units == 0:
        return "-"
    return estimate.text(digits)


def plain_of(settings: Sequence[Setting], setting: Setting) -> Setting | None:
    """Return plain decoding at the same temperature and load."""
    axes: tuple[Axis, ...] = ("temperature", "batch", "context")
    place = [setting.at(axis) for axis in axes]
    plain = (s for s in settings if s.plain and [s.at(axis) for axis in axes] == place)
    return next(plain, None)


def grid(
    corner: str,
    settings: Sequence[Setting],
    cell: Callable[[Setting], str],
    row: Callable[[Setting], str],
    column: Callable[[Setting], str],
) -> list[list[str]]:
    """Return a cell for each setting by row and column, headings first."""
    return pivot(corner, {(row(own), column(own)): cell(own) for own in settings})


def pivot(corner: str, cells: Mapping[tuple[str, str], str]) -> list[list[str]]:
    """Return cells by row and column, headings first, in order of appearance; "-" for none."""
    rows, columns = (dict.fromkeys(key[side] for key in cells) for side in (0, 1))
    body = ([row, *(cells.get((row, column), "-") for column in columns)] for row in rows)
    return [[corner, *columns], *body]


def plain_text(rows: Sequence[Sequence[str]]) -> str:
    """Return ``rows`` in aligned columns for a terminal, with the first column left-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, headings first, as a Markdown table with the first column left-aligned."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    align = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join([line(rows[0]), line(align), *(line(row) for row in rows[1:])])
