"""The experiments of commands other than papers, from the settings that they measure."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.eval import pictures
from eaglegbv.eval.experiment import Experiment, Sheet
from eaglegbv.eval.figures import (
    ACCEPTANCE,
    CONVERSATIONS,
    WALL_SPEED,
    Figure,
    Sums,
    phase_figures,
    position_figures,
)
from eaglegbv.eval.observations import Head, Run
from eaglegbv.eval.papers import PAPERS, paper
from eaglegbv.eval.settings import Setting, sweep
from eaglegbv.eval.study import study
from eaglegbv.eval.tables import Table, by_setting, grid, pivot, shown
from eaglegbv.eval.ways.calls import choice_lines, paired_lines, rate_table
from eaglegbv.eval.ways.clients import load_table
from eaglegbv.eval.ways.conversations import SHEET
from eaglegbv.eval.ways.solvers import solver_table
from eaglegbv.eval.ways.steps import step_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

EXPLAINED = (
    "shares of all steps of all answers; best: the most tokens a second by what is known; "
    "learning: too little is known of such steps; probe: to see whether what is known still holds"
)


def mt_bench(settings: tuple[Setting, ...]) -> Experiment:
    """Conversations in turns, with speeds."""
    sheet = Sheet(
        name=SHEET,
        way=SHEET,
        title="conversation",
        settings=settings,
        tables=conversation_tables,
        pictures=pictures.of_conversations,
    )
    return Experiment(name="mt-bench", sheets=(sheet,))


def conversation_tables(sums: Sums, settings: Sequence[Setting]) -> list[Table]:
    """Return the main table, acceptance by position and by category, and phases."""
    names = [setting.name for setting in settings if sums.has(setting.name)]
    tables = [
        Table(rows=by_setting(sums, settings)),
        Table(title="Acceptance by position", rows=by_position(sums, names)),
        Table(title="Acceptance length by category", rows=by_category(sums, names)),
    ]
    title = "Milliseconds per token of the answers, by phase (prefill counted)"
    phases = _figures(sums, names, phase_figures())
    return [*tables, Table(title=title, rows=phases)]


def by_position(sums: Sums, names: Sequence[str]) -> list[list[str]]:
    """Return the share of trees as deep that accept a token at each position."""
    deepest = max((len(sums.names("offered.", [name])) for name in names), default=0)
    drafted = [name for name in names if sums.names("offered.", [name])]
    if not drafted:
        return [["setting"]]
    return _figures(sums, drafted, position_figures(deepest))


def _figures(sums: Sums, names: Sequence[str], figures: Sequence[Figure]) -> list[list[str]]:
    """Return figures of settings without intervals, of those that anything was counted for."""
    known = [f for f in figures if any(sums.total(name, f.above) for name in names)]
    rows = [["setting", *(figure.name for figure in known)]]
    for name in names:
        counted = (sums.total(name, figure.below) for figure in known)
        values = (f"{sums.value(figure, name):.{figure.digits}f}" for figure in known)
        rows.append([name, *(v if n else "-" for v, n in zip(values, counted, strict=True))])
    return rows


def by_category(sums: Sums, names: Sequence[str]) -> list[list[str]]:
    """Return the acceptance length of each setting in each category."""
    cells = {}
    for category in dict.fromkeys(sums.categories.values()):
        part = sums.only(category)
        for name in names:
            if part.has(name):
                cells[name, category] = f"{part.value(ACCEPTANCE, name):.2f}"
    return pivot("setting", cells)


def served(settings: tuple[Setting, ...]) -> Experiment:
    """Conversations through a server: what is accepted, and no speeds."""
    sheet = Sheet(
        name=SHEET, way=SHEET, title="conversation", settings=settings, tables=served_tables
    )
    return Experiment(name="served", sheets=(sheet,))


def served_tables(sums: Sums, settings: Sequence[Setting]) -> list[Table]:
    """Return how many conversations were held, and their acceptance length."""
    rows = [["setting", "conversations", "broken off", "tokens", ACCEPTANCE.name]]
    for setting in settings:
        name = setting.name
        counts = (sums.count(name), sums.errors[name], int(sums.total(name, "answer_tokens")))
        accepted = shown(sums.estimate(ACCEPTANCE, name)) if sums.has(name) else "-"
        rows.append([name, *map(str, counts), accepted])
    return [Table(rows=rows)]


def drafters(settings: tuple[Setting, ...]) -> Experiment:
    """Conversations by drafter: what is accepted of each, by position and category."""
    sheet = Sheet(
        name=SHEET, way=SHEET, title="conversation", settings=settings, tables=drafter_tables
    )
    return Experiment(name="drafters", sheets=(sheet,))


def drafter_tables(sums: Sums, settings: Sequence[Setting]) -> list[Table]:
    """Return acceptance lengths, with the ratio to the first drafter's and shares by position."""
    deepest = max(setting.plan.depth for setting in settings)
    headings = ["drafter", "verifier", "K", ACCEPTANCE.name, "ratio"]
    rows = [[*headings, *(f"{depth} or more" for depth in range(1, deepest + 1))]]
    cells: dict[tuple[str, str], str] = {}
    first = {setting.plan: setting for setting in reversed(settings)}
    for setting in settings:
        name, base = setting.name, first[setting.plan].name
        ratio = None if name == base else sums.ratio(ACCEPTANCE, [name], [base])
        shares = [
            f"{sums.value(Figure('', f'accepted.{depth}', 'steps'), name):.3f}"
            for depth in range(1, setting.plan.depth + 1)
        ]
        named = [setting.who, setting.plan.verifier, str(setting.plan.paths)]
        accepted = [shown(sums.estimate(ACCEPTANCE, name), 3), shown(ratio, 3)]
        rows.append([*named, *accepted, *shares, *[""] * (deepest - len(shares))])
    for row in by_category(sums, [setting.name for setting in settings])[1:]:
        cells |= {
            (row[0], category): value
            for category, value in zip(
                dict.fromkeys(sums.categories.values()), row[1:], strict=True
            )
        }
    title = "Acceptance length by category"
    return [Table(rows=rows), Table(title=title, rows=pivot("drafter", cells))]


def batch(settings: tuple[Setting, ...]) -> Experiment:
    """Whole calls by batch."""
    sheet = Sheet(
        name="batch",
        way="batch",
        title="call",
        settings=settings,
        tables=batch_tables,
        pictures=lambda sums, own: {
            "speed": lambda: pictures.facets(
                sums,
                own,
                "batch",
                "temperature",
                WALL_SPEED,
                "speed over plain decoding",
                over_plain=True,
            )
        },
    )
    return Experiment(name="batch", sheets=(sheet,))


def batch_tables(sums: Sums, settings: Sequence[Setting]) -> list[Table]:
    """Return rates, and what auto chose."""
    tables = [Table(rows=rate_table(sums, settings))]
    lines = choice_lines(sums, settings)
    if lines:
        lines += paired_lines(sums, settings)
        rows = [["plans and reasons"], *([line] for line in lines)]
        tables.append(Table(title="What auto chose", rows=rows, notes=(EXPLAINED,)))
    return tables


def endpoint(settings: tuple[Setting, ...]) -> Experiment:
    """A server's answers by clients."""
    return _single("endpoint", "answer", settings, load_table)


def step(settings: tuple[Setting, ...]) -> Experiment:
    """The phases of steps."""
    return _single("step", "setting", settings, step_table)


def solvers(settings: tuple[Setting, ...]) -> Experiment:
    """Solvers on random nodes."""
    return _single("solvers", "row", settings, solver_table)


SYNTHETIC_RULES = "token,block,specinfer,spectr,global_resolution,traversal,gbv,otbv"
SYNTHETIC = tuple(
    dict.fromkeys(
        (
            *sweep(f"{{{SYNTHETIC_RULES}}} 4x6", (0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5)),
            *sweep(f"{{{SYNTHETIC_RULES}}} {{1,2,3,6,8}}x6"),
        )
    )
)


def synthetic(settings: tuple[Setting, ...]) -> Experiment:
    """Rules on trees of made logits, by temperature and by paths."""
    sheet = Sheet(
        name="synthetic",
        way="synthetic",
        title="setting",
        settings=settings,
        tables=synthetic_tables,
        pictures=synthetic_pictures,
    )
    return Experiment(name="synthetic", sheets=(sheet,))


def synthetic_tables(sums: Sums, settings: Sequence[Setting]) -> list[Table]:
    """Return a table by temperature, and one by paths."""
    most = max(own.plan.paths for own in settings if own.temperature != 1)

    def rows(kept: Sequence[Setting], column: Callable[[Setting], str]) -> list[list[str]]:
        def cell(own: Setting) -> str:
            return shown(sums.estimate(ACCEPTANCE, own.name), 3)

        return grid(ACCEPTANCE.name, kept, cell, lambda own: own.rule, column)

    by_heat = [own for own in settings if own.plan.paths in (1, most)]
    by_heat = [own for own in by_heat if own.plan.paths == most or own.rule in ("token", "block")]
    by_paths = [own for own in settings if own.temperature == 1]
    return [
        Table(title=f"K = {most}", rows=rows(by_heat, lambda own: f"T = {own.temperature:g}")),
        Table(title="T = 1", rows=rows(by_paths, lambda own: f"K = {own.plan.paths}")),
    ]


def synthetic_pictures(
    sums: Sums, settings: Sequence[Setting]
) -> Mapping[str, Callable[[], "Canvas"]]:
    """Return pictures by temperature and by paths."""
    by_heat = [own for own in settings if own.plan.paths in (1, 4)]
    by_paths = [own for own in settings if own.temperature == 1]
    return {
        "by_temperature": lambda: pictures.facets(sums, by_heat, "temperature", "paths"),
        "by_paths": lambda: pictures.facets(sums, by_paths, "paths", "temperature"),
    }


def _single(
    name: str,
    unit: str,
    settings: tuple[Setting, ...],
    rows: Callable[[Sums, Sequence[Setting]], list[list[str]]],
) -> Experiment:
    """Return an experiment of one sheet with one table."""

    def tables(sums: Sums, measured: Sequence[Setting]) -> list[Table]:
        return [Table(rows=rows(sums, measured))]

    sheet = Sheet(name=name, way=name, title=unit, settings=settings, tables=tables)
    return Experiment(name=name, sheets=(sheet,))


DECLARED: Mapping[str, Callable[[tuple[Setting, ...]], Experiment]] = {
    "mt-bench": mt_bench,
    "served": served,
    "drafters": drafters,
    "study": study,
    "batch": batch,
    "endpoint": endpoint,
    "step": step,
    "solvers": solvers,
    "synthetic": synthetic,
}
"""Experiments of one sheet, by name."""


def declared(head: Head) -> Experiment:
    """Return the experiment of a stored run.

    Raises:
        InvalidArgument: This version has no such experiment.
    """
    name = head.experiment
    if name in PAPERS:
        return paper(name, tables=head.setup.get("tables"))
    if name not in DECLARED:
        raise InvalidArgument("experiment", name, one_of([*DECLARED, *PAPERS], name))
    [settings] = head.sheets.values()
    return DECLARED[name](settings)


def facts(run: Run) -> dict[str, str]:
    """Return what was run and where, by heading."""
    setup, where = run.head.setup, run.head.environment
    model, drafter, dtype = (setup.get(name) or "" for name in ("model", "drafter", "dtype"))
    hidden = ("question_ids", "questions_sha256", "template", "model", "drafter", "dtype", "tables")
    shown_facts = {
        name: value for name, value in setup.items() if name not in hidden and value not in ("", {})
    }
    asked = setup.get("question_ids")
    told = {
        "Models": f"{Path(model).name} ({dtype}), drafter {Path(drafter or 'none').name}",
        "Questions": f"{len(asked)} of {setup.get('suite')}" if asked else "none",
        "Setup": ", ".join(f"{name} {value}" for name, value in shown_facts.items() if value),
        "Machine": f"{where.processor}, {where.cores} cores, {where.threads} threads; "
        f"{where.device}; {where.platform}",
        "Versions": ", ".join(f"{package} {v}" for package, v in where.versions.items()),
        "Started": where.started,
    }
    return {heading: fact for heading, fact in told.items() if fact}


DEFINITIONS = [f"{figure.name}: {figure.definition}." for figure in CONVERSATIONS]
