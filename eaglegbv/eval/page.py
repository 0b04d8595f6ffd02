"""Runs as Markdown: one in its folder, and the page of results of all that are kept."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Self

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval import pictures
from eaglegbv.eval.benches import DEFINITIONS, declared, facts
from eaglegbv.eval.claims import Finding
from eaglegbv.eval.experiment import Experiment, Report, report
from eaglegbv.eval.figures import ACCEPTANCE, SPEED, Sums
from eaglegbv.eval.observations import Run
from eaglegbv.eval.tables import Cell, Table
from eaglegbv.utils import grouped

FIRST = "smollm2"  # runs of this model come first
MOST_ROWS = 14  # rows of the table that a section shows; the run's own page has all
MOST_FINDINGS = 4  # directions that a section lists of those that are contradicted


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return findings as rows."""
    headings = ["should be", "the paper's", "measured", "verdict"]
    rows = ([o.statement, o.paper or None, o.ratio, o.verdict] for o in findings)
    return Table(rows=[headings, *rows])


def counts(findings: Sequence[Finding]) -> list[str]:
    """Return how many directions came out how, the paper's own apart from this package's."""
    lines = []
    for what, of_paper in (("the paper's", True), ("this package's and theorems'", False)):
        verdicts = Counter(one.verdict for one in findings if bool(one.paper) is of_paper)
        listed = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        if listed:
            lines.append(f"of {verdicts.total()} directions, {what}: {listed}")
    return lines


def report_text(of: Report, tables: int | None = None) -> str:
    """Return a report for the terminal: tables, or the first of them alone, and directions."""
    parts = [table.text for table in of.tables[:tables]]
    if tables is None and of.findings:
        parts += [findings_table(of.findings).text, "\n".join(counts(of.findings))]
    return "\n\n".join([*parts, *(of.notes if tables is None else ())])


def run_page(run: Run, of: Report) -> str:
    """Return the report of a run: what was run, where, and the results."""
    sections = [f"# {of.title or run.head.experiment}", _lines(_facts(run))]
    for table in of.tables:
        sections += _section(table)
    if of.findings:
        sections += ["## Directions", findings_table(of.findings).markdown]
    sections += ["## What the figures mean", _lines(DEFINITIONS)]
    if broken := list(_broken(run)):
        sections += ["## Conversations that broke off (counted in no figure)", _lines(broken)]
    return "\n\n".join([*sections, *of.notes]) + "\n"


def _facts(run: Run) -> Iterator[str]:
    for name, fact in facts(run).items():
        yield f"{name}: {fact}"
    template = run.head.setup.get("template")
    if isinstance(template, str):
        digest = hashlib.sha256(template.encode()).hexdigest()[:16]
        yield f"Chat template: {len(template)} characters, SHA-256 {digest}; whole in head.json"


def _section(table: Table) -> list[str]:
    heading = [f"## {table.title}"] if table.title else []
    return [*heading, table.markdown, *table.notes]


def _broken(run: Run) -> Iterator[str]:
    for sheet in run.sheets:
        for one in run.observations(sheet):
            if one.error is not None:
                yield f"{one.setting}, {one.unit}, repeat {one.repeat}: {one.error}"


def _lines(lines: Sequence[str] | Iterator[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


# The page of all runs.


@dataclass(frozen=True, slots=True)
class Kept:
    """A run that a folder of results keeps, with what came of it."""

    name: str
    run: Run
    experiment: Experiment
    report: Report

    @classmethod
    def of(cls, name: str, run: Run) -> Self:
        """Return a run with what came of it."""
        experiment = declared(run.head)
        return cls(name, run, experiment, report(experiment, run))

    @property
    def sums(self) -> list[Sums]:
        """Its sums, by sheet."""
        return [Sums(self.run.observations(sheet.name)) for sheet in self.experiment.sheets]

    def pictures(self) -> Mapping[str, pictures.Draw]:
        """What can be drawn of it, by name."""
        drawn: dict[str, pictures.Draw] = {}
        for sheet, sums in zip(self.experiment.sheets, self.sums, strict=True):
            drawn |= sheet.pictures(sums, sheet.settings)
        return drawn


def keep(folder: Path, name: str, source: Path) -> Path:
    """Write what a run holds, without texts, as ``folder/name.json``.

    Raises:
        InvalidArgument: There is no run.
    """
    run = Run.read(source, "add")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_bytes(run.compact())
    return path


def kept(folder: Path) -> list[Kept]:
    """Return the runs of a folder, those of larger models first.

    Raises:
        InvalidArgument: A file is no run.
    """
    if not folder.is_dir():
        raise InvalidArgument("folder", str(folder), "a folder of measured files")
    paths = sorted(folder.glob("*.json"))
    runs = [Kept.of(path.stem, Run.read(path, "folder")) for path in paths]
    return sorted(runs, key=lambda one: (FIRST not in str(one.run.head.setup["model"]), one.name))


def write(folder: Path, to: Path) -> list[Path]:
    """Write the page of a folder's runs, and their pictures and own pages; return the paths."""
    runs = kept(folder)
    written = []
    with pictures.picture_style():
        for one in runs:
            for part, picture in one.pictures().items():
                path = folder / f"{one.name}_{part}.svg"
                canvas = picture()
                pictures.add_caption(canvas, caption(one.run))
                written.append(pictures.save_picture(canvas, path))
    for one in runs:
        path = folder / f"{one.name}.md"
        path.write_text(run_page(one.run, one.report), encoding="utf-8")
        written.append(path)
    to.write_text(page(runs, folder.name), encoding="utf-8")
    return [*written, to]


def fill(path: Path, folder: Path) -> Path:
    """Write the blocks of a page anew: what stands from ``<!-- run NAME -->`` to ``<!-- end -->``.

    There come the tables of the folder's run of that name, and what was run; other text stays, and
    so do blocks of which the folder has no run.

    Raises:
        InvalidArgument: There is no such page.
    """

    def block(match: re.Match[str]) -> str:
        source = folder / f"{match[1]}.json"
        if not source.is_file():
            return match[0]
        one = Kept.of(match[1], Run.read(source, "fill"))
        parts = [_lines(_facts(one.run))]
        for table in one.report.tables:
            parts += [f"**{table.title}**", table.markdown, *table.notes]
        return "\n\n".join([f"<!-- run {one.name} -->", *parts, "<!-- end -->"])

    if not path.is_file():
        raise InvalidArgument("fill", str(path), "a page of Markdown")
    text = path.read_text(encoding="utf-8")
    filled = re.sub(r"<!-- run (\S+) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)
    path.write_text(filled, encoding="utf-8")
    return path


def caption(run: Run) -> str:
    """Return what was measured and where, in a line."""
    known = facts(run)
    where = run.head.environment
    parts = [known.get("Models", ""), known.get("Questions", ""), where.processor]
    return "; ".join([*filter(None, parts), f"{where.threads} threads", where.started[:10]])


def page(runs: Sequence[Kept], folder: str) -> str:
    """Return the page of runs; the folder beside it has pictures and each run's own page."""
    sections = ["# Results", _when(runs)]
    sections += [_of_run(one, folder) for one in runs]
    return "\n\n".join([*sections, ABOUT]) + "\n"


ABOUT = (
    "## About this page\n\nWritten by `eaglegbv bench results` from the measured files in "
    "[results/](results): no number or verdict here is typed by hand. How figures are defined, "
    "and what counts in them: [benchmarks.md](study/benchmarks.md). Brackets are 95% intervals "
    "over questions (a jackknife's t interval on the logarithm); with fewer than 8 questions "
    "there is no verdict. Speeds are of the machine, version and commit named; others differ."
)


def _of_run(one: Kept, folder: str) -> str:
    drawn = [f"![{part}]({folder}/{one.name}_{part}.svg)" for part in one.pictures()]
    parts = [f"## {one.name}", *drawn]
    for table in one.report.tables[:1]:
        first = Table(rows=table.rows[: MOST_ROWS + 1])
        parts += [f"**{table.title}**" if table.title else "", first.markdown]
    if one.report.findings:
        parts.append(_lines(counts(one.report.findings)))
        against = [f for f in one.report.findings if f.verdict in ("opposite", "against")]
        if against:
            parts += ["Contradicted, the first of them:"]
            parts.append(findings_table(against[:MOST_FINDINGS]).markdown)
    setup = "; ".join(f"{name}: {fact}" for name, fact in facts(one.run).items())
    parts.append(f"All tables: [{one.name}.md]({folder}/{one.name}.md). {setup}.")
    return "\n\n".join(filter(None, parts))


def _when(runs: Sequence[Kept]) -> str:
    rows: list[list[Cell]] = [["run", "T", "figure", "best", "not told apart", "behind"]]
    for one in runs:
        if one.run.head.experiment == "mt-bench":
            rows += _ranks(one)
    text = (
        "## What to use when\n\nA setting is behind the best where the whole interval of its ratio "
        "to it lies below 1, else it cannot be told from it. One request at a time."
    )
    return f"{text}\n\n{Table(rows=rows).markdown}" if len(rows) > 1 else text


def _ranks(one: Kept) -> Iterator[list[Cell]]:
    [sheet], [sums] = one.experiment.sheets, one.sums
    by_temperature = grouped(sheet.settings, lambda setting: setting.temperature).items()
    for (temperature, settings), figure in product(by_temperature, (ACCEPTANCE, SPEED)):
        names = [setting.name for setting in settings if sums.has(setting.name)]
        if names:
            rank = sums.rank(figure, names)
            best = f"`{rank.leader}` ({rank.value.text})"
            where = [one.name, f"{temperature:g}", figure.name]
            yield [*where, best, _listed(rank.tied), _listed(rank.behind)]


def _listed(names: Sequence[str]) -> str | None:
    return ", ".join(f"`{name}`" for name in names) or None
