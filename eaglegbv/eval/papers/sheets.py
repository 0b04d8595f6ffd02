"""A paper as a declaration: sheets of cells, directions, its own figures; and what comes of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from eaglegbv.config import Plan
from eaglegbv.eval.paired_comparison import Cell, Figure
from eaglegbv.eval.papers.cells import CellStore, Run, Site, Way, measure_cells
from eaglegbv.eval.records import Environment, Setting, grid
from eaglegbv.eval.report import pivot, with_interval
from eaglegbv.eval.statistics import Estimate, bootstrap_ratio
from eaglegbv.metrics import Phase
from eaglegbv.utils import DRAFT_WIDTH

AGREES, AGAINST, OPEN = "agrees", "against", "not told apart"
SAME = 1e-6  # ratios nearer to 1 are rounding, and those of solvers to their tolerance


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A direction a paper gives, and what was measured."""

    statement: str  # the direction, with the cell it is about
    source: str  # who says so
    # The figure that should be higher over the other, with its paired interval; None where nothing
    # can be compared.
    ratio: Estimate | None

    @property
    def verdict(self) -> str:
        """Whether the interval lies above equality, below it, or on both sides."""
        return OPEN if self.ratio is None else self.ratio.told(AGREES, AGAINST, OPEN, SAME)


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table as it is printed."""

    title: str  # what it shows
    rows: list[list[str]]  # headings first, rows of one width
    notes: tuple[str, ...] = ()  # what a reader has to know


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What came of measuring a paper's comparison."""

    tables: tuple[Table, ...]  # our tables, the paper's figures beside ours where they are known
    findings: tuple[Finding, ...] = ()  # the directions, tested
    notes: tuple[str, ...] = ()  # what a reader has to know

    @property
    def exceptions(self) -> tuple[Finding, ...]:
        """The directions that are contradicted."""
        return tuple(one for one in self.findings if one.verdict == AGAINST)


class PaperResults(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison with a paper, as ``report.json`` has it."""

    report: Report  # what came of it
    title: str = ""  # the paper and what is compared
    environment: Environment | None = None  # where and when it was measured, if that is known


def findings_table(found: Sequence[Finding]) -> list[list[str]]:
    """Return findings as rows, headings first."""
    rows = ([one.statement, with_interval(one.ratio, 3), one.verdict] for one in found)
    return [["should be", "ratio", "measured"], *rows]


# What is declared of a paper.


Axis: TypeAlias = Literal["paths", "depth", "draft_width", "temperature"]
LETTERS: Mapping[Axis, str] = {"paths": "K", "depth": "L", "draft_width": "W", "temperature": "T"}
NOT_AT_HAND = "the paper's figure of each cell is not at hand"


Limits: TypeAlias = Mapping[float, Mapping[str, str]]
"""Limits on the mean milliseconds of a step, with the paper's best acceptance in each."""


@dataclass(frozen=True, slots=True)
class Order:
    """A verifier's figure is at least another's, in every cell both have."""

    better: str  # the verifier whose figure should be as high or higher
    # The other; where it takes one path alone, its one-path setting stands in every cell.
    worse: str
    source: str  # who says so
    figure: Figure = Figure.TOKENS_A_STEP  # what is compared
    where: Callable[[Plan], bool] = lambda _: True  # in which cells, by the better one's plan

    def findings(self, cells: Sequence[Cell], _: Limits) -> Iterator[Finding]:
        """Yield the finding of each cell."""
        for better in _of(cells, self.better):
            worse = _counterpart(cells, better.setting, self.worse)
            if worse is not None and self.where(better.setting.plan):
                yield _finding(better, worse, self.source, self.figure)


@dataclass(frozen=True, slots=True)
class Rise:
    """A verifier's figure does not fall from one place on an axis to another."""

    verifier: str  # which
    axis: Axis  # along what
    source: str  # who says so
    start: float | None = None  # where from; None for the least
    end: float | None = None  # where to; None for the most
    figure: Figure = Figure.TOKENS_A_STEP  # what is compared
    # A verifier over which it leads: then it is the lead that does not fall, on the same drafts.
    over: str | None = None

    def findings(self, cells: Sequence[Cell], _: Limits) -> Iterator[Finding]:
        """Yield the finding of each line of cells that differ along the axis alone."""
        lines: dict[tuple[object, ...], dict[float, Cell]] = {}
        for cell in _of(cells, self.verifier):
            others = tuple(_along(cell, axis) for axis in LETTERS if axis != self.axis)
            lines.setdefault(others, {})[_along(cell, self.axis)] = cell
        for line in lines.values():
            near = line.get(min(line) if self.start is None else self.start)
            far = line.get(max(line) if self.end is None else self.end)
            if near is None or far is None or near is far:
                continue
            if self.over is None:
                yield _finding(far, near, self.source, self.figure)
                continue
            behind = [_counterpart(cells, one.setting, self.over) for one in (far, near)]
            if behind[0] is not None and behind[1] is not None:
                yield Finding(
                    statement=f"{far.setting.name} / {behind[0].setting.name} at least "
                    f"{near.setting.name} / {behind[1].setting.name}",
                    source=self.source,
                    # Steps are the same places on both sides, so they cancel.
                    ratio=bootstrap_ratio(
                        far.tokens, behind[0].tokens, near.tokens, behind[1].tokens
                    ),
                )


@dataclass(frozen=True, slots=True)
class InTime:
    """A verifier's best cell within a limit on the mean time is at least another's."""

    better: str  # the one whose best cell is as good or better
    worse: str  # the other
    source: str  # who says so

    def findings(self, cells: Sequence[Cell], limits: Limits) -> Iterator[Finding]:
        """Yield the finding of each limit."""
        for limit in limits:
            better, worse = (_best_within(cells, own, limit) for own in (self.better, self.worse))
            if better is not None and worse is not None:
                yield _finding(better, worse, self.source, within=f"within {limit:g} ms: ")


Direction: TypeAlias = Order | Rise | InTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """A figure a paper gives of its own models, and the cells here it is put beside."""

    text: str  # the figure: `better` over `worse`, or milliseconds where there is no `worse`
    models: str  # what it was measured on
    source: str  # where it was read
    better: str  # a verifier
    worse: str  # another, or none
    paths: int  # of the better one here; the worse one has as many, or one where it takes no more
    depth: int  # of both here
    temperature: float  # of both here
    figure: Figure = Figure.TOKENS_A_STEP  # what is compared
    draft_width: int = DRAFT_WIDTH  # of both here


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
    limits: Limits = field(default_factory=dict)


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
class Paper:
    """A paper's comparison, by command."""

    name: str  # short name, that of the command
    title: str  # paper and what is compared
    sheets: tuple[Sheet, ...]  # what is measured
    notes: tuple[str, ...] = ()  # what a reader has to know

    def measure(self, site: Site) -> PaperResults:
        """Measure what is not measured yet in ``site.folder``, and write it to ``cells.json``.

        Raises:
            InvalidArgument: The folder holds something else.
        """
        store = CellStore(site, self.name)
        measured: dict[str, list[Cell]] = {}
        for sheet in self.sheets:
            if site.options.engine or not sheet.optional:
                measured[sheet.name] = measure_cells(
                    site, store, sheet.name, sheet.way, sheet.settings
                )
                store.publish(measured)
        report = self.report(measured, store.settings)
        return PaperResults(report=report, title=self.title, environment=store.environment)

    def report(self, measured: Mapping[str, Sequence[Cell]], run: Run) -> Report:
        """Return the report of the sheets measured, by name."""
        own = [sheet for sheet in self.sheets if sheet.name in measured]
        return Report(
            tables=tuple(t for s in own for t in sheet_tables(s, measured[s.name])),
            findings=tuple(f for s in own for f in findings(s, measured[s.name])),
            notes=(run.summary, *self.notes),
        )


def findings(sheet: Sheet, cells: Sequence[Cell]) -> list[Finding]:
    """Return every direction of a sheet, cell by cell; what a solver refused is left out."""
    cells = [cell for cell in cells if cell.steps]
    return [found for one in sheet.directions for found in one.findings(cells, sheet.limits)]


def _best_within(cells: Sequence[Cell], verifier: str, limit: float) -> Cell | None:
    in_time = [cell for cell in _of(cells, verifier) if _milliseconds(cell) <= limit]
    return max(in_time, key=lambda cell: cell.mean, default=None)


def _milliseconds(cell: Cell) -> float:
    steps, seconds = cell.columns(Figure.STEPS_A_SECOND)
    return 1e3 * sum(seconds) / sum(steps)


def _finding(
    better: Cell,
    worse: Cell,
    source: str,
    figure: Figure = Figure.TOKENS_A_STEP,
    within: str = "",
) -> Finding:
    what = "" if figure is Figure.TOKENS_A_STEP else f" ({figure})"
    return Finding(
        statement=f"{within}{better.setting.name} at least {worse.setting.name}{what}",
        source=source,
        ratio=better.over(worse, figure),
    )


def _of(cells: Sequence[Cell], verifier: str) -> list[Cell]:
    return [cell for cell in cells if cell.setting.plan.verifier == verifier]


def _counterpart(cells: Sequence[Cell], setting: Setting, verifier: str) -> Cell | None:
    """Return the other verifier's cell of the same setting, or its only one along paths."""
    plan = setting.plan
    others = [
        other
        for other in _of(cells, verifier)
        if (other.setting.temperature, other.setting.plan.depth, other.setting.plan.draft_width)
        == (setting.temperature, plan.depth, plan.draft_width)
    ]
    same = [other for other in others if other.setting.plan.paths == plan.paths]
    alone = others if len(others) == 1 and others[0].setting.plan.paths == 1 else []
    return next(iter(same or alone), None)


def _along(cell: Cell, axis: Axis) -> float:
    setting = cell.setting
    return setting.temperature if axis == "temperature" else float(getattr(setting.plan, axis))


def sheet_tables(sheet: Sheet, cells: Sequence[Cell]) -> list[Table]:
    """Return the tables of a sheet: its cells, their times, and the paper's figures."""
    cells = [cell for cell in cells if cell.steps]
    tables = _grid_tables(sheet, cells)
    if sheet.way is Way.TIMED:
        tables.append(_phases(sheet, cells))
    if sheet.way is Way.SOLVERS:
        tables += [_times(sheet, cells), _within(sheet, cells)]
    if sheet.quotes:
        tables.append(_quotes(sheet, cells))
    else:
        tables[-1] = msgspec.structs.replace(tables[-1], notes=(NOT_AT_HAND,))
    return tables


def _grid_tables(sheet: Sheet, cells: Sequence[Cell]) -> list[Table]:
    """Return tables of verifiers along the first axis on which a verifier has several cells."""
    places: dict[tuple[str, Axis], set[float]] = {}
    for cell in cells:
        for axis in LETTERS:
            places.setdefault((_label(cell), axis), set()).add(_along(cell, axis))
    several = {axis for (_, axis), found in places.items() if len(found) > 1}
    along: Axis = next((axis for axis in LETTERS if axis in several), "depth")
    fixed: list[Axis] = ["temperature"] if along != "temperature" else []
    fixed += ["depth"] if along == "paths" else []
    fixed += ["draft_width"] if len({_along(cell, "draft_width") for cell in cells}) > 1 else []
    corner = "acceptance" if sheet.way in (Way.NODES, Way.SOLVERS) else str(Figure.TOKENS_A_STEP)
    groups: dict[str, dict[tuple[str, str], str]] = {}
    for cell in sorted(cells, key=lambda cell: _along(cell, along)):
        title = ", ".join([sheet.title, *(_placed(cell, axis) for axis in fixed)])
        name = _label(cell) + ("" if along == "paths" else f" K{cell.setting.plan.paths}")
        figure = with_interval(cell.estimate(), 3)
        groups.setdefault(title, {})[name, _placed(cell, along)] = figure
    return [Table(title=title, rows=pivot(corner, own)) for title, own in groups.items()]


def _label(cell: Cell) -> str:
    plan = cell.setting.plan
    return " ".join([plan.verifier, *([str(plan.draft_sampling)] if plan.draft_sampling else [])])


def _placed(cell: Cell, axis: Axis) -> str:
    return f"{LETTERS[axis]} = {_along(cell, axis):g}"


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


def _times(sheet: Sheet, cells: Sequence[Cell]) -> Table:
    figures = {}
    for cell in cells:
        size = f"{_placed(cell, 'draft_width')}, {_placed(cell, 'paths')}"
        figures[cell.setting.plan.verifier, size] = f"{_milliseconds(cell):.2f}"
    return Table(title=f"{sheet.title}: milliseconds", rows=pivot("solver", figures))


def _within(sheet: Sheet, cells: Sequence[Cell]) -> Table:
    rows = [["milliseconds", "solver", "best acceptance", "at", "mean", "the paper's"]]
    for limit, paper in sheet.limits.items():
        for solver in dict.fromkeys(cell.setting.plan.verifier for cell in cells):
            best = _best_within(cells, solver, limit)
            told = ["none in time", "-", "-"]
            if best is not None:
                told = [f"{best.mean:.4f}", best.setting.name, f"{_milliseconds(best):.2f}"]
            rows.append([f"{limit:g}", solver, *told, paper.get(solver, "-")])
    return Table(title=f"{sheet.title}: the best acceptance within a limit on the time", rows=rows)


def _quotes(sheet: Sheet, cells: Sequence[Cell]) -> Table:
    rows = [["ratio", "the paper's", "on", "ours", "setting here"]]
    for quote in sheet.quotes:
        place = (quote.paths, quote.depth, quote.draft_width, quote.temperature)
        own = (
            cell
            for cell in _of(cells, quote.better)
            if place == tuple(_along(cell, axis) for axis in LETTERS)
        )
        better = next(own, None)
        if better is None:
            told = ["too large", "-"]
        elif not quote.worse:
            told = [f"{_milliseconds(better):.2f}", better.setting.name]
        else:
            worse = _counterpart(cells, better.setting, quote.worse)
            if worse is None:
                raise RuntimeError(f"{sheet.name}: {quote.worse} is not measured")
            told = [with_interval(better.over(worse, quote.figure), 3), better.setting.name]
        what = f"/ {quote.worse}, {quote.figure}" if quote.worse else "milliseconds"
        rows.append([f"{quote.better} {what}", quote.text, quote.models, *told])
    sources = sorted({quote.source for quote in sheet.quotes})
    return Table(
        title=f"{sheet.title}: the paper's figures that are at hand",
        rows=rows,
        notes=(f"read in: {'; '.join(sources)}", f"beside these, {NOT_AT_HAND}"),
    )
