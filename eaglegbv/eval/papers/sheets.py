"""Papers that compare verifiers over a grid of paths, lengths and temperatures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from eaglegbv.config import Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.papers.base import Finding, Paper, Report, Site, Table
from eaglegbv.eval.papers.cells import Cell, CellStore, Figure, Run, Way, measure_cells
from eaglegbv.eval.records import Setting, grid
from eaglegbv.eval.report import pivot, with_interval
from eaglegbv.eval.statistics import bootstrap_ratio
from eaglegbv.metrics import Phase

Axis: TypeAlias = Literal["paths", "depth"]
NOT_AT_HAND = "the paper's figure of each cell is not at hand"


@dataclass(frozen=True, slots=True)
class Order:
    """A verifier's figure is at least another's, in every cell both have."""

    better: str  # the verifier whose figure should be as high or higher
    # The other; where it takes one path alone, its one-path setting stands in every cell.
    worse: str
    source: str  # who says so
    figure: Figure = Figure.TOKENS_A_STEP  # what is compared


@dataclass(frozen=True, slots=True)
class Rise:
    """A verifier's figure does not fall from one place on an axis to another."""

    verifier: str  # which
    axis: Axis  # along what
    source: str  # who says so
    start: int | None = None  # where from; None for the least
    end: int | None = None  # where to; None for the most
    figure: Figure = Figure.TOKENS_A_STEP  # what is compared


@dataclass(frozen=True, slots=True)
class Widening:
    """A verifier's lead over another on the same drafts grows from the least depth to the most."""

    better: str  # the one that leads
    worse: str  # the other
    source: str  # who says so


Direction: TypeAlias = Order | Rise | Widening


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """A figure a paper gives of its own models, and the cells here it is put beside."""

    text: str  # the figure, as a ratio: `better` over `worse`
    models: str  # what it was measured on
    source: str  # where it was read
    better: str  # a verifier
    worse: str  # another
    paths: int  # of the better one here; the worse one has as many, or one where it takes no more
    depth: int  # of both here
    temperature: float  # of both here
    figure: Figure = Figure.TOKENS_A_STEP  # what is compared


@dataclass(frozen=True, slots=True)
class Sheet:
    """Cells measured alike, and what should be seen in them."""

    name: str  # short name, unique within the paper
    title: str  # what is compared
    way: Way  # how
    settings: tuple[Setting, ...]  # the cells
    directions: tuple[Direction, ...] = ()  # what a paper, or this package, says
    quotes: tuple[Quote, ...] = ()  # figures of the paper
    optional: bool = False  # measured only where the engine is asked for as well


def cells_of(
    verifiers: Sequence[str],
    *,
    paths: Sequence[int] = (1,),
    depths: Sequence[int] = (8,),
    temperatures: Sequence[float] = (1.0,),
) -> tuple[Setting, ...]:
    """Return every combination, with as many paths as a verifier takes."""
    return grid(verifiers, paths, depths, temperatures, base=Plan()).settings


@dataclass(frozen=True)
class GridPaper(Paper):
    """A paper as sheets."""

    sheets: tuple[Sheet, ...]  # what is measured
    notes: tuple[str, ...] = ()  # what a reader has to know

    def measure(self, site: Site) -> Report:
        """Measure every sheet that is wanted, and write the cells to ``cells.json``.

        Raises:
            InvalidArgument: A sheet is asked for that the paper has not, or the folder holds
                something else.
        """
        wanted = [sheet for sheet in self.sheets if site.options.engine or not sheet.optional]
        if site.sheets:
            wanted = [self._sheet(name) for name in site.sheets]
        store = CellStore(site, self.name)
        measured: dict[str, list[Cell]] = {}
        for sheet in wanted:
            measured[sheet.name] = measure_cells(site, store, sheet.name, sheet.way, sheet.settings)
            store.publish(measured)
        return self.report(measured, store.settings)

    def _sheet(self, name: str) -> Sheet:
        for sheet in self.sheets:
            if sheet.name == name:
                return sheet
        known = ", ".join(sheet.name for sheet in self.sheets)
        raise InvalidArgument("sheets", name, f"some of {known}")

    def report(self, measured: Mapping[str, Sequence[Cell]], run: Run) -> Report:
        """Return the report of the sheets measured, by name."""
        tables: list[Table] = []
        found: list[Finding] = []
        for sheet in self.sheets:
            if sheet.name in measured:
                tables += sheet_tables(sheet, measured[sheet.name])
                found += findings(sheet, measured[sheet.name])
        return Report(tables=tuple(tables), findings=tuple(found), notes=(run.summary, *self.notes))


def findings(sheet: Sheet, cells: Sequence[Cell]) -> list[Finding]:
    """Return every direction of a sheet, cell by cell."""
    found: list[Finding] = []
    for direction in sheet.directions:
        match direction:
            case Order():
                found += _order(direction, cells)
            case Rise():
                found += _rise(direction, cells)
            case Widening():
                found += _widening(direction, cells)
    return found


def _order(order: Order, cells: Sequence[Cell]) -> Iterator[Finding]:
    for better in _of(cells, order.better):
        worse = _counterpart(cells, better.setting, order.worse)
        if worse is not None:
            yield _finding(better, worse, order.source, order.figure)


def _lines(cells: Sequence[Cell], verifier: str, axis: Axis) -> list[dict[int, Cell]]:
    """Return a verifier's cells that differ along an axis alone, by their places on it."""
    lines: dict[Setting, dict[int, Cell]] = {}
    for cell in _of(cells, verifier):
        plan = msgspec.structs.replace(cell.setting.plan, **{axis: 1})
        alike = msgspec.structs.replace(cell.setting, plan=plan)
        lines.setdefault(alike, {})[_along(cell, axis)] = cell
    return list(lines.values())


def _rise(rise: Rise, cells: Sequence[Cell]) -> Iterator[Finding]:
    for line in _lines(cells, rise.verifier, rise.axis):
        start = min(line) if rise.start is None else rise.start
        end = max(line) if rise.end is None else rise.end
        if start != end and start in line and end in line:
            yield _finding(line[end], line[start], rise.source, rise.figure)


def _widening(widening: Widening, cells: Sequence[Cell]) -> Iterator[Finding]:
    for line in _lines(cells, widening.better, "depth"):
        far, near = line[max(line)], line[min(line)]
        others = [_counterpart(cells, one.setting, widening.worse) for one in (far, near)]
        if far is near or others[0] is None or others[1] is None:
            continue
        yield Finding(
            statement=f"{_lead(far, others[0])} at least {_lead(near, others[1])}",
            source=widening.source,
            # Steps are the same places on both sides, so they cancel.
            ratio=bootstrap_ratio(far.tokens, others[0].tokens, near.tokens, others[1].tokens),
        )


def _lead(better: Cell, worse: Cell) -> str:
    return f"{better.setting.name} / {worse.setting.name}"


def _finding(better: Cell, worse: Cell, source: str, figure: Figure) -> Finding:
    what = "" if figure is Figure.TOKENS_A_STEP else f" ({figure})"
    return Finding(
        statement=f"{better.setting.name} at least {worse.setting.name}{what}",
        source=source,
        ratio=better.over(worse, figure),
    )


def _of(cells: Sequence[Cell], verifier: str) -> list[Cell]:
    return [cell for cell in cells if cell.setting.plan.verifier == verifier]


def _counterpart(cells: Sequence[Cell], setting: Setting, verifier: str) -> Cell | None:
    """Return the other verifier's cell of the same setting, or its only one along paths."""
    others = [
        other
        for other in _of(cells, verifier)
        if other.setting.temperature == setting.temperature
        and other.setting.plan.depth == setting.plan.depth
    ]
    same = [other for other in others if other.setting.plan.paths == setting.plan.paths]
    alone = others if len(others) == 1 and others[0].setting.plan.paths == 1 else []
    return next(iter(same or alone), None)


def _along(cell: Cell, axis: Axis) -> int:
    return cell.setting.plan.paths if axis == "paths" else cell.setting.plan.depth


def sheet_tables(sheet: Sheet, cells: Sequence[Cell]) -> list[Table]:
    """Return the tables of a sheet: its cells, seconds by phase, and the paper's figures."""
    tables = _grid_tables(sheet, cells)
    if sheet.way is Way.TIMED:
        tables.append(_phases(sheet, cells))
    if sheet.quotes:
        tables.append(_quotes(sheet, cells))
    else:
        tables[-1] = msgspec.structs.replace(tables[-1], notes=(NOT_AT_HAND,))
    return tables


def _grid_tables(sheet: Sheet, cells: Sequence[Cell]) -> list[Table]:
    """Return one table for each temperature (and length): verifiers by paths, or by length."""
    counts: dict[str, set[int]] = {}
    for cell in cells:
        counts.setdefault(cell.setting.plan.verifier, set()).add(cell.setting.plan.paths)
    axis: Axis = "paths" if any(len(found) > 1 for found in counts.values()) else "depth"
    groups: dict[tuple[float, int], list[Cell]] = {}
    for cell in cells:
        fixed = cell.setting.plan.depth if axis == "paths" else 0
        groups.setdefault((cell.setting.temperature, fixed), []).append(cell)
    return [
        _pivot(
            f"{sheet.title}, T = {temperature:g}" + (f", L = {fixed}" if fixed else ""), own, axis
        )
        for (temperature, fixed), own in groups.items()
    ]


def _pivot(title: str, cells: Sequence[Cell], axis: Axis) -> Table:
    letter = "K" if axis == "paths" else "L"
    figures = {}
    for cell in sorted(cells, key=lambda cell: _along(cell, axis)):
        plan = cell.setting.plan
        name = plan.verifier if axis == "paths" else f"{plan.verifier} K{plan.paths}"
        figures[name, f"{letter} = {_along(cell, axis)}"] = with_interval(cell.estimate(), 3)
    return Table(title=title, rows=pivot("tokens a step", figures))


def _phases(sheet: Sheet, cells: Sequence[Cell]) -> Table:
    phases = [phase for phase in Phase if phase in cells[0].seconds]
    rows = [["milliseconds a token", *phases, "all", "verify / all"]]
    for cell in cells:
        tokens = sum(cell.tokens)
        costs = [1000 * sum(cell.seconds[phase]) / tokens for phase in phases]
        share = costs[phases.index(Phase.VERIFY)] / sum(costs)
        figures = [f"{cost:.3f}" for cost in (*costs, sum(costs))]
        rows.append([cell.setting.name, *figures, f"{share:.1%}"])
    return Table(title=f"{sheet.title}: time by phase", rows=rows)


def _quotes(sheet: Sheet, cells: Sequence[Cell]) -> Table:
    rows = [["ratio", "the paper's", "on", "ours", "setting here"]]
    for quote in sheet.quotes:
        better = next(
            cell
            for cell in _of(cells, quote.better)
            if cell.setting.plan.paths == quote.paths
            and cell.setting.plan.depth == quote.depth
            and cell.setting.temperature == quote.temperature
        )
        worse = _counterpart(cells, better.setting, quote.worse)
        if worse is None:
            raise RuntimeError(f"{sheet.name}: {quote.worse} is not measured")
        ours = with_interval(better.over(worse, quote.figure), 3)
        name = f"{quote.better} / {quote.worse}, {quote.figure}"
        rows.append([name, quote.text, quote.models, ours, better.setting.name])
    sources = sorted({quote.source for quote in sheet.quotes})
    return Table(
        title=f"{sheet.title}: the paper's figures that are at hand",
        rows=rows,
        notes=(f"read in: {'; '.join(sources)}", f"beside these, {NOT_AT_HAND}"),
    )
