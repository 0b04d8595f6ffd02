"""The experiments of commands other than papers, from the settings that they measure."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.eval import pictures
from eaglegbv.eval.experiment import Draw, Experiment, Settings, Sheet, Tables
from eaglegbv.eval.figures import (
    ACCEPTANCE,
    CONVERSATIONS,
    RATIO_DIGITS,
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
from eaglegbv.eval.tables import (
    Cell,
    Column,
    Table,
    by_setting,
    counted,
    figured,
    named,
    pivot,
    valued,
)
from eaglegbv.eval.ways.calls import batch_tables
from eaglegbv.eval.ways.clients import LOAD_COLUMNS
from eaglegbv.eval.ways.conversations import SHEET
from eaglegbv.eval.ways.solvers import SOLVER_COLUMNS
from eaglegbv.eval.ways.steps import STEP_COLUMNS

PHASES = "Milliseconds per token of the answers, by phase (prefill counted)"


def conversation_tables(sums: Sums, settings: Settings) -> list[Table]:
    """Return the main table, acceptance by position and by category, and phases."""
    return [
        by_setting(sums, settings),
        by_position(sums, settings),
        by_category(sums, settings),
        _figures(sums, settings, phase_figures(), PHASES),
    ]


def by_position(sums: Sums, settings: Settings) -> Table:
    """Return the share of trees as deep that accept a token at each position."""
    drafted = [setting for setting in settings if sums.names("offered.", setting.name)]
    deepest = max((len(sums.names("offered.", setting.name)) for setting in drafted), default=0)
    return _figures(sums, drafted, position_figures(deepest), "Acceptance by position")


def _figures(sums: Sums, settings: Settings, figures: Sequence[Figure], title: str) -> Table:
    """Return figures of settings without intervals, of those that anything was counted for."""
    known = [f for f in figures if any(sums.total(setting.name, f.above) for setting in settings)]
    columns = {figure.name: valued(figure) for figure in known}
    return by_setting(sums, settings, {"setting": named, **columns}, title)


def by_category(sums: Sums, settings: Settings, corner: str = "setting") -> Table:
    """Return the acceptance length of each setting in each category."""
    cells: dict[tuple[str, str], Cell] = {}
    for category in sums.categories:
        part = sums.only(category)
        for setting in settings:
            if part.has(setting.name):
                cells[setting.name, category] = valued(ACCEPTANCE)(part, setting)
    return pivot(corner, cells, "Acceptance length by category")


def _broken_off(sums: Sums, setting: Setting) -> int:
    return sums.errors[setting.name]


SERVED: Mapping[str, Column] = {
    "setting": named,
    "conversations": lambda sums, setting: sums.count(setting.name),
    "broken off": _broken_off,
    "tokens": counted("answer_tokens"),
    ACCEPTANCE.name: figured(ACCEPTANCE),
}
"""What conversations through a server came to: what is accepted, and no speeds."""


def drafter_tables(sums: Sums, settings: Settings) -> list[Table]:
    """Return acceptance lengths, with the ratio to the first drafter's and shares by position."""
    first = {setting.plan: setting.name for setting in reversed(settings)}

    def ratio(sums: Sums, setting: Setting) -> Cell:
        base = first[setting.plan]
        return None if setting.name == base else sums.over(ACCEPTANCE, setting.name, base)

    def share(depth: int, sums: Sums, setting: Setting) -> Cell:
        figure = Figure("", f"accepted.{depth}", "steps")
        return valued(figure)(sums, setting) if depth <= setting.plan.depth else ""

    columns: dict[str, Column] = {
        "drafter": lambda _, setting: setting.who,
        "verifier": lambda _, setting: setting.plan.verifier,
        "K": lambda _, setting: setting.plan.paths,
        ACCEPTANCE.name: figured(Figure("", "tokens", "steps", digits=RATIO_DIGITS)),
        "ratio": ratio,
    }
    for depth in range(1, 1 + max(setting.plan.depth for setting in settings)):
        columns[f"{depth} or more"] = partial(share, depth)
    return [by_setting(sums, settings, columns), by_category(sums, settings, "drafter")]


def batch_pictures(sums: Sums, settings: Settings) -> dict[str, Draw]:
    """Return the picture of speeds by batch."""
    y = "speed over plain decoding"
    return {"speed": lambda: pictures.facets(sums, settings, "batch", "temperature", WALL_SPEED, y)}


SYNTHETIC_RULES = "token,block,specinfer,spectr,global_resolution,traversal,gbv,otbv"
_BY_HEAT = sweep(f"{{{SYNTHETIC_RULES}}} 4x6", (0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5))
_BY_PATHS = sweep(f"{{{SYNTHETIC_RULES}}} {{1,2,3,4,6,8}}x6")
SYNTHETIC = tuple(dict.fromkeys((*_BY_HEAT, *_BY_PATHS)))
"""Rules on trees of made logits, by temperature and by paths."""


def synthetic_tables(sums: Sums, _: Settings) -> list[Table]:
    """Return a table by temperature, and one by paths."""

    def table(settings: Settings, column: Callable[[Setting], str], title: str) -> Table:
        figure = Figure("", "tokens", "steps")
        cells: dict[tuple[str, str], Cell] = {
            (setting.rule, column(setting)): sums.estimate(figure, setting.name)
            for setting in settings
            if sums.has(setting.name)
        }
        return pivot(ACCEPTANCE.name, cells, title)

    return [
        table(_BY_HEAT, lambda setting: f"T = {setting.temperature:g}", "K = 4"),
        table(_BY_PATHS, lambda setting: f"K = {setting.plan.paths}", "T = 1"),
    ]


def synthetic_pictures(sums: Sums, _: Settings) -> dict[str, Draw]:
    """Return pictures by temperature and by paths."""
    return {
        "by_temperature": lambda: pictures.facets(sums, _BY_HEAT, "temperature", "paths"),
        "by_paths": lambda: pictures.facets(sums, _BY_PATHS, "paths", "temperature"),
    }


def one_table(columns: Mapping[str, Column]) -> Tables:
    """Return what shows these columns of all settings."""
    return lambda sums, settings: [by_setting(sums, settings, columns)]


SHEETS: Mapping[str, Callable[..., Sheet]] = {
    "mt-bench": partial(
        Sheet,
        name=SHEET,
        unit="conversation",
        tables=conversation_tables,
        pictures=pictures.of_conversations,
    ),
    "served": partial(Sheet, name=SHEET, unit="conversation", tables=one_table(SERVED)),
    "drafters": partial(Sheet, name=SHEET, unit="conversation", tables=drafter_tables),
    "batch": partial(
        Sheet, name="batch", unit="call", tables=batch_tables, pictures=batch_pictures
    ),
    "endpoint": partial(Sheet, name="endpoint", unit="answer", tables=one_table(LOAD_COLUMNS)),
    "step": partial(Sheet, name="step", unit="setting", tables=one_table(STEP_COLUMNS)),
    "solvers": partial(Sheet, name="solvers", unit="row", tables=one_table(SOLVER_COLUMNS)),
    "synthetic": partial(
        Sheet,
        name="synthetic",
        unit="setting",
        tables=synthetic_tables,
        pictures=synthetic_pictures,
    ),
    "study": study,
}
"""What commands measure, by the name of their experiment."""


def bench(name: str, settings: Settings) -> Experiment:
    """Return the experiment of a command."""
    return Experiment(name=name, sheets=(SHEETS[name](settings=tuple(settings)),))


def declared(head: Head) -> Experiment:
    """Return the experiment of a stored run.

    Raises:
        InvalidArgument: This version has no such experiment.
    """
    name = head.experiment
    if name in PAPERS:
        return paper(name, tables=head.setup.get("tables"))
    if name not in SHEETS:
        raise InvalidArgument("experiment", name, one_of([*SHEETS, *PAPERS], name))
    [settings] = head.sheets.values()
    return bench(name, settings)


HIDDEN = ("question_ids", "questions_sha256", "template", "model", "drafter", "dtype", "tables")


def facts(run: Run) -> dict[str, str]:
    """Return what was run and where, by heading."""
    setup = run.head.setup
    where = run.head.environment
    model, drafter, dtype = (setup.get(name) or "" for name in ("model", "drafter", "dtype"))
    asked = setup.get("question_ids")
    others = (f"{name} {value}" for name, value in setup.items() if value and name not in HIDDEN)
    facts = {
        "Models": f"{Path(model).name} ({dtype}), drafter {Path(drafter or 'none').name}",
        "Questions": f"{len(asked)} of {setup.get('suite')}" if asked else "none",
        "Setup": ", ".join(others),
        "Machine": f"{where.processor}, {where.cores} cores, {where.threads} threads; "
        f"{where.device}; {where.platform}",
        "Versions": ", ".join(f"{package} {v}" for package, v in where.versions.items()),
        "Started": where.started,
    }
    return {heading: fact for heading, fact in facts.items() if fact}


DEFINITIONS = [f"{figure.name}: {figure.definition}." for figure in CONVERSATIONS]
