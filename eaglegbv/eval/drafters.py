"""Comparison of drafters: what a verifier accepts of each, by depth and by category."""

from collections.abc import Callable, Sequence

import msgspec

from eaglegbv.config import Plan
from eaglegbv.eval.questions import Question
from eaglegbv.eval.records import Record, RunSettings
from eaglegbv.eval.report import with_interval
from eaglegbv.eval.runner import run
from eaglegbv.eval.statistics import ACCEPTANCE_LENGTH, Acceptance, Estimate, paired_ratio, whole
from eaglegbv.llm import LLM


class DrafterReport(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one drafter with one plan."""

    name: str  # name under which it is shown
    drafter: str  # its name or folder
    plan: Plan
    acceptance: Acceptance  # counts over all conversations
    length: Estimate  # acceptance length with its 95% bootstrap interval over questions
    # Acceptance length over the first drafter's with the same plan, paired by question; None for
    # the first.
    ratio: Estimate | None
    by_category: dict[str, Acceptance]
    errors: int  # number of conversations that broke off; they do not enter any figure


def converse(
    llm: LLM,
    questions: Sequence[Question],
    settings: RunSettings,
    at_once: int,
    on_record: Callable[[Record], object] = lambda _: None,
) -> list[Record]:
    """Hold a conversation for each question, so many at once, and return their records in order.

    Seeds follow from that of ``settings``, so they are the same for all drafters.
    """
    found: list[Record] = []

    def keep(record: Record) -> None:
        found.append(record)
        on_record(record)

    run(llm.generate, questions, settings, at_once=at_once, on_record=keep)
    return sorted(found, key=lambda record: settings.question_ids.index(record.question_id))


def drafter_report(
    name: str,
    drafter: str,
    plan: Plan,
    records: Sequence[Record],
    first: Sequence[Record] | None = None,
) -> DrafterReport:
    """Count what was accepted; ``first`` are records of the drafter to compare with, if any."""
    held = whole(records)

    def accepted(category: str | None = None) -> Acceptance:
        own = [one for one in held if category in (None, one.category)]
        return Acceptance.of([turn.metrics for one in own for turn in one.turns], plan.depth)

    return DrafterReport(
        name=name,
        drafter=drafter,
        plan=plan,
        acceptance=accepted(),
        length=ACCEPTANCE_LENGTH.pooled(held),
        ratio=None if first is None else paired_ratio(ACCEPTANCE_LENGTH, held, first),
        by_category={name: accepted(name) for name in dict.fromkeys(r.category for r in held)},
        errors=len(records) - len(held),
    )


def depth_table(found: Sequence[DrafterReport]) -> list[list[str]]:
    """Return a row for each report: its acceptance length, and the shares by depth."""
    deepest = max(one.plan.depth for one in found)
    headings = ["drafter", "verifier", "K", "acceptance length", "ratio"]
    rows = [[*headings, *(f"{depth} or more" for depth in range(1, deepest + 1))]]
    for one in found:
        shares = [f"{share:.3f}" for share in one.acceptance.shares]
        figures = [with_interval(one.length, 3), with_interval(one.ratio, 3), *shares]
        rows.append([*_named(one), *figures, *[""] * (deepest - len(shares))])
    return rows


def category_table(found: Sequence[DrafterReport]) -> list[list[str]]:
    """Return a row for each report: its acceptance length in each category."""
    categories = list(dict.fromkeys(c for one in found for c in one.by_category))
    rows = [["drafter", "verifier", "K", *categories]]
    for one in found:
        own = one.by_category
        rows.append(
            [*_named(one), *(f"{own[c].length:.3f}" if c in own else "-" for c in categories)]
        )
    return rows


def _named(one: DrafterReport) -> list[str]:
    return [one.name, one.plan.verifier, str(one.plan.paths)]
