"""Comparison of drafters: what a verifier accepts of each, by depth and by category."""

from collections.abc import Callable, Sequence

import msgspec

from eaglegbv.config import Plan
from eaglegbv.eval.questions import QuestionSet
from eaglegbv.eval.records import Record, RunSettings, Setting
from eaglegbv.eval.report import with_interval
from eaglegbv.eval.runner import run
from eaglegbv.eval.statistics import ACCEPTANCE_LENGTH, Acceptance, Estimate, paired_ratio, whole
from eaglegbv.llm import LLM
from eaglegbv.sampling import SamplingParams


class DrafterReport(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one drafter (its name or folder) with one plan."""

    drafter: str
    plan: Plan
    acceptance: Acceptance  # counts over all conversations
    length: Estimate  # acceptance length with its 95% bootstrap interval over questions
    # Acceptance length over the first drafter's with the same plan, paired by question; None for
    # the first.
    ratio: Estimate | None
    by_category: dict[str, Acceptance]
    errors: int  # number of conversations that broke off; they do not enter any figure


class NamedReport(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter's report, with the name under which it is shown."""

    name: str
    report: DrafterReport


def converse(
    llm: LLM,
    plan: Plan,
    chosen: QuestionSet,
    params: SamplingParams,
    at_once: int,
    on_record: Callable[[Record], object] = lambda _: None,
) -> list[Record]:
    """Hold a conversation for each question, so many at once, and return their records in order.

    Seeds follow from that of ``params``, so they are the same for all drafters.
    """
    ids = tuple(question.id for question in chosen.questions)
    settings = RunSettings(
        suite=chosen.suite,
        origin=chosen.origin,
        question_ids=ids,
        model=llm.model_name,
        drafter=llm.drafter_name,
        system=None,
        settings=(Setting(plan=plan, temperature=params.temperature),),
        max_tokens=params.max_tokens or 0,
        seed=params.seed or 0,
        repeats=1,
    )
    found: list[Record] = []

    def keep(record: Record) -> None:
        found.append(record)
        on_record(record)

    run(llm.generate, chosen.questions, settings, at_once=at_once, on_record=keep)
    return sorted(found, key=lambda record: ids.index(record.question_id))


def drafter_report(
    drafter: str, plan: Plan, records: Sequence[Record], first: Sequence[Record] | None = None
) -> DrafterReport:
    """Count what was accepted; ``first`` are records of the drafter to compare with, if any."""
    held = whole(records)

    def accepted(category: str | None = None) -> Acceptance:
        own = [one for one in held if category in (None, one.category)]
        return Acceptance.of([turn.metrics for one in own for turn in one.turns], plan.depth)

    return DrafterReport(
        drafter=drafter,
        plan=plan,
        acceptance=accepted(),
        length=ACCEPTANCE_LENGTH.pooled(held),
        ratio=None if first is None else paired_ratio(ACCEPTANCE_LENGTH, held, first),
        by_category={name: accepted(name) for name in dict.fromkeys(r.category for r in held)},
        errors=len(records) - len(held),
    )


def depth_table(found: Sequence[NamedReport]) -> list[list[str]]:
    """Return a row for each report: its acceptance length, and the shares by depth."""
    deepest = max(one.report.plan.depth for one in found)
    headings = ["drafter", "verifier", "K", "acceptance length", "ratio"]
    rows = [[*headings, *(f"{depth} or more" for depth in range(1, deepest + 1))]]
    for one in found:
        report = one.report
        shares = [f"{share:.3f}" for share in report.acceptance.shares]
        ratio = "-" if report.ratio is None else with_interval(report.ratio, 3)
        figures = [with_interval(report.length, 3), ratio, *shares]
        rows.append([*_named(one), *figures, *[""] * (deepest - len(shares))])
    return rows


def category_table(found: Sequence[NamedReport]) -> list[list[str]]:
    """Return a row for each report: its acceptance length in each category."""
    categories = list(dict.fromkeys(c for one in found for c in one.report.by_category))
    rows = [["drafter", "verifier", "K", *categories]]
    for one in found:
        own = one.report.by_category
        lengths = [f"{own[c].length:.3f}" if c in own else "-" for c in categories]
        rows.append([*_named(one), *lengths])
    return rows


def _named(one: NamedReport) -> list[str]:
    return [one.name, one.report.plan.verifier, str(one.report.plan.paths)]
