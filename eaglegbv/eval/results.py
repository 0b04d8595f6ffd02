"""Files of measurements from which a page of results is written: compact, named, in one folder."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from eaglegbv.config import AutoPlan, Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval import drafters
from eaglegbv.eval import throughput as batches
from eaglegbv.eval.comparison import compare_runs
from eaglegbv.eval.drafters import DrafterReport
from eaglegbv.eval.papers.base import AGAINST, AGREES, OPEN, Report, findings_table
from eaglegbv.eval.papers.registry import PAPERS
from eaglegbv.eval.plots import (
    PICTURES,
    measured_of,
    picture_style,
    plain_axes,
    save_picture,
    whiskers,
)
from eaglegbv.eval.records import Environment, Record, Results, Setting, Turn, read_json
from eaglegbv.eval.report import (
    acceptance_text,
    drafter_name,
    facts,
    markdown_table,
    table,
    with_interval,
)
from eaglegbv.eval.runner import load_results, read_results
from eaglegbv.eval.statistics import (
    BLOCK_EFFICIENCY,
    TOKENS_PER_SECOND,
    Estimate,
    Figure,
    Rank,
    SideOfOne,
    over_plain,
    paired_ratio,
    rank_settings,
    rank_ways,
    ratio_of_speedups,
    summarise,
    whole,
)
from eaglegbv.eval.study import Study, draw_study, study_table, tree_findings
from eaglegbv.eval.study import findings as study_findings
from eaglegbv.eval.throughput import Cell, Timing, rate_table
from eaglegbv.metrics import Phase, RequestMetrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas


DIGITS = 6
"""Digits to which seconds are rounded."""


_Content = TypeVar("_Content")


class PaperResults(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison with a paper.

    Attributes:
        report: The ``report.json`` that ``bench paper`` wrote.
        title: The paper and what is compared.
        environment: Where and when it was measured, if its folder tells.
    """

    report: Report
    title: str = ""
    environment: Environment | None = None


class BatchResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results that ``bench batch --out`` wrote.

    Attributes:
        timings: Timings of all calls.
        environment: Where and when they were measured.
        model: Target.
        drafter: Drafter.
        verifier: Verifier of the fixed plans.
        suite: Source of the prompts.
        compile_backend: Backend with which the engine was compiled; empty if it was not.
        dtype: Dtype in which all models computed; empty in files older than this field.
        draft_quantization: How the drafter's weights were held; empty in files older than this
            field.
    """

    timings: tuple[Timing, ...]
    environment: Environment
    model: str = ""
    drafter: str = ""
    verifier: str = ""
    suite: str = ""
    compile_backend: str = ""
    dtype: str = ""
    draft_quantization: str = ""


class NamedReport(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter's report, with the name under which it is shown."""

    name: str
    report: DrafterReport


class DrafterResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results that ``bench drafters --json`` printed.

    Attributes:
        origin: Where the questions come from.
        drafters: Drafters and plans, in order.
        environment: Where and when they were measured, if it was recorded.
    """

    origin: str
    drafters: tuple[NamedReport, ...]
    environment: Environment | None = None


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
"""Kind of a file, by how its name begins: ``mt-bench-again.json`` is a run too."""

AGAIN = "-again"
"""End of the name of a second run with the same settings."""


def read_evidence(folder: Path) -> dict[str, Evidence]:
    """Return the content of every file of a folder, by name without suffix, in order of names.

    Files with names of no known kind belong to other pages and are not read; see
    :func:`other_files`.

    Raises:
        InvalidArgument: A file's content is not what its name says.
    """
    known = set(_files(folder)) - set(other_files(folder))
    return {path.stem: _read(path) for path in sorted(known)}


def other_files(folder: Path) -> list[Path]:
    """Return the files of a folder whose names begin with none of :data:`KINDS`."""
    return [path for path in _files(folder) if _kind(path.stem) is None]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


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
    return found


def _kind(name: str) -> type[Evidence] | None:
    found = kind_among(KINDS, name)
    return None if found is None else KINDS[found]


def kind_among(kinds: Iterable[str], name: str) -> str | None:
    """Return the longest of ``kinds`` with which a file's name begins, or None."""
    found = [kind for kind in kinds if name == kind or name.startswith(f"{kind}-")]
    return max(found, key=len, default=None)


def compact(results: Results) -> Results:
    """Return a run with one turn per conversation and without texts; no figure changes."""
    return Results(
        settings=msgspec.structs.replace(
            # The folder from which it was read matters to no reader of the page.
            results.settings,
            origin=Path(results.settings.origin).name,
        ),
        environment=results.environment,
        records=[_compact_record(record) for record in results.records],
    )


def _compact_record(record: Record) -> Record:
    return msgspec.structs.replace(record, turns=[_sum(record.turns)] if record.turns else [])


def _sum(turns: Sequence[Turn]) -> Turn:
    return Turn(
        text="",
        completion_tokens=sum(turn.completion_tokens for turn in turns),
        finish_reason="",
        wall_seconds=round(sum(turn.wall_seconds for turn in turns), DIGITS),
        metrics=reduce(_add, (turn.metrics for turn in turns), RequestMetrics()),
    )


def _add(a: RequestMetrics, b: RequestMetrics) -> RequestMetrics:
    """Add up the counts from which figures are computed.

    No figure needs plans, cached tokens or pre-emptions, and files are smaller without them.
    """
    phases = [phase for phase in Phase if phase in a.seconds or phase in b.seconds]
    return RequestMetrics(
        prompt_tokens=a.prompt_tokens + b.prompt_tokens,
        target_forwards=a.target_forwards + b.target_forwards,
        committed_tokens=a.committed_tokens + b.committed_tokens,
        accepted_tokens=a.accepted_tokens + b.accepted_tokens,
        drafted_nodes=a.drafted_nodes + b.drafted_nodes,
        offered_by_depth=_columns(a.offered_by_depth, b.offered_by_depth),
        accepted_by_depth=_columns(a.accepted_by_depth, b.accepted_by_depth),
        seconds={
            phase: round(a.seconds.get(phase, 0.0) + b.seconds.get(phase, 0.0), DIGITS)
            for phase in phases
        },
    )


def _columns(a: Sequence[int], b: Sequence[int]) -> list[int]:
    longest = max(len(a), len(b))
    padded = [[*column, *[0] * (longest - len(column))] for column in (a, b)]
    return [sum(pair) for pair in zip(*padded, strict=True)]


def _from(kind: type[Evidence], source: Path) -> Evidence:
    if kind is Results:
        return compact(load_results(source))
    if kind is PaperResults and source.is_dir():
        report = _decode(source / "report.json", Report)
        return PaperResults(
            report=report,
            title=_title(source / "report.txt"),
            environment=_environment(source),
        )
    if kind is Study and source.is_dir():
        source /= "study.json"
    if kind is DrafterResults:
        return _without_questions(_decode(source, DrafterResults))
    return _decode(source, kind)


def _title(report: Path) -> str:
    return report.read_text(encoding="utf-8").partition("\n")[0] if report.is_file() else ""


def _environment(folder: Path) -> Environment | None:
    """Return where a comparison was measured, from the first file of its folder that tells."""
    found = (_where(path.read_bytes()) for path in sorted(folder.glob("*.json")))
    return next(filter(None, found), None)


class _Where(msgspec.Struct):
    environment: Environment | None = None


def _where(content: bytes) -> Environment | None:
    try:
        return msgspec.json.decode(content, type=_Where).environment
    except msgspec.DecodeError:  # for example, a file of texts
        return None


def _without_questions(found: DrafterResults) -> DrafterResults:
    bare = [
        msgspec.structs.replace(one, report=msgspec.structs.replace(one.report, by_question={}))
        for one in found.drafters
    ]
    return msgspec.structs.replace(found, origin=Path(found.origin).name, drafters=tuple(bare))


def _read(path: Path) -> Evidence:
    kind = kind_of(path.stem)
    return read_results(path) if kind is Results else _decode(path, kind)


def _decode(path: Path, kind: type[_Content]) -> _Content:
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


# The sections of the page of results, each for one measured file, as Markdown.
#
# Pictures are passed as Markdown too: as links to the files.


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page.

    Attributes:
        title: Heading of the section.
        parts: Paragraphs and tables of the section.
    """

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


def where(environment: Environment | None) -> str:
    """Return a sentence on where and when something was measured."""
    if environment is None:
        return "Where and when was not recorded."
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    return (
        f"{environment.started[:10]}, {environment.processor}, {environment.cores} cores, "
        f"{environment.threads} threads, {environment.device}; {versions}."
    )


def listed(names: Sequence[str]) -> str:
    """Return names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def run_section(name: str, results: Results, pictures: str) -> Section:
    """Return the section of a run."""
    summaries = summarise(results)
    told = [f"- {heading}: {fact}" for heading, fact in facts(results).items()]
    asked = len(results.settings.question_ids) * results.settings.repeats
    whole_run = asked * len(results.settings.settings)
    held = sum(summary.conversations for summary in summaries)
    broken = sum(summary.errors for summary in summaries)
    done = f"{held} of {whole_run} conversations held to their end, {broken} broke off."
    count = len(results.settings.question_ids)
    label = "" if name == results.settings.suite else f" ({name})"
    return Section(
        f"{results.settings.suite}: {count} questions{label}",
        (
            "\n".join(told),
            done,
            markdown_table(table(summaries)),
            "\n".join(f"- {line}" for line in _rank_lines(results)),
            pictures,
            "Share of the forwards that accept a token at each depth:",
            acceptance_text(summaries),
            "Block efficiency by category:",
            markdown_table(_by_category(results)),
        ),
    )


def _rank_lines(results: Results) -> list[str]:
    lines = []
    for figure in (BLOCK_EFFICIENCY, TOKENS_PER_SECOND):
        for temperature, rank in rank_settings(results, figure).items():
            lines.append(f"Temperature {temperature:g}, {figure.name}: {_rank_text(rank)}")
    return lines


def _rank_text(rank: Rank) -> str:
    text = f"`{rank.leader}` is highest ({rank.value:.2f})"
    if rank.tied:
        text += f"; not told apart from it: {listed(rank.tied)}"
    if rank.behind:
        text += f"; below it beyond the interval: {listed(rank.behind)}"
    return text + "."


def _by_category(results: Results) -> list[list[str]]:
    held = whole(results.records)
    categories = list(dict.fromkeys(record.category for record in held))
    rows = [["setting", *categories]]
    for setting in results.settings.settings:
        own = [record for record in held if record.setting == setting.name]
        rows.append([setting.name, *(_efficiency(own, category) for category in categories)])
    return rows


def _efficiency(records: Sequence[Record], category: str) -> str:
    own = [record for record in records if record.category == category]
    return f"{BLOCK_EFFICIENCY.pooled(own).value:.2f}" if own else "-"


def paper_section(content: PaperResults, pictures: str, *, title: str) -> Section:
    """Return the section of a comparison with a paper; ``title`` is used if it has none itself."""
    report = content.report
    parts = [where(content.environment), pictures]
    for one in report.tables:
        parts += [f"**{one.title}**", markdown_table(one.rows), *one.notes]
    if report.findings:
        parts.append(f"{verdicts(content)}.".capitalize())
    if report.exceptions:
        parts += ["Those against:", markdown_table(findings_table(report.exceptions))]
    return Section(content.title or title, (*parts, *report.notes))


def verdicts(content: PaperResults) -> str:
    """Return a sentence on how many of a paper's directions were confirmed."""
    found = content.report.findings
    counts = ", ".join(
        f"{sum(one.verdict == verdict for one in found)} {verdict}"
        for verdict in (AGREES, AGAINST, OPEN)
    )
    return f"of {len(found)} directions {counts}"


def study_section(study: Study, pictures: str) -> Section:
    """Return the section of a study of trees."""
    asked = f"{len(study.questions)} questions of {study.suite}; target {study.model}."
    return Section(
        "Sampled and deterministic trees, and the draft temperature",
        (
            f"{asked} {where(study.environment)}",
            "Tokens a step, at equal numbers of verified nodes:",
            markdown_table(study_table(study)),
            "\n".join(f"- {finding}." for finding in study_findings(study)),
            pictures,
        ),
    )


def batch_section(name: str, content: BatchResults, pictures: str) -> Section:
    """Return the section of a run by batch."""
    drafter = content.drafter and drafter_name(content.drafter, content.draft_quantization)
    about = ", ".join(filter(None, (content.model, drafter, content.suite)))
    fixed = f"PATHSxDEPTH is a fixed plan of `{content.verifier}`." if content.verifier else ""
    backend = content.compile_backend
    compiled = f"The engine is compiled (`--compile {backend}`); " if backend else ""
    contexts = any(timing.context for timing in content.timings)
    rows = batches.summarise(content.timings)
    return Section(
        f"Tokens/s by batch{variant(content)} ({name})",
        (
            f"{about}. {compiled}{where(content.environment)}",
            "Medians over repeats; in parentheses the median ratio to `none`, plain decoding "
            f"by this engine, within a repeat. {fixed}",
            markdown_table(rate_table(rows, lengths=contexts)),
            pictures,
        ),
    )


def variant(content: BatchResults) -> str:
    """Return how a run by batch differs from a usual one, as a suffix of its name."""
    backend = content.compile_backend
    unusual = [f"compiled ({backend})"] if backend else []
    unusual += [content.dtype] if content.dtype not in ("", "float32") else []
    return "".join(f", {word}" for word in unusual)


def drafters_section(content: DrafterResults, pictures: str) -> Section:
    """Return the section of a comparison of drafters."""
    names = [one.name for one in content.drafters]
    reports = [one.report for one in content.drafters]
    return Section(
        "Drafters",
        (
            f"Questions: {content.origin}. {where(content.environment)}",
            markdown_table(drafters.depth_table(reports, names)),
            "Acceptance length by category:",
            markdown_table(drafters.category_table(reports, names)),
            pictures,
        ),
    )


# The section of a second run: which figures of the first it reproduces.


SPEEDUP = "speed-up"


def again_section(first: Results, second: Results) -> Section:
    """Return the section of the second of two runs with the same settings."""
    rows = [["setting", "figure", "first", "second", "second / first", "reproduced"]]
    counts: Counter[str] = Counter()
    settings: Counter[str] = Counter()
    for one in _reproductions(first, second):
        same = one.ratio.side_of_one() is SideOfOne.OPEN
        settings[one.figure] += 1
        counts[one.figure] += same
        rows.append(
            [
                *(one.setting, one.figure, f"{one.first:.3f}", f"{one.second:.3f}"),
                *(with_interval(one.ratio, 3), "yes" if same else "no"),
            ]
        )
    said = ", ".join(f"{name} in {counts[name]} of {settings[name]}" for name in settings)
    seeds = f"seeds {first.settings.seed} and {second.settings.seed}"
    return Section(
        f"{second.settings.suite}: a second run",
        (
            f"The same settings with {seeds}. A figure counts as reproduced where the 95% paired "
            f"interval of the second run's ratio to the first holds 1; of all settings: {said}. "
            "That the machine was faster or slower during one of them is in no interval; it shows "
            "in tokens/s, and cancels in the speed-up over plain decoding.",
            where(second.environment),
            markdown_table(rows),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Reproduction:
    """A figure of one setting in two runs, and the second's ratio to the first."""

    setting: str
    figure: str
    first: float
    second: float
    ratio: Estimate


def _reproductions(first: Results, second: Results) -> Iterator[_Reproduction]:
    for comparison in compare_runs(first, second):
        for one in comparison.differences:
            if one.figure in (BLOCK_EFFICIENCY.name, TOKENS_PER_SECOND.name) and one.ratio:
                yield _Reproduction(comparison.a, one.figure, one.a, one.b, one.ratio)
        setting = next(s for s in first.settings.settings if s.name == comparison.a)
        if not setting.plain:
            yield from _speedups(setting, first, second)


def _speedups(setting: Setting, first: Results, second: Results) -> Iterator[_Reproduction]:
    plain = [
        s.name for s in first.settings.settings if s.plain and s.temperature == setting.temperature
    ]
    own = [[_of(run, name) for name in (setting.name, *plain)] for run in (second, first)]
    if plain and all(all(records) for records in own):
        (ours, base), (earlier, earlier_base) = own
        yield _Reproduction(
            setting.name,
            SPEEDUP,
            paired_ratio(TOKENS_PER_SECOND, earlier, earlier_base).value,
            paired_ratio(TOKENS_PER_SECOND, ours, base).value,
            ratio_of_speedups(TOKENS_PER_SECOND, ours, base, earlier, earlier_base),
        )


def _of(results: Results, setting: str) -> list[Record]:
    return [record for record in whole(results.records) if record.setting == setting]


# The section that ranks verifiers over all measured files.


def when_section(evidence: Mapping[str, Evidence], order: Sequence[str]) -> Section:
    """Return the section that says which verifier is best when.

    Args:
        evidence: Measured files by name.
        order: Their names, in the order in which runs are shown.
    """
    runs = {name: one for name in order if isinstance(one := evidence[name], Results)}
    papers = [one for one in evidence.values() if isinstance(one, PaperResults)]
    loads = [one for one in evidence.values() if isinstance(one, BatchResults)]
    studies = [one for one in evidence.values() if isinstance(one, Study)]
    parts = [
        "Ranked from the files by their intervals: a setting is behind the best where the whole "
        "interval of its ratio to it lies below 1, else it cannot be told from it."
    ]
    if runs:
        parts += [
            "One request at a time:",
            markdown_table(_run_ranks(runs)),
            _leads(runs, BLOCK_EFFICIENCY, "the most tokens a forward"),
            _leads(runs, TOKENS_PER_SECOND, "the most tokens a second"),
        ]
    if papers:
        parts += ["What the papers say about order and trend, and what was measured:"]
        parts.append("\n".join(f"- {one.title}: {verdicts(one)}." for one in papers))
    for content in loads:
        parts += [
            f"By batch{variant(content)}, speed over plain decoding "
            "(median and range over repeats; behind is what is slower in its best repeat than the "
            "best in its worst):",
            markdown_table(_load_ranks(content)),
        ]
    for study in studies:
        lines = "\n".join(f"- {finding}." for finding in tree_findings(study))
        parts += ["By kind of tree (draft temperatures are in the study's own section):", lines]
    parts.append(_defaults(runs))
    return Section("Which verifier when", tuple(parts))


def _run_ranks(runs: Mapping[str, Results]) -> list[list[str]]:
    rows = [["run", "temperature", "figure", "best", "not told apart", "behind"]]
    for name, results in runs.items():
        for figure in (BLOCK_EFFICIENCY, TOKENS_PER_SECOND):
            for temperature, rank in rank_settings(results, figure).items():
                best = f"`{rank.leader}` ({rank.value:.2f})"
                others = [listed(names) or "-" for names in (rank.tied, rank.behind)]
                rows.append([name, f"{temperature:g}", figure.name, best, *others])
    return rows


def _load_ranks(content: BatchResults) -> list[list[str]]:
    rows = [["temperature", "prompt", "batch", "best", "not told apart", "behind"]]
    for cell, ways in over_plain(content.timings).items():
        rank = rank_ways(ways)
        best = f"`{rank.leader}` ({with_interval(ways[rank.leader])})"
        prompt = f"{cell.context} tokens" if cell.context else "as it is"
        others = [listed(names) or "-" for names in (rank.tied, rank.behind)]
        rows.append([f"{cell.temperature:g}", prompt, str(cell.batch), best, *others])
    return rows


def _verifiers(results: Results, names: Sequence[str]) -> list[str]:
    known = {setting.name: setting for setting in results.settings.settings}
    return [known[name].baseline or known[name].plan.verifier for name in names]


def _best_by_cell(runs: Mapping[str, Results], figure: Figure) -> list[tuple[str, set[str]]]:
    """Return, for each run and temperature, the leader and all settings that are not behind."""
    return [
        (_verifiers(results, [rank.leader])[0], set(_verifiers(results, rank.best)))
        for results in runs.values()
        for rank in rank_settings(results, figure).values()
    ]


def _leads(runs: Mapping[str, Results], figure: Figure, what: str) -> str:
    cells = _best_by_cell(runs, figure)
    return f"- {what}: " + "; ".join(_counts(cells)) + f" (of {len(cells)} cells)."


def _counts(cells: Sequence[tuple[str, set[str]]]) -> list[str]:
    leads = Counter(leader for leader, _ in cells)
    near = Counter(name for _, best in cells for name in sorted(best))
    return [
        f"`{name}` leads in {leads[name]} and is not behind in {count}"
        for name, count in near.most_common()
    ]


def _defaults(runs: Mapping[str, Results]) -> str:
    fixed, auto = Plan(), AutoPlan()
    said = (
        f"The engine's defaults: a fixed plan is `{fixed.verifier}` with {fixed.paths} paths of "
        f"{fixed.depth}; `LLM()` chooses among plans of `{auto.verifier}` with up to "
        f"{auto.max_paths} paths of up to {auto.max_depth} tokens, plain decoding, and at "
        f"temperature 0 lookups of up to {auto.lookup_depth} tokens, by what it measures."
    )
    cells = _best_by_cell(runs, BLOCK_EFFICIENCY)
    if not cells:
        return said
    agree = sum(auto.verifier in best for _, best in cells)
    return (
        f"{said} In tokens a forward `{auto.verifier}` is the best or not told from it in {agree} "
        f"of the {len(cells)} cells above; whether drafting pays in tokens a second depends on the "
        "machine and the batch, which is why the engine measures."
    )


# Pictures for the page of results, as small SVG files.


def picture_names(evidence: Mapping[str, Evidence]) -> dict[str, list[str]]:
    """Return the names of the pictures of each file, without suffix."""
    return {name: [f"{name}_{part}" for part in _parts(name, e)] for name, e in evidence.items()}


def draw(evidence: Mapping[str, Evidence], folder: Path) -> list[Path]:
    """Draw every picture into ``folder``, and return the paths.

    Raises:
        InvalidArgument: A file cannot be written.
    """
    written = []
    for name, content in evidence.items():
        for part in _parts(name, content):
            path = folder / f"{name}_{part}.svg"
            if isinstance(content, Study):
                _copy_study(content, path)
            else:
                with picture_style():
                    save_picture(_canvas(part, content), path)
            written.append(path)
    return written


def _parts(name: str, content: Evidence) -> Iterator[str]:
    if isinstance(content, Study):
        yield "trees"
    if isinstance(content, BatchResults):
        yield "speed"
    if isinstance(content, Results) and not name.endswith(AGAIN):
        plans = [s.plan for s in content.settings.settings if s.plan.speculative]
        yield "tokens_per_second"
        yield "seconds_by_phase"
        if plans:
            yield "acceptance_by_depth"
        if len({plan.paths for plan in plans if plan.paths > 1}) > 1:
            yield "block_efficiency_by_paths"
        if len({s.temperature for s in content.settings.settings}) > 1 and plans:
            yield "block_efficiency_by_temperature"


def _canvas(part: str, content: Evidence) -> "Canvas":
    if isinstance(content, BatchResults):
        return batch_canvas(over_plain(content.timings))
    assert isinstance(content, Results)
    picture = next(one for one in PICTURES if one.name == part)
    return picture.draw(measured_of(content))


def _copy_study(study: Study, path: Path) -> None:
    with TemporaryDirectory() as folder:
        drawn = [one for one in draw_study(study, Path(folder)) if one.suffix == ".svg"]
        path.write_bytes(drawn[0].read_bytes())


def batch_canvas(speeds: Mapping[Cell, Mapping[str, Estimate]]) -> "Canvas":
    """Draw one panel for each temperature and prompt length: each way's speed over plain's."""
    from matplotlib.figure import Figure as Canvas

    panels = list(dict.fromkeys((cell.temperature, cell.context) for cell in speeds))
    canvas = Canvas(figsize=(max(5.0, 3.8 * len(panels)), 3.6), layout="constrained")
    axes = canvas.subplots(1, len(panels), squeeze=False, sharey=True).ravel()
    for panel, (temperature, context) in zip(axes, panels, strict=True):
        here = {
            cell.batch: ways
            for cell, ways in speeds.items()
            if (cell.temperature, cell.context) == (temperature, context)
        }
        _draw_batches(panel, here)
        prompt = f"{context} tokens" if context else "questions as they are"
        panel.set_title(f"temperature {temperature:g}, {prompt}", fontsize=9)
    axes[0].set_ylabel("speed over plain decoding (range over repeats)")
    return canvas


def _draw_batches(axes: "Axes", speeds: Mapping[int, Mapping[str, Estimate]]) -> None:
    for way in dict.fromkeys(way for ways in speeds.values() for way in ways):
        points = [(batch, ways[way]) for batch, ways in sorted(speeds.items()) if way in ways]
        figures = [figure for _, figure in points]
        axes.errorbar(
            [batch for batch, _ in points],
            [figure.value for figure in figures],
            yerr=whiskers(figures),
            label=way,
            marker="o",
            markersize=3,
            linewidth=1.2,
            elinewidth=0.6,
        )
    plain_axes(axes, "y")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(speeds), [str(batch) for batch in sorted(speeds)])
    axes.set_xlabel("batch")
    axes.legend(frameon=False, fontsize=7, loc="upper right")


# The page of results, as Markdown, from measured files; every number and verdict is computed.


EXPECTED: Mapping[str, str] = {
    "mt-bench": "the full MT-Bench run",
    "mt-bench-again": "the same a second time",
    "baselines": "transformers' plain and assisted generation beside the engine",
    **{f"paper-{name}": paper.title for name, paper in sorted(PAPERS.items())},
    "study": "sampled against deterministic trees, and the draft temperature",
    "batch": "tokens/s by batch",
    "drafters": "drafters side by side",
}
"""The sections that the page should have; it names those that are missing."""


def page(
    evidence: Mapping[str, Evidence],
    pictures: Mapping[str, Sequence[str]],
    others: Sequence[str] = (),
) -> str:
    """Return the page.

    Args:
        evidence: Measured files by name.
        pictures: Links to the pictures of each file, by the same names.
        others: Names of files in the same folder that are not shown.
    """
    order = _ordered(evidence)
    sections = [
        when_section(evidence, order),
        *(section(name, evidence[name], evidence, pictures.get(name, ())) for name in order),
    ]
    return (
        "\n\n".join(
            [
                "# Results",
                _INTRODUCTION,
                *_missing(evidence, others),
                "\n".join(f"- [{one.title}](#{one.anchor})" for one in sections),
                *(one.text for one in sections),
            ]
        )
        + "\n"
    )


_INTRODUCTION = (
    "Written by `eaglegbv bench results` from the measured files in [results/](results): no number "
    "or verdict here is typed by hand. How figures are defined, and what counts in them: "
    "[benchmarks.md](benchmarks.md). Brackets are 95% bootstrap intervals over questions unless "
    "something else is said. Speeds are of the machine that is named, and of that day's code and "
    "heads; other machines and models give others. Of runs by batch the latest stand first."
)


def section(
    name: str, content: Evidence, evidence: Mapping[str, Evidence], pictures: Sequence[str]
) -> Section:
    """Return the section of one file."""
    drawn = "\n\n".join(f"![{link.rpartition('/')[2]}]({link})" for link in pictures)
    if isinstance(content, PaperResults):
        return paper_section(content, drawn, title=EXPECTED.get(name, name))
    if isinstance(content, BatchResults):
        return batch_section(name, content, drawn)
    if isinstance(content, DrafterResults):
        return drafters_section(content, drawn)
    if isinstance(content, Study):
        return study_section(content, drawn)
    first = evidence.get(name.removesuffix(AGAIN))
    if name.endswith(AGAIN) and isinstance(first, Results):
        return again_section(first, content)
    return run_section(name, content, drawn)


def _ordered(evidence: Mapping[str, Evidence]) -> list[str]:
    """Return the files' names in the order of their kinds, with the latest runs by batch first."""
    latest = sorted(sorted(evidence), key=lambda name: _started(evidence[name]), reverse=True)
    return sorted(latest, key=_results_page_kind)


def _results_page_kind(name: str) -> int:
    """Return the position of a file's kind on the page."""
    order = list(EXPECTED)
    kind = kind_among(order, name)
    return len(order) if kind is None else order.index(kind)


def _started(content: Evidence) -> str:
    """Return when a run by batch began; other kinds have no such order."""
    if not isinstance(content, BatchResults) or content.environment is None:
        return ""
    return content.environment.started


def _missing(evidence: Mapping[str, Evidence], others: Sequence[str]) -> Iterator[str]:
    absent = [f"{what} (`{name}.json`)" for name, what in EXPECTED.items() if name not in evidence]
    if absent:
        yield f"Not measured, so missing here: {'; '.join(absent)}."
    if others:
        yield f"Measured for other pages, and not shown here: {listed(others)}."
