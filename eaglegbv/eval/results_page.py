"""The page of results, as Markdown, from measured files: every number and verdict is computed."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from eaglegbv.auto_plan import AutoPlan
from eaglegbv.config import Plan
from eaglegbv.eval import batches, drafters
from eaglegbv.eval.compare import compare_runs
from eaglegbv.eval.estimates import Estimate, SideOfOne
from eaglegbv.eval.evidence import (
    BatchResults,
    DrafterResults,
    Evidence,
    PaperResults,
)
from eaglegbv.eval.figures import BLOCK_EFFICIENCY, TOKENS_PER_SECOND, Figure, whole
from eaglegbv.eval.papers.base import AGAINST, AGREES, OPEN, findings_table
from eaglegbv.eval.papers.registry import PAPERS
from eaglegbv.eval.ranking import Rank, over_plain, rank_settings, rank_ways
from eaglegbv.eval.records import Environment, Record, Results, Setting
from eaglegbv.eval.report import (
    acceptance_text,
    drafter_name,
    facts,
    markdown_table,
    table,
    with_interval,
)
from eaglegbv.eval.study import Study
from eaglegbv.eval.study_report import findings as study_findings
from eaglegbv.eval.study_report import study_table, tree_findings
from eaglegbv.eval.summary import paired_ratio, ratio_of_speedups, summarise

AGAIN = "-again"
"""How the name of a second run of the same ends."""

EXPECTED: Mapping[str, str] = {
    "mt-bench": "the full MT-Bench run",
    "mt-bench-again": "the same a second time",
    "baselines": "transformers' plain and assisted generation beside the engine",
    **{f"paper-{name}": paper.title for name, paper in sorted(PAPERS.items())},
    "study": "sampled against deterministic trees, and the draft temperature",
    "batch": "tokens/s by batch",
    "drafters": "drafters side by side",
}
"""What the page is meant to have; what is missing is named."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page.

    Attributes:
        title: Its heading.
        parts: Its paragraphs and tables.
    """

    title: str
    parts: tuple[str, ...]

    @property
    def anchor(self) -> str:
        """What links to the heading name, by the rules of Markdown's usual renderers."""
        kept = "".join(c for c in self.title.lower() if c.isalnum() or c in " -_")
        return kept.replace(" ", "-")

    @property
    def text(self) -> str:
        """The section as Markdown."""
        return "\n\n".join([f"## {self.title}", *(part for part in self.parts if part)])


def page(
    evidence: Mapping[str, Evidence],
    pictures: Mapping[str, Sequence[str]],
    others: Sequence[str] = (),
) -> str:
    """Return the page.

    Args:
        evidence: Measured files by name.
        pictures: By the same names, links to pictures of them.
        others: Names of files that lie beside them and are not shown.
    """
    sections = [
        _which_when(evidence),
        *(
            section(name, evidence[name], evidence, pictures.get(name, ()))
            for name in _ordered(evidence)
        ),
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
        return _paper(name, content, drawn)
    if isinstance(content, BatchResults):
        return _batch(name, content, drawn)
    if isinstance(content, DrafterResults):
        return _drafters(content, drawn)
    if isinstance(content, Study):
        return _study(content, drawn)
    first = evidence.get(name.removesuffix(AGAIN))
    if name.endswith(AGAIN) and isinstance(first, Results):
        return _again(first, content)
    return _run(name, content, drawn)


def _ordered(evidence: Mapping[str, Evidence]) -> list[str]:
    """Return the files' names by their kinds, and of runs by batch the latest first."""
    latest = sorted(sorted(evidence), key=lambda name: _started(evidence[name]), reverse=True)
    return sorted(latest, key=_kind)


def _kind(name: str) -> int:
    """Return the place of a file's kind on the page."""
    order = list(EXPECTED)
    kinds = [known for known in order if name == known or name.startswith(f"{known}-")]
    return order.index(max(kinds, key=len)) if kinds else len(order)


def _started(content: Evidence) -> str:
    """Return when a run by batch began; the order of others is that of their kinds."""
    if not isinstance(content, BatchResults) or content.environment is None:
        return ""
    return content.environment.started


def _missing(evidence: Mapping[str, Evidence], others: Sequence[str]) -> Iterator[str]:
    absent = [f"{what} (`{name}.json`)" for name, what in EXPECTED.items() if name not in evidence]
    if absent:
        yield f"Not measured, so missing here: {'; '.join(absent)}."
    if others:
        yield f"Measured for other pages, and not shown here: {_listed(others)}."


def _where(environment: Environment | None) -> str:
    if environment is None:
        return "Where and when was not recorded."
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    return (
        f"{environment.started[:10]}, {environment.processor}, {environment.cores} cores, "
        f"{environment.threads} threads, {environment.device}; {versions}."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _run(name: str, results: Results, drawn: str) -> Section:
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
            drawn,
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
        text += f"; not told apart from it: {_listed(rank.tied)}"
    if rank.behind:
        text += f"; below it beyond the interval: {_listed(rank.behind)}"
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


SPEEDUP = "speed-up"


def _again(first: Results, second: Results) -> Section:
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
            _where(second.environment),
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


def _paper(name: str, content: PaperResults, drawn: str) -> Section:
    report = content.report
    parts = [_where(content.environment), drawn]
    for one in report.tables:
        parts += [f"**{one.title}**", markdown_table(one.rows), *one.notes]
    if report.findings:
        parts.append(f"{_verdicts(content)}.".capitalize())
    if report.exceptions:
        parts += ["Those against:", markdown_table(findings_table(report.exceptions))]
    return Section(content.title or EXPECTED.get(name, name), (*parts, *report.notes))


def _verdicts(content: PaperResults) -> str:
    found = content.report.findings
    counts = ", ".join(
        f"{sum(one.verdict == verdict for one in found)} {verdict}"
        for verdict in (AGREES, AGAINST, OPEN)
    )
    return f"of {len(found)} directions {counts}"


def _study(study: Study, drawn: str) -> Section:
    asked = f"{len(study.questions)} questions of {study.suite}; target {study.model}."
    return Section(
        "Sampled and deterministic trees, and the draft temperature",
        (
            f"{asked} {_where(study.environment)}",
            "Tokens a step, at equal numbers of verified nodes:",
            markdown_table(study_table(study)),
            "\n".join(f"- {finding}." for finding in study_findings(study)),
            drawn,
        ),
    )


def _batch(name: str, content: BatchResults, drawn: str) -> Section:
    drafter = content.drafter and drafter_name(content.drafter, content.draft_quantization)
    about = ", ".join(filter(None, (content.model, drafter, content.suite)))
    fixed = f"PATHSxDEPTH is a fixed plan of `{content.verifier}`." if content.verifier else ""
    backend = content.compile_backend
    compiled = f"The engine is compiled (`--compile {backend}`); " if backend else ""
    contexts = any(timing.context for timing in content.timings)
    rows = batches.summarise(content.timings)
    return Section(
        f"Tokens/s by batch{_variant(content)} ({name})",
        (
            f"{about}. {compiled}{_where(content.environment)}",
            "Medians over repeats; in parentheses the median ratio to `none`, plain decoding "
            f"by this engine, within a repeat. {fixed}",
            markdown_table(batches.table(rows, lengths=contexts)),
            drawn,
        ),
    )


def _variant(content: BatchResults) -> str:
    """Return how a run by batch differs from a usual one, to follow its name."""
    backend = content.compile_backend
    unusual = [f"compiled ({backend})"] if backend else []
    unusual += [content.dtype] if content.dtype not in ("", "float32") else []
    return "".join(f", {word}" for word in unusual)


def _drafters(content: DrafterResults, drawn: str) -> Section:
    names = [one.name for one in content.drafters]
    reports = [one.report for one in content.drafters]
    return Section(
        "Drafters",
        (
            f"Questions: {content.origin}. {_where(content.environment)}",
            markdown_table(drafters.depth_table(reports, names)),
            "Acceptance length by category:",
            markdown_table(drafters.category_table(reports, names)),
            drawn,
        ),
    )


def _which_when(evidence: Mapping[str, Evidence]) -> Section:
    runs = {name: one for name in _ordered(evidence) if isinstance(one := evidence[name], Results)}
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
        parts.append("\n".join(f"- {one.title}: {_verdicts(one)}." for one in papers))
    for content in loads:
        parts += [
            f"By batch{_variant(content)}, speed over plain decoding "
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
                others = [_listed(names) or "-" for names in (rank.tied, rank.behind)]
                rows.append([name, f"{temperature:g}", figure.name, best, *others])
    return rows


def _load_ranks(content: BatchResults) -> list[list[str]]:
    rows = [["temperature", "prompt", "batch", "best", "not told apart", "behind"]]
    for cell, ways in over_plain(content.timings).items():
        rank = rank_ways(ways)
        best = f"`{rank.leader}` ({with_interval(ways[rank.leader])})"
        prompt = f"{cell.context} tokens" if cell.context else "as it is"
        others = [_listed(names) or "-" for names in (rank.tied, rank.behind)]
        rows.append([f"{cell.temperature:g}", prompt, str(cell.batch), best, *others])
    return rows


def _verifiers(results: Results, names: Sequence[str]) -> list[str]:
    known = {setting.name: setting for setting in results.settings.settings}
    return [known[name].baseline or known[name].plan.verifier for name in names]


def _best_by_cell(runs: Mapping[str, Results], figure: Figure) -> list[tuple[str, set[str]]]:
    """Return for each run and temperature who leads, and all who are not behind."""
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
