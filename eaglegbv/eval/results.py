"""The page of results: measured files, compact and named, in one folder, and Markdown of them.

Every number and verdict on the page is computed from the files. Of each kind the page shows the
latest run; full tables of a paper's comparison stay in its file.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from eaglegbv.config import AutoPlan, Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval import plots, statistics
from eaglegbv.eval.drafters import DrafterReport, category_table, depth_table
from eaglegbv.eval.papers.base import AGAINST, AGREES, OPEN, Report, Table, findings_table
from eaglegbv.eval.papers.registry import PAPERS
from eaglegbv.eval.records import Environment, Record, Results, Turn, read_json
from eaglegbv.eval.report import (
    acceptance_text,
    facts,
    markdown_table,
    pivot,
    table,
    with_interval,
)
from eaglegbv.eval.runner import load_results, read_results
from eaglegbv.eval.study import (
    Study,
    study_canvas,
    study_table,
    temperature_findings,
    tree_findings,
)
from eaglegbv.eval.throughput import Cell, Timing, over_plain, rate_table
from eaglegbv.metrics import Phase, RequestMetrics
from eaglegbv.utils import Content

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

DIGITS = 6  # digits to which seconds are rounded
MOST_ROWS = 7
"""Most rows, headings included, of a paper's table that the page shows; files have them all."""


class PaperResults(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison with a paper."""

    report: Report  # the `report.json` that `bench paper` wrote
    title: str = ""  # the paper and what is compared
    environment: Environment | None = None  # where and when it was measured, if its folder tells


class BatchResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results that ``bench batch --out`` wrote."""

    timings: tuple[Timing, ...]  # timings of all calls
    environment: Environment  # where and when they were measured
    model: str = ""  # target
    drafter: str = ""  # drafter
    verifier: str = ""  # verifier of the fixed plans
    suite: str = ""  # source of the prompts
    compile_backend: str = ""  # backend with which the engine was compiled; empty if it was not
    dtype: str = ""  # dtype in which all models computed; empty in files older than this field

    @property
    def variant(self) -> str:
        """How it differs from a usual run, as a suffix of its name."""
        unusual = [f"compiled ({self.compile_backend})"] if self.compile_backend else []
        unusual += [self.dtype] if self.dtype not in ("", "float32") else []
        return "".join(f", {word}" for word in unusual)


class NamedReport(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter's report, with the name under which it is shown."""

    name: str
    report: DrafterReport


class DrafterResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results that ``bench drafters --json`` printed."""

    origin: str  # where the questions come from
    drafters: tuple[NamedReport, ...]  # drafters and plans, in order
    environment: Environment | None = None  # where and when they were measured, if it was recorded


Evidence: TypeAlias = Results | PaperResults | BatchResults | DrafterResults | Study

KINDS: Mapping[str, type[Evidence]] = {
    "mt-bench": Results,
    "baselines": Results,
    "grid": Results,
    "set": Results,
    "paper": PaperResults,
    "study": Study,
    "batch": BatchResults,
    "drafters": DrafterResults,
}
"""Kind of a file, by how its name begins: ``batch-inductor.json`` is a run by batch too."""


def read_evidence(folder: Path) -> dict[str, Evidence]:
    """Return the content of every file of a folder, by name without suffix, in order of names.

    Files with names of no known kind belong to other pages and are not read; see
    :func:`other_files`.

    Raises:
        InvalidArgument: A file's content is not what its name says.
    """
    known = [path for path in sorted(folder.glob("*.json")) if _kind(path.stem) is not None]
    return {path.stem: _read(path) for path in known}


def other_files(folder: Path) -> list[Path]:
    """Return the files of a folder whose names begin with none of :data:`KINDS`."""
    return [path for path in sorted(folder.glob("*.json")) if _kind(path.stem) is None]


def add_evidence(folder: Path, name: str, source: Path) -> Path:
    """Save the parts of a measured file or run that the page needs, as ``folder/name.json``.

    Args:
        folder: Folder to write to.
        name: Name, which states the kind; see :data:`KINDS`.
        source: Folder of a run or of a comparison with a paper, or a file.

    Raises:
        InvalidArgument: The name is of no known kind, or the source is not of this kind.
    """
    content = _encoded(_from(kind_of(name), source))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_bytes(content + b"\n")
    return path


def kind_of(name: str) -> type[Evidence]:
    """Return the type of the content of a file with this name.

    Raises:
        InvalidArgument: The name begins with none of :data:`KINDS`.
    """
    found = _kind(name)
    if found is None:
        raise InvalidArgument("name", name, f"one that begins with {', '.join(sorted(KINDS))}")
    return KINDS[found]


def _kind(name: str) -> str | None:
    return next((kind for kind in KINDS if f"{name}-".startswith(f"{kind}-")), None)


def compact(results: Results) -> Results:
    """Return a run with one turn per conversation and without texts; no figure changes."""
    return Results(
        # The folder from which its questions were read matters to no reader of the page.
        settings=msgspec.structs.replace(
            results.settings, origin=Path(results.settings.origin).name
        ),
        environment=results.environment,
        records=[
            msgspec.structs.replace(one, turns=[_sum(one.turns)] if one.turns else [])
            for one in results.records
        ],
    )


def _sum(turns: Sequence[Turn]) -> Turn:
    """Add up turns; no figure needs plans, cached tokens or pre-emptions."""
    metrics = [turn.metrics for turn in turns]
    timed = {phase: [m.seconds[phase] for m in metrics if phase in m.seconds] for phase in Phase}

    return Turn(
        text="",
        completion_tokens=sum(turn.completion_tokens for turn in turns),
        finish_reason="",
        wall_seconds=round(sum(turn.wall_seconds for turn in turns), DIGITS),
        metrics=RequestMetrics(
            prompt_tokens=sum(m.prompt_tokens for m in metrics),
            target_forwards=sum(m.target_forwards for m in metrics),
            committed_tokens=sum(m.committed_tokens for m in metrics),
            accepted_tokens=sum(m.accepted_tokens for m in metrics),
            drafted_nodes=sum(m.drafted_nodes for m in metrics),
            offered_by_depth=statistics.added(*(m.offered_by_depth for m in metrics)),
            accepted_by_depth=statistics.added(*(m.accepted_by_depth for m in metrics)),
            seconds={phase: round(sum(own), DIGITS) for phase, own in timed.items() if own},
        ),
    )


def _from(kind: type[Evidence], source: Path) -> Evidence:
    if kind is Results:
        return compact(load_results(source))
    if kind is PaperResults and source.is_dir():
        told = source / "report.txt"
        title = told.read_text(encoding="utf-8").partition("\n")[0] if told.is_file() else ""
        # The first file of the folder that tells where it was measured.
        environment = next(filter(None, map(_where, sorted(source.glob("*.json")))), None)
        report = _decode(source / "report.json", Report)
        return PaperResults(report=report, title=title, environment=environment)
    if kind is DrafterResults:
        found = _decode(source, DrafterResults)
        bare = tuple(
            NamedReport(name=d.name, report=msgspec.structs.replace(d.report, by_question={}))
            for d in found.drafters
        )
        return msgspec.structs.replace(found, origin=Path(found.origin).name, drafters=bare)
    return _decode(source / "study.json" if kind is Study and source.is_dir() else source, kind)


class _Where(msgspec.Struct):
    environment: Environment | None = None


def _where(path: Path) -> Environment | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Where).environment
    except msgspec.DecodeError:  # for example, a file of texts
        return None


def _read(path: Path) -> Evidence:
    kind = kind_of(path.stem)
    return read_results(path) if kind is Results else _decode(path, kind)


def _decode(path: Path, kind: type[Content]) -> Content:
    return read_json(path, kind, argument="file", expected=f"a readable file of {kind.__name__}")


def _encoded(evidence: Evidence) -> bytes:
    """Encode with one record a line, leaving out counts of a run that are zero."""
    content = msgspec.to_builtins(evidence)
    if not isinstance(evidence, Results):
        return msgspec.json.encode(content)
    for record in content["records"]:
        for turn in record["turns"]:
            turn["metrics"] = {name: value for name, value in turn["metrics"].items() if value}
    records = ",\n".join(_plain(record) for record in content.pop("records"))
    return f'{_plain(content)[:-1]},"records":[\n{records}\n]}}'.encode()


def _plain(content: object) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


# The sections of the page, each for one measured file, as Markdown: figures first.


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: its heading, and its paragraphs and tables."""

    title: str
    parts: tuple[str, ...]

    @property
    def anchor(self) -> str:
        """Name for links to the heading, by the rules of common Markdown renderers."""
        kept = "".join(c for c in self.title.lower() if c.isalnum() or c in " -_")
        return kept.replace(" ", "-")

    @property
    def text(self) -> str:
        """The section as Markdown."""
        return "\n\n".join([f"## {self.title}", *(part for part in self.parts if part)])


def _measured(environment: Environment | None) -> str:
    """Return a sentence on where and when something was measured."""
    if environment is None:
        return "Where and when was not recorded."
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    return (
        f"{environment.started[:10]}, {environment.processor}, {environment.cores} cores, "
        f"{environment.threads} threads, {environment.device}; {versions}."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"


def _lines(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _run_section(name: str, results: Results, pictures: str) -> Section:
    summaries = statistics.summarise(results)
    settings = results.settings
    asked = len(settings.question_ids) * settings.repeats * len(settings.settings)
    held = sum(summary.conversations for summary in summaries)
    broken = sum(summary.errors for summary in summaries)
    label = "" if name == settings.suite else f" ({name})"
    return Section(
        f"{settings.suite}: {len(settings.question_ids)} questions{label}",
        (
            markdown_table(table(summaries)),
            pictures,
            "Share of the forwards that accept a token at each depth:",
            acceptance_text(summaries),
            "Block efficiency by category:",
            markdown_table(_by_category(results)),
            f"{held} of {asked} conversations held to their end, {broken} broke off. "
            + "; ".join(f"{heading}: {fact}" for heading, fact in facts(results).items())
            + ".",
        ),
    )


def _by_category(results: Results) -> list[list[str]]:
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in statistics.whole(results.records):
        groups.setdefault((record.setting, record.category), []).append(record)
    figure = statistics.BLOCK_EFFICIENCY
    return pivot("setting", {key: f"{figure.of(own):.2f}" for key, own in groups.items()})


def _paper_section(name: str, content: PaperResults, pictures: str) -> Section:
    report = content.report
    shown = _shown(report.tables)
    parts = [pictures]
    for one in shown:
        parts += [f"**{one.title}**", markdown_table(one.rows)]
    if report.findings:
        parts.append(f"{_verdicts(content)}.".capitalize())
    if report.exceptions:
        parts += ["Those against:", markdown_table(findings_table(report.exceptions))]
    left = len(report.tables) - len(shown)
    more = [f"{left} more tables, long ones or alike, are in `{name}.json`"] if left else []
    notes = [*(note for one in shown for note in one.notes), *report.notes, *more]
    told = "; ".join(note.removesuffix(".") for note in dict.fromkeys(notes))
    title = content.title or EXPECTED.get(name, name)
    return Section(title, (*parts, f"{told}. {_measured(content.environment)}"))


def _shown(tables: Sequence[Table]) -> list[Table]:
    """Return the short tables; of those that differ only in temperature or length, the last."""
    short = [one for one in tables if len(one.rows) <= MOST_ROWS]
    return list({(one.title.partition(", T =")[0], one.rows[0][0]): one for one in short}.values())


def _verdicts(content: PaperResults) -> str:
    """Return a sentence on how many of a paper's directions were confirmed."""
    counted = Counter(one.verdict for one in content.report.findings)
    counts = ", ".join(f"{counted[verdict]} {verdict}" for verdict in (AGREES, AGAINST, OPEN))
    return f"of {counted.total()} directions {counts}"


def _study_section(_: str, study: Study, pictures: str) -> Section:
    """Return the section of a study: its first drafter, with the most paths."""
    own = [cell for cell in study.sampled if cell.drafter == study.drafters[0]]
    most = max((cell.paths for cell in own), default=0)
    shown = [cell for cell in own if cell.paths == most or cell.temperature == 0]
    part = msgspec.structs.replace(study, drafters=study.drafters[:1], sampled=tuple(shown))
    others = f" {', '.join(study.drafters[1:])}, and fewer paths, are in `study.json`."
    asked = f"{len(study.questions)} questions of {study.suite}; target {study.model}."
    return Section(
        "Sampled and deterministic trees, and the draft temperature",
        (
            f"Tokens a step, at equal numbers of verified nodes, with {most} paths:",
            markdown_table(study_table(part)),
            _lines([f"{finding}." for finding in temperature_findings(part)]),
            pictures,
            f"{asked}{others} {_measured(study.environment)}",
        ),
    )


def _batch_section(name: str, content: BatchResults, pictures: str) -> Section:
    about = ", ".join(filter(None, (content.model, content.drafter, content.suite)))
    fixed = f"PATHSxDEPTH is a fixed plan of `{content.verifier}`. " if content.verifier else ""
    backend = content.compile_backend
    compiled = f"The engine is compiled (`--compile {backend}`); " if backend else ""
    return Section(
        f"Tokens/s by batch{content.variant} ({name})",
        (
            markdown_table(rate_table(content.timings)),
            pictures,
            "Medians over repeats; in parentheses the median ratio to `none`, plain decoding "
            f"by this engine, within a repeat. {fixed}{about}. {compiled}"
            f"{_measured(content.environment)}",
        ),
    )


def _drafters_section(_: str, content: DrafterResults, pictures: str) -> Section:
    names = [one.name for one in content.drafters]
    reports = [one.report for one in content.drafters]
    return Section(
        "Drafters",
        (
            markdown_table(depth_table(reports, names)),
            "Acceptance length by category:",
            markdown_table(category_table(reports, names)),
            pictures,
            f"Questions: {content.origin}. {_measured(content.environment)}",
        ),
    )


# The section that ranks verifiers over all measured files.


def _when_section(evidence: Mapping[str, Evidence], order: Sequence[str]) -> Section:
    """Return the section that says which verifier is best when; runs are shown in this order."""
    runs = {name: one for name in order if isinstance(one := evidence[name], Results)}
    papers = [one for one in evidence.values() if isinstance(one, PaperResults)]
    parts = [
        "Ranked from the files by their intervals: a setting is behind the best where the whole "
        "interval of its ratio to it lies below 1, else it cannot be told from it. Runs take one "
        "request at a time."
    ]
    if runs:
        leads = (
            _leads(runs, statistics.BLOCK_EFFICIENCY, "the most tokens a forward"),
            _leads(runs, statistics.TOKENS_PER_SECOND, "the most tokens a second"),
        )
        parts += [markdown_table(_run_ranks(runs)), "\n".join(leads)]
    if papers:
        parts += ["What the papers say about order and trend, and what was measured:"]
        parts.append(_lines([f"{one.title}: {_verdicts(one)}." for one in papers]))
    for content in (evidence[name] for name in order):
        if isinstance(content, BatchResults):
            parts += [
                f"By batch{content.variant}, speed over plain decoding "
                "(median and range over repeats; behind is what is slower in its best repeat than "
                "the best in its worst):",
                markdown_table(_load_ranks(content)),
            ]
        if isinstance(content, Study):
            lines = _lines([f"{finding}." for finding in tree_findings(content)])
            parts += ["By kind of tree (draft temperatures are in the study's own section):", lines]
    parts.append(_defaults(runs))
    return Section("Which verifier when", tuple(parts))


def _run_ranks(runs: Mapping[str, Results]) -> list[list[str]]:
    rows = [["run", "temperature", "figure", "best", "not told apart", "behind"]]
    for name, results in runs.items():
        for figure in (statistics.BLOCK_EFFICIENCY, statistics.TOKENS_PER_SECOND):
            for temperature, rank in statistics.rank_settings(results, figure).items():
                where = [name, f"{temperature:g}", figure.name]
                rows.append([*where, *_ranked(rank, f"{rank.value:.2f}")])
    return rows


def _load_ranks(content: BatchResults) -> list[list[str]]:
    rows = [["temperature", "prompt", "batch", "best", "not told apart", "behind"]]
    for cell, ways in over_plain(content.timings).items():
        rank = statistics.rank_ways(ways)
        prompt = f"{cell.context} tokens" if cell.context else "as it is"
        where = [f"{cell.temperature:g}", prompt, str(cell.batch)]
        rows.append([*where, *_ranked(rank, with_interval(ways[rank.leader]))])
    return rows


def _ranked(rank: statistics.Rank, value: str) -> list[str]:
    return [f"`{rank.leader}` ({value})", _listed(rank.tied), _listed(rank.behind)]


def _best_by_cell(
    runs: Mapping[str, Results], figure: statistics.Figure
) -> list[tuple[str, set[str]]]:
    """Return, for each run and temperature, the leading verifier and all that are not behind."""
    cells = []
    for results in runs.values():
        verifiers = {s.name: s.baseline or s.plan.verifier for s in results.settings.settings}
        cells += [
            (verifiers[rank.leader], {verifiers[name] for name in rank.best})
            for rank in statistics.rank_settings(results, figure).values()
        ]
    return cells


def _leads(runs: Mapping[str, Results], figure: statistics.Figure, what: str) -> str:
    cells = _best_by_cell(runs, figure)
    leads = Counter(leader for leader, _ in cells)
    near = Counter(name for _, best in cells for name in sorted(best))
    counts = [
        f"`{name}` leads in {leads[name]} and is not behind in {count}"
        for name, count in near.most_common()
    ]
    return f"- {what}: " + "; ".join(counts) + f" (of {len(cells)} cells)."


def _defaults(runs: Mapping[str, Results]) -> str:
    fixed, auto = Plan(), AutoPlan()
    said = (
        f"The engine's defaults: a fixed plan is `{fixed.verifier}` with {fixed.paths} paths of "
        f"{fixed.depth}; `LLM()` chooses among plans of `{auto.verifier}` with up to "
        f"{auto.max_paths} paths of up to {auto.max_depth} tokens, plain decoding, and at "
        f"temperature 0 lookups of up to {auto.lookup_depth} tokens, by what it measures."
    )
    cells = _best_by_cell(runs, statistics.BLOCK_EFFICIENCY)
    if not cells:
        return said
    agree = sum(auto.verifier in best for _, best in cells)
    return (
        f"{said} In tokens a forward `{auto.verifier}` is the best or not told from it in {agree} "
        f"of the {len(cells)} cells above; whether drafting pays in tokens a second depends on the "
        "machine and the batch, which is why the engine measures."
    )


# Pictures for the page, as small SVG files.


def draw(evidence: Mapping[str, Evidence], folder: Path) -> list[Path]:
    """Draw every picture into ``folder``, and return the paths.

    Raises:
        InvalidArgument: A file cannot be written.
    """
    written = []
    for name, content in evidence.items():
        for part in _parts(content):
            path = folder / f"{name}_{part}.svg"
            with plots.picture_style():
                if isinstance(content, Study):
                    canvas = study_canvas(content)
                elif isinstance(content, BatchResults):
                    canvas = _batch_canvas(over_plain(content.timings))
                else:
                    assert isinstance(content, Results)
                    canvas = plots.PICTURES[part](plots.measured_of(content))
                plots.save_picture(canvas, path)
            written.append(path)
    return written


def _parts(content: Evidence) -> Iterator[str]:
    if isinstance(content, Study):
        yield "trees"
    if isinstance(content, BatchResults):
        yield "speed"
    if isinstance(content, Results):
        plans = [s.plan for s in content.settings.settings if s.plan.speculative]
        yield "tokens_per_second"
        yield "seconds_by_phase"
        if plans:
            yield "acceptance_by_depth"
        if len({plan.paths for plan in plans if plan.paths > 1}) > 1:
            yield "block_efficiency_by_paths"
        if len({s.temperature for s in content.settings.settings}) > 1 and plans:
            yield "block_efficiency_by_temperature"


def _batch_canvas(speeds: Mapping[Cell, Mapping[str, statistics.Estimate]]) -> "Canvas":
    """Draw one panel for each temperature and prompt length: each way's speed over plain's."""
    panels = []
    for t, context in dict.fromkeys((cell.temperature, cell.context) for cell in speeds):
        points: dict[str, list[tuple[float, statistics.Estimate]]] = {}
        for cell, ways in speeds.items():
            if (cell.temperature, cell.context) == (t, context):
                for way, speed in ways.items():
                    points.setdefault(way, []).append((cell.batch, speed))
        lines = [plots.Line(way, sorted(own)) for way, own in points.items()]
        prompt = f"{context} tokens" if context else "questions as they are"
        title = f"temperature {t:g}, {prompt}"
        ticks = sorted({x for own in points.values() for x, _ in own})
        panels.append(
            plots.Panel(
                lines=lines,
                x="batch",
                title=title,
                ticks=ticks,
                doubling=True,
                legend="upper right",
            )
        )
    return plots.draw_panels(
        panels, "speed over plain decoding (range over repeats)", columns=len(panels)
    )


# The whole page.

EXPECTED: Mapping[str, str] = {
    "mt-bench": "the full MT-Bench run",
    "baselines": "transformers' plain and assisted generation beside the engine",
    **{f"paper-{name}": paper.title for name, paper in sorted(PAPERS.items())},
    "study": "sampled against deterministic trees, and the draft temperature",
    "batch": "tokens/s by batch",
    "drafters": "drafters side by side",
}
"""The sections that the page should have, in order; it names those that are missing."""

_INTRODUCTION = (
    "Written by `eaglegbv bench results` from the measured files in [results/](results): no number "
    "or verdict here is typed by hand. How figures are defined, and what counts in them: "
    "[benchmarks.md](benchmarks.md). Brackets are 95% bootstrap intervals over questions unless "
    "something else is said. Speeds are of the machine that is named, and of that day's code and "
    "heads; other machines and models give others. Of each kind the latest run is shown."
)


def page(
    evidence: Mapping[str, Evidence], others: Sequence[str] = (), *, folder: str = "results"
) -> str:
    """Return the page.

    Args:
        evidence: Measured files by name.
        others: Names of files in the same folder that are not shown.
        folder: Name of the folder, beside the page, that has the pictures too.
    """
    order = sorted(sorted(evidence), key=_position)
    sections = [
        _when_section(evidence, order),
        *(_section(name, evidence[name], folder) for name in order),
    ]
    parts = [
        "# Results",
        "\n".join(f"- [{one.title}](#{one.anchor})" for one in sections),
        *(one.text for one in sections),
        "## About this page",
        " ".join([_INTRODUCTION, *_missing(evidence, others)]),
    ]
    return "\n\n".join(parts) + "\n"


_SECTIONS: Mapping[type[Evidence], Callable[[str, Any, str], Section]] = {
    Results: _run_section,
    PaperResults: _paper_section,
    BatchResults: _batch_section,
    DrafterResults: _drafters_section,
    Study: _study_section,
}


def _section(name: str, content: Evidence, folder: str) -> Section:
    pictures = [f"{name}_{part}.svg" for part in _parts(content)]
    drawn = "\n".join(f"![{picture}]({folder}/{picture})" for picture in pictures)
    return _SECTIONS[type(content)](name, content, drawn)


def _position(name: str) -> int:
    """Return where a file's section stands on the page."""
    order = list(EXPECTED)
    known = name if name in order else _kind(name)
    return order.index(known) if known in order else len(order)


def _missing(evidence: Mapping[str, Evidence], others: Sequence[str]) -> Iterator[str]:
    absent = [f"{what} (`{name}.json`)" for name, what in EXPECTED.items() if name not in evidence]
    if absent:
        yield f"Not measured, so missing here: {'; '.join(absent)}."
    if others:
        yield f"Measured for other pages, and not shown here: {_listed(others)}."
