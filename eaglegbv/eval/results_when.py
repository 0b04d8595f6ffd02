"""The section that ranks verifiers over all measured files."""

from collections import Counter
from collections.abc import Mapping, Sequence

from eaglegbv.auto_plan import AutoPlan
from eaglegbv.config import Plan
from eaglegbv.eval.evidence import BatchResults, Evidence, PaperResults
from eaglegbv.eval.figures import BLOCK_EFFICIENCY, TOKENS_PER_SECOND, Figure
from eaglegbv.eval.ranking import over_plain, rank_settings, rank_ways
from eaglegbv.eval.records import Results
from eaglegbv.eval.report import markdown_table, with_interval
from eaglegbv.eval.results_sections import Section, listed, variant, verdicts
from eaglegbv.eval.study import Study
from eaglegbv.eval.study_report import tree_findings


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
