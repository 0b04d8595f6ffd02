"""The sections of the page of results, each for one measured file, as Markdown.

Pictures are passed as Markdown too: as links to the files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from eaglegbv.eval import batches, drafters
from eaglegbv.eval.batch_table import rate_table
from eaglegbv.eval.evidence import BatchResults, DrafterResults, PaperResults
from eaglegbv.eval.figures import BLOCK_EFFICIENCY, TOKENS_PER_SECOND, whole
from eaglegbv.eval.papers.base import AGAINST, AGREES, OPEN, findings_table
from eaglegbv.eval.ranking import Rank, rank_settings
from eaglegbv.eval.records import Environment, Record, Results
from eaglegbv.eval.report import acceptance_text, drafter_name, facts, markdown_table, table
from eaglegbv.eval.study import Study
from eaglegbv.eval.study_report import findings as study_findings
from eaglegbv.eval.study_report import study_table
from eaglegbv.eval.summary import summarise


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
