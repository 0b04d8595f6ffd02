"""An experiment: sheets of settings measured in a way, and what is to be seen in them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from eaglegbv.eval.claims import Claim, Finding
from eaglegbv.eval.figures import Sums
from eaglegbv.eval.observations import Environment, Head, Observation, Run
from eaglegbv.eval.settings import Setting, by_name
from eaglegbv.eval.tables import Table, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


class Part(NamedTuple):
    """What is measured at once, and kept as soon as it is."""

    key: str  # unique in the sheet
    units: int  # of progress
    measure: Callable[[], list[Observation]]


Settings: TypeAlias = Sequence[Setting]
Way: TypeAlias = Callable[[Settings], Iterator[Part]]
"""How settings are measured."""


def one_by_one(measured: Callable[[Setting], list[Observation]]) -> Way:
    """Return the way that measures settings one after another, each as a part."""
    return lambda settings: (Part(one.name, 1, partial(measured, one)) for one in settings)


Tables: TypeAlias = Callable[[Sums, Settings], list[Table]]
"""What is printed of a sheet."""

Draw: TypeAlias = "Callable[[], Canvas]"
Pictures: TypeAlias = Callable[[Sums, Settings], Mapping[str, Draw]]
"""What is drawn of a sheet, by name."""

Bar: TypeAlias = Callable[[str, int], AbstractContextManager[Any]]
"""Shows a bar, given what is measured and how many units it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """Settings measured alike, and what is shown of them."""

    name: str  # of the way that measures them; unique within the experiment
    settings: tuple[Setting, ...]
    tables: Tables
    unit: str = ""  # of progress
    claims: tuple[Claim, ...] = ()  # what should be seen
    pictures: Pictures = lambda sums, settings: {}  # noqa: ARG005


Overall: TypeAlias = Callable[
    [Mapping[str, Sums], Mapping[str, Any]], tuple[list[Table], list[Finding]]
]
"""What is made of all sheets' sums, by sheet, and of the setup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What is measured by a command."""

    name: str
    title: str = ""
    sheets: tuple[Sheet, ...]
    notes: tuple[str, ...] = ()
    overall: Overall | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an experiment: a pure function of what was observed."""

    title: str
    tables: tuple[Table, ...]
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def content(self) -> dict[str, object]:
        """It for JSON, with numbers as numbers."""
        tables = [
            {"title": one.title, "rows": [list(map(plain, row)) for row in one.rows]}
            for one in self.tables
        ]
        return {**msgspec.structs.asdict(self), "tables": tables}


def open_run(
    experiment: Experiment, setup: Mapping[str, Any], environment: Environment, folder: Path | None
) -> Run:
    """Begin or go on with the run of an experiment; without a folder nothing is kept."""
    sheets = {sheet.name: sheet.settings for sheet in experiment.sheets}
    for settings in sheets.values():
        by_name(settings)
    plain = msgspec.json.decode(msgspec.json.encode(dict(setup)))  # as a folder gives it back
    head = Head(experiment=experiment.name, setup=plain, sheets=sheets, environment=environment)
    return Run(head, ()) if folder is None else Run.open(folder, head)


def measure(experiment: Experiment, run: Run, ways: Mapping[str, Way], bar: Bar) -> None:
    """Measure all that a run lacks, in the ways that sheets name."""
    for sheet in experiment.sheets:
        parts = list(ways[sheet.name](sheet.settings))
        with bar(sheet.unit or sheet.name, sum(part.units for part in parts)) as progress:
            for part in parts:
                known = run.has(sheet.name, part.key)
                observed = run.part(sheet.name, part.key, part.measure)
                progress.update(part.units, "" if known else note(observed))


def note(observed: Sequence[Observation]) -> str:
    """Return in words how what was measured last went."""
    if not observed or not observed[-1].sums.get("steps"):
        return ""
    name = observed[-1].setting
    sums = observed[-1].sums
    words = f"{name}: {sums['tokens'] / sums['steps']:.2f} tokens/forward"
    return (
        f"{words}, {sums['tokens'] / sums['seconds']:.0f} tokens/s" if "seconds" in sums else words
    )


def report(experiment: Experiment, run: Run) -> Report:
    """Return what came of an experiment so far."""
    tables: list[Table] = []
    findings: list[Finding] = []
    sums = {sheet.name: Sums(run.observations(sheet.name)) for sheet in experiment.sheets}
    if experiment.overall is not None:
        setup = {"hardware": run.head.environment.processor, **run.head.setup}
        tables, findings = experiment.overall(sums, setup)
    for sheet in experiment.sheets:
        own = sums[sheet.name]
        measured = [setting for setting in sheet.settings if setting.name in own.settings]
        tables += sheet.tables(own, measured)
        for claim in sheet.claims:
            findings += claim.findings(own, measured)
    return Report(
        title=experiment.title,
        tables=tuple(tables),
        findings=tuple(findings),
        notes=experiment.notes,
    )
