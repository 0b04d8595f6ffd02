"""The page of results: measured files, compact and named, in one folder, and Markdown of them.

Every number and verdict on the page is computed from the files. Of each kind the page shows the
latest run; full tables of a paper's comparison stay in its file.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval import plots, statistics
from eaglegbv.eval.comparison import DrafterReport, category_table, depth_table
from eaglegbv.eval.papers.grids import PAPERS
from eaglegbv.eval.papers.sheets import AGAINST, AGREES, OPEN, PaperResults, Table, findings_table
from eaglegbv.eval.records import Environment, Results, Turn, read_json
from eaglegbv.eval.report import acceptance_text, facts, markdown_table, pivot, table, with_interval
from eaglegbv.eval.runner import load_results
from eaglegbv.eval.study import (
    Study,
    study_canvas,
    study_table,
    temperature_findings,
    tree_findings,
)
from eaglegbv.eval.throughput import Cell, Timing, over_plain, rate_table
from eaglegbv.metrics import Phase, RequestMetrics
from eaglegbv.utils import grouped

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

DIGITS = 6  # digits to which seconds are rounded
MOST_ROWS = 7
"""Most rows, headings included, of a paper's table that the page shows; files have them all."""


class BatchResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results that ``bench batch --out`` wrote."""

    timings: tuple[Timing, ...]  # timings of all calls
    environment: Environment  # where and when they were measured
    model: str = ""  # target
    drafter: str = ""  # drafter
    verifier: str = ""  # verifier of the fixed plans
    suite: str = ""  # source of the prompts
    compile_backend: str = ""  # backend with which the target was compiled; empty if it was not
    dtype: str = ""  # dtype in which all models computed; empty in files older than this field

    @property
    def variant(self) -> str:
        """How it differs from a usual run, as a suffix of its name."""
        unusual = [f"compiled ({self.compile_backend})"] if self.compile_backend else []
        unusual += [self.dtype] if self.dtype not in ("", "float32") else []
        return "".join(f", {word}" for word in unusual)


class DrafterResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results that ``bench drafters --json`` printed."""

    origin: str  # where the questions come from
    drafters: tuple[DrafterReport, ...]  # drafters and plans, in order
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


FILES: Mapping[type[Evidence], str] = {PaperResults: "report.json", Study: "study.json"}
"""Files of the folders that ``bench paper`` and ``bench study`` write."""


def read_evidence(folder: Path) -> dict[str, Evidence]:
    """Return the content of every file of a folder, by name without suffix, in order of names.

    Files with names of no known kind belong to other pages and are not read.

    Raises:
        InvalidArgument: A file's content is not what its name says.
    """
    evidence: dict[str, Evidence] = {}
    for path in sorted(folder.glob("*.json")):
        kind = _beginning(path.stem, KINDS)
        if kind is not None:
            evidence[path.stem] = _read(path, KINDS[kind])
    return evidence


def add_evidence(folder: Path, name: str, source: Path) -> Path:
    """Save the parts of a measured file or run that the page needs, as ``folder/name.json``.

    Args:
        folder: Folder to write to.
        name: Name, which states the kind; see :data:`KINDS`.
        source: Folder of a run or of a comparison with a paper, or a file.

    Raises:
        InvalidArgument: The name is of no known kind, or the source is not of this kind.
    """
    kind = _beginning(name, KINDS)
    if kind is None:
        raise InvalidArgument("name", name, f"one that begins with {', '.join(sorted(KINDS))}")
    file = FILES.get(KINDS[kind]) if source.is_dir() else None
    measured = _read(source if file is None else source / file, KINDS[kind])
    if isinstance(measured, Results):
        measured = compact(measured)
    if isinstance(measured, DrafterResults):
        measured = msgspec.structs.replace(measured, origin=Path(measured.origin).name)
    content = msgspec.to_builtins(measured)
    for turn in (turn for record in content.get("records", ()) for turn in record["turns"]):
        # Counts of zero are what is read where there is none.
        turn["metrics"] = {name: value for name, value in turn["metrics"].items() if value}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    records = b",\n".join(map(msgspec.json.encode, content.pop("records", ())))  # one a line
    text = msgspec.json.encode(content)
    if records:
        text = text[:-1] + b',"records":[\n' + records + b"\n]}"
    path.write_bytes(text + b"\n")
    return path


def _beginning(name: str, among: Iterable[str]) -> str | None:
    """Return the first of the names with whose words a name begins."""
    return next((one for one in among if f"{name}-".startswith(f"{one}-")), None)


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
    """Add up turns; no figure needs plans."""
    metrics = [turn.metrics for turn in turns]
    sums: dict[str, Any] = {}
    for name in RequestMetrics.__struct_fields__:
        columns = [getattr(m, name) for m in metrics]
        if isinstance(columns[0], int):
            sums[name] = sum(columns)
        elif isinstance(columns[0], list):
            sums[name] = statistics.added(*columns)
    timed = {phase: [m.seconds[phase] for m in metrics if phase in m.seconds] for phase in Phase}
    seconds = {phase: round(sum(spent), DIGITS) for phase, spent in timed.items() if spent}
    return Turn(
        text="",
        completion_tokens=sum(turn.completion_tokens for turn in turns),
        finish_reason="",
        wall_seconds=round(sum(turn.wall_seconds for turn in turns), DIGITS),
        metrics=RequestMetrics(**sums, seconds=seconds),
    )


def _read(path: Path, kind: type[Evidence]) -> Evidence:
    if kind is Results:
        return load_results(path)
    expected = f"a readable file of {kind.__name__}"
    return read_json(path, kind, argument="file", expected=expected)


# The sections of the page, each for one measured file, as Markdown: figures first.


def _section(title: str, *parts: str) -> str:
    return "\n\n".join([f"## {title}", *filter(None, parts)])


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


def _run_section(name: str, results: Results, pictures: str) -> str:
    summaries = statistics.summarise(results)
    settings = results.settings
    asked = len(settings.question_ids) * settings.repeats * len(settings.settings)
    held = sum(summary.conversations for summary in summaries)
    broken = sum(summary.errors for summary in summaries)
    label = "" if name == settings.suite else f" ({name})"
    about = "; ".join(f"{heading}: {fact}" for heading, fact in facts(results).items())
    return _section(
        f"{settings.suite}: {len(settings.question_ids)} questions{label}",
        markdown_table(table(summaries)),
        pictures,
        "Share of the forwards that accept a token at each depth:",
        acceptance_text(summaries),
        "Block efficiency by category:",
        markdown_table(_by_category(results)),
        f"{held} of {asked} conversations held to their end, {broken} broke off. {about}.",
    )


def _by_category(results: Results) -> list[list[str]]:
    groups = grouped(statistics.whole(results.records), lambda r: (r.setting, r.category))
    figure = statistics.BLOCK_EFFICIENCY
    return pivot("setting", {key: f"{figure.of(records):.2f}" for key, records in groups.items()})


def _paper_section(name: str, content: PaperResults, pictures: str) -> str:
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
    remarks = "; ".join(note.removesuffix(".") for note in dict.fromkeys(notes))
    return _section(
        content.title or EXPECTED.get(name, name),
        *parts,
        f"{remarks}. {_measured(content.environment)}",
    )


def _shown(tables: Sequence[Table]) -> list[Table]:
    """Return the short tables; of those that differ only in temperature or length, the last."""
    short = [one for one in tables if len(one.rows) <= MOST_ROWS]
    return list({(one.title.partition(", T =")[0], one.rows[0][0]): one for one in short}.values())


def _verdicts(content: PaperResults) -> str:
    counted = Counter(one.verdict for one in content.report.findings)
    counts = ", ".join(f"{counted[verdict]} {verdict}" for verdict in (AGREES, AGAINST, OPEN))
    return f"of {counted.total()} directions {counts}"


def _study_section(_: str, study: Study, pictures: str) -> str:
    """Return the section of a study: its first drafter, with the most paths."""
    cells = [cell for cell in study.sampled if cell.drafter == study.drafters[0]]
    most = max((cell.paths for cell in cells), default=0)
    shown = [cell for cell in cells if cell.paths == most or cell.temperature == 0]
    part = msgspec.structs.replace(study, drafters=study.drafters[:1], sampled=tuple(shown))
    others = f" {', '.join(study.drafters[1:])}, and fewer paths, are in `study.json`."
    asked = f"{len(study.questions)} questions of {study.suite}; target {study.model}."
    return _section(
        "Sampled and deterministic trees, and the draft temperature",
        f"Tokens a step, at equal numbers of verified nodes, with {most} paths:",
        markdown_table(study_table(part)),
        _lines([f"{finding}." for finding in temperature_findings(part)]),
        pictures,
        f"{asked}{others} {_measured(study.environment)}",
    )


def _batch_section(name: str, content: BatchResults, pictures: str) -> str:
    about = ", ".join(filter(None, (content.model, content.drafter, content.suite)))
    fixed = f"PATHSxDEPTH is a fixed plan of `{content.verifier}`. " if content.verifier else ""
    backend = content.compile_backend
    compiled = f"The target is compiled (`--compile {backend}`); " if backend else ""
    return _section(
        f"Tokens/s by batch{content.variant} ({name})",
        markdown_table(rate_table(content.timings)),
        pictures,
        "Medians over repeats; in parentheses the median ratio to `none`, plain decoding by this "
        f"engine, within a repeat. {fixed}{about}. {compiled}{_measured(content.environment)}",
    )


def _drafters_section(_: str, content: DrafterResults, pictures: str) -> str:
    return _section(
        "Drafters",
        markdown_table(depth_table(content.drafters)),
        "Acceptance length by category:",
        markdown_table(category_table(content.drafters)),
        pictures,
        f"Questions: {content.origin}. {_measured(content.environment)}",
    )


# The section that ranks verifiers over all measured files.


def _when_section(evidence: Mapping[str, Evidence], order: Sequence[str]) -> str:
    """Return the section that says which verifier is best when; runs are shown in this order."""
    runs = {name: one for name in order if isinstance(one := evidence[name], Results)}
    papers = [one for one in evidence.values() if isinstance(one, PaperResults)]
    parts = [
        "Ranked from the files by their intervals: a setting is behind the best where the whole "
        "interval of its ratio to it lies below 1, else it cannot be told from it. Runs take one "
        "request at a time."
    ]
    if runs:
        parts.append(markdown_table(_run_ranks(runs)))
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
    return _section("Which verifier when", *parts)


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


# Pictures for the page, as small SVG files.


def draw(evidence: Mapping[str, Evidence], folder: Path) -> list[Path]:
    """Draw every picture into ``folder``, and return the paths.

    Raises:
        InvalidArgument: A file cannot be written.
    """
    written = []
    with plots.picture_style():
        for name, content in evidence.items():
            for part, canvas in _pictures(content):
                written.append(plots.save_picture(canvas(), folder / f"{name}_{part}.svg"))
    return written


def _pictures(content: Evidence) -> "Iterator[tuple[str, Callable[[], Canvas]]]":
    """Yield the name of each picture of a file, and what draws it."""
    if isinstance(content, Study):
        yield "trees", partial(study_canvas, content)
    if isinstance(content, BatchResults):
        yield "speed", lambda: _batch_canvas(over_plain(content.timings))
    if isinstance(content, Results):
        plans = [s.plan for s in content.settings.settings if s.plan.speculative]
        several = len({plan.paths for plan in plans if plan.paths > 1}) > 1
        heats = len({s.temperature for s in content.settings.settings}) > 1 and plans
        parts = {
            "tokens_per_second": True,
            "seconds_by_phase": True,
            "acceptance_by_depth": plans,
            "block_efficiency_by_paths": several,
            "block_efficiency_by_temperature": heats,
        }
        for part in (part for part, some in parts.items() if some):
            yield part, partial(_drawn, content, part)


def _drawn(results: Results, part: str) -> "Canvas":
    return plots.PICTURES[part](plots.measured_of(results))


def _batch_canvas(speeds: Mapping[Cell, Mapping[str, statistics.Estimate]]) -> "Canvas":
    """Draw one panel for each temperature and prompt length: each way's speed over plain's."""
    panels = []
    for (t, context), cells in grouped(speeds, lambda c: (c.temperature, c.context)).items():
        points: dict[str, list[tuple[float, statistics.Estimate]]] = {}
        for cell in cells:
            for way, speed in speeds[cell].items():
                points.setdefault(way, []).append((cell.batch, speed))
        lines = [plots.Line(way, sorted(points_of_way)) for way, points_of_way in points.items()]
        prompt = f"{context} tokens" if context else "questions as they are"
        title, ticks = f"temperature {t:g}, {prompt}", sorted({float(c.batch) for c in cells})
        panel = plots.Panel(lines=lines, x="batch", title=title, ticks=ticks, doubling=True)
        panels.append(replace(panel, legend="upper right"))
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
    "[benchmarks.md](study/benchmarks.md). Brackets are 95% bootstrap intervals over questions "
    "unless something else is said. Speeds are of the machine that is named, and of that day's "
    "code and heads; other machines and models give others. Of each kind the latest run is shown."
)


def page(evidence: Mapping[str, Evidence], *, folder: str = "results") -> str:
    """Return the page of measured files by name; the folder beside it has the pictures."""
    order, known = sorted(evidence), list(EXPECTED)
    order.sort(key=lambda name: known.index(_beginning(name, known) or known[-1]))
    sections = [_when_section(evidence, order)]
    for name in order:
        pictures = [f"{name}_{part}.svg" for part, _ in _pictures(evidence[name])]
        drawn = "\n".join(f"![{picture}]({folder}/{picture})" for picture in pictures)
        sections.append(_SECTIONS[type(evidence[name])](name, evidence[name], drawn))
    absent = [f"{what} (`{name}.json`)" for name, what in EXPECTED.items() if name not in evidence]
    missing = f" Not measured, so missing here: {'; '.join(absent)}." if absent else ""
    about = _section("About this page", _INTRODUCTION + missing)
    return "\n\n".join(["# Results", *sections, about]) + "\n"


_SECTIONS: Mapping[type[Evidence], Callable[[str, Any, str], str]] = {
    Results: _run_section,
    PaperResults: _paper_section,
    BatchResults: _batch_section,
    DrafterResults: _drafters_section,
    Study: _study_section,
}
