"""Figures as text: the table in the terminal, and ``results.md``."""

import hashlib
from collections.abc import Mapping, Sequence
from math import isclose

from eaglegbv.eval import statistics
from eaglegbv.eval.records import Record, Results, RunSettings


def table(summaries: Sequence[statistics.Summary], *, intervals: bool = True) -> list[list[str]]:
    """Return the main table, headings first: one row per setting, with or without intervals."""

    def figure(estimate: statistics.Estimate | None, digits: int = 2) -> str:
        if estimate is not None and not intervals:
            estimate = statistics.Estimate.exactly(estimate.value)
        return with_interval(estimate, digits)

    rows = [["setting", "block efficiency", "tokens/s", "speed-up", "with prefill"]]
    for s in summaries:
        speeds = [figure(s.tokens_per_second, 1), figure(s.speedup), figure(s.wall_speedup)]
        rows.append([s.setting, figure(s.block_efficiency), *speeds])
    return rows


def with_interval(estimate: statistics.Estimate | None, digits: int = 2) -> str:
    """Return a figure and its interval, "-" for None; the figure alone if the interval is a point.

    That is so if only one unit (a question) was measured: its noise is not known.
    """
    if estimate is None:
        return "-"
    if isclose(estimate.low, estimate.high, rel_tol=1e-12):
        return f"{estimate.value:.{digits}f}"
    low, high = f"{estimate.low:.{digits}f}", f"{estimate.high:.{digits}f}"
    return f"{estimate.value:.{digits}f} [{low}, {high}]"


def served_table(settings: RunSettings, records: Sequence[Record]) -> list[list[str]]:
    """Return what was accepted in every setting with a record, headings first; no speeds."""
    counts = ("setting", "conversations", "broken off", "tokens")
    rows = [[*counts, statistics.ACCEPTANCE_LENGTH.name, statistics.BLOCK_EFFICIENCY.name]]
    for setting in settings.settings:
        records_of_setting = [record for record in records if record.setting == setting.name]
        held = statistics.whole(records_of_setting)
        tokens = sum(turn.completion_tokens for record in held for turn in record.turns)
        figures = [
            with_interval(f.pooled(held))
            for f in (statistics.ACCEPTANCE_LENGTH, statistics.BLOCK_EFFICIENCY)
        ]
        if records_of_setting:
            broken = len(records_of_setting) - len(held)
            rows.append([setting.name, str(len(held)), str(broken), str(tokens), *figures])
    return rows


def plain_text(rows: Sequence[Sequence[str]]) -> str:
    """Return ``rows`` in aligned columns for a terminal, with the first column left-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def markdown(results: Results, summaries: Sequence[statistics.Summary]) -> str:
    """Return the report of a run: what was run, where, and the results."""
    lines = [f"- {name}: {fact}" for name, fact in facts(results).items()]
    broken = [
        f"- {r.setting}, {r.question_id}, repeat {r.repeat}: {r.error}"
        for r in results.records
        if r.error is not None
    ]
    phases = {
        (s.setting, phase): f"{milliseconds:.2f}"
        for s in summaries
        for phase, milliseconds in s.milliseconds_by_phase.items()
    }
    sections = [
        f"# {results.settings.suite}",
        "\n".join(lines),
        markdown_table(table(summaries)),
        "## What the figures mean",
        _definitions(results.settings),
        "## Acceptance by depth",
        acceptance_text(summaries),
        "## Milliseconds per token of the answers, by phase (prefill counted)",
        markdown_table(pivot("setting", phases)),
    ]
    if broken:
        heading = "## Conversations that broke off (counted in no figure)"
        sections += [heading, "\n".join(broken)]
    return "\n\n".join(filter(None, sections)) + "\n"


_TURNS = (
    "speed-up: tokens/s over that of `none`, plain decoding by the same engine in the same "
    "process, question by question in turns; with prefill: the same of tokens/s with prefill.",
)
_ONE_BY_ONE = (
    "speed-up: tokens/s over that of `none`, plain decoding by the same backend. Its engines ran "
    "one after another, so settings did not take turns; with prefill: the same of tokens/s with "
    "prefill.",
    "Prefill is all up to the first token of the stream; other phases are not told.",
)
_BASELINES = (
    "Of transformers' ways prefill is all up to the first token, drafts that are made before the "
    "prompt is read included; other phases are not told (-).",
)
_ALWAYS = (
    "Batch size 1. Sums are pooled before they are divided; speeds are medians over repeats; "
    "intervals are 95% bootstrap intervals over questions.",
)


def _definitions(settings: RunSettings) -> str:
    lines = [f"{figure.name}: {figure.definition}." for figure in statistics.FIGURES.values()]
    lines += _ONE_BY_ONE if settings.backend == "sglang" else _TURNS
    lines += _BASELINES if any(s.baseline is not None for s in settings.settings) else ()
    return "\n".join(f"- {line}" for line in (*lines, *_ALWAYS))


def facts(results: Results) -> dict[str, str]:
    """Return what was run and where, by heading."""
    settings, where, template = results.settings, results.environment, "not recorded"
    if settings.template is not None:
        digest = hashlib.sha256(settings.template.encode()).hexdigest()[:16]
        template = f"{len(settings.template)} characters, SHA-256 {digest}; whole in results.json"
    compiled = f" (compiled by {settings.compile_backend})" if settings.compile_backend else ""
    arguments = "".join(f", {name}={value}" for name, value in settings.backend_arguments.items())
    return {
        "Questions": f"{len(settings.question_ids)} from {settings.origin}",
        "Target": f"{settings.model} ({settings.dtype})" if settings.dtype else settings.model,
        "Drafter": settings.drafter or "none",
        "Backend": f"{settings.backend}{compiled}{arguments}",
        "Chat template": template,
        "System prompt": settings.system or "none",
        "Most tokens an answer": str(settings.max_tokens),
        "Repeats, seed": f"{settings.repeats}, {settings.seed}",
        "Machine": f"{where.processor}, {where.cores} cores, {where.threads} threads; "
        f"{where.device}; {where.platform}",
        "Versions": ", ".join(f"{package} {v}" for package, v in where.versions.items()),
        "Started": where.started,
    }


def acceptance_text(summaries: Sequence[statistics.Summary]) -> str:
    """Return acceptance by depth as a Markdown table, or a sentence if no setting drafts."""
    drafted = [s for s in summaries if s.acceptance_by_depth]
    deepest = max((len(s.acceptance_by_depth) for s in drafted), default=0)
    if not deepest:
        return "Nothing was drafted."
    rows = [["setting", *(str(depth) for depth in range(1, deepest + 1))]]
    for s in drafted:
        shares = [f"{share:.3f}" for share in s.acceptance_by_depth]
        rows.append([s.setting, *shares, *[""] * (deepest - len(shares))])
    return markdown_table(rows)


def pivot(corner: str, cells: Mapping[tuple[str, str], str]) -> list[list[str]]:
    """Return cells by row and column, headings first, in order of appearance; "-" for none."""
    rows, columns = (dict.fromkeys(key[side] for key in cells) for side in (0, 1))
    body = ([row, *(cells.get((row, column), "-") for column in columns)] for row in rows)
    return [[corner, *columns], *body]


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, headings first, as a Markdown table with the first column left-aligned."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    align = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join([line(rows[0]), line(align), *(line(row) for row in rows[1:])])
