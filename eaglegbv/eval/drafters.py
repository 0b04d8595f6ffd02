"""Comparison of drafters: what a verifier accepts of each, by depth and by category."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from eaglegbv.config import Plan
from eaglegbv.eval.questions import Question
from eaglegbv.eval.report import with_interval
from eaglegbv.eval.statistics import Acceptance, Estimate, bootstrap_ratio
from eaglegbv.llm import LLM
from eaglegbv.metrics import RequestMetrics
from eaglegbv.request import FinishReason
from eaglegbv.rng import request_seed
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import Message


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
    by_question: dict[str, Acceptance]  # counts of each question that was answered to its end
    errors: int  # number of conversations that broke off; they do not enter any figure


def measure_drafter(
    llm: LLM,
    plan: Plan,
    questions: Sequence[Question],
    params: SamplingParams,
    *,
    batch: int = 16,
    first: DrafterReport | None = None,
    on_batch: Callable[[int], object] = lambda _: None,
) -> DrafterReport:
    """Hold a conversation for each question, ``batch`` together, and count what is accepted.

    Seeds follow from that of ``params``, so they are the same for all drafters. ``first`` is the
    report of the drafter to compare with, on the same plan. ``on_batch`` is called with the number
    of conversations that have just ended.
    """
    answered: dict[int, list[RequestMetrics]] = {}
    for begin in range(0, len(questions), batch):
        numbered = dict(list(enumerate(questions))[begin : begin + batch])
        answered |= _converse(llm, plan, params, numbered)
        on_batch(len(numbered))
    categories: dict[str, list[RequestMetrics]] = {}
    for number, metrics in answered.items():
        categories.setdefault(questions[number].category, []).extend(metrics)
    every = [one for metrics in answered.values() for one in metrics]
    own = {questions[n].id: Acceptance.of(metrics, plan.depth) for n, metrics in answered.items()}
    other = {} if first is None else first.by_question
    both = [question for question in own if question in other]
    return DrafterReport(
        drafter=llm.drafter_name or "none",
        plan=plan,
        acceptance=Acceptance.of(every, plan.depth),
        length=bootstrap_ratio(*_columns(own, own)),
        ratio=None
        if first is None
        else bootstrap_ratio(*_columns(own, both), *_columns(other, both)),
        by_category={name: Acceptance.of(m, plan.depth) for name, m in categories.items()},
        by_question=own,
        errors=len(questions) - len(answered),
    )


def _columns(
    counts: Mapping[str, Acceptance], questions: Iterable[str]
) -> tuple[list[float], list[float]]:
    own = [counts[question] for question in questions]
    return [one.accepted for one in own], [one.forwards for one in own]


def _converse(
    llm: LLM, plan: Plan, params: SamplingParams, questions: Mapping[int, Question]
) -> dict[int, list[RequestMetrics]]:
    """Return the counts of each conversation that was held to its end, by its number."""
    messages: dict[int, list[Message]] = {number: [] for number in questions}
    metrics: dict[int, list[RequestMetrics]] = {number: [] for number in questions}
    for turn in range(max(len(question.turns) for question in questions.values())):
        asked = [n for n in messages if turn < len(questions[n].turns)]
        for number in asked:
            messages[number].append({"role": "user", "content": questions[number].turns[turn]})
        seeds = [request_seed(request_seed(params.seed or 0, number), turn) for number in asked]
        seeded = [msgspec.structs.replace(params, seed=seed) for seed in seeds]
        answers = llm.generate([messages[number] for number in asked], seeded, plan=plan)
        for number, answer in zip(asked, answers, strict=True):
            if answer.finish_reason is FinishReason.ERROR:
                del messages[number], metrics[number]
                continue
            messages[number].append({"role": "assistant", "content": answer.text})
            metrics[number].append(answer.metrics)
    return metrics


def depth_table(reports: Sequence[DrafterReport], names: Sequence[str]) -> list[list[str]]:
    """Return a row for each report: its acceptance length, and the shares by depth."""
    deepest = max(report.plan.depth for report in reports)
    headings = ["drafter", "verifier", "K", "acceptance length", "ratio"]
    rows = [[*headings, *(f"{depth} or more" for depth in range(1, deepest + 1))]]
    for report, name in zip(reports, names, strict=True):
        shares = [f"{share:.3f}" for share in report.acceptance.shares]
        ratio = "-" if report.ratio is None else with_interval(report.ratio, 3)
        figures = [with_interval(report.length, 3), ratio, *shares]
        rows.append([*_named(report, name), *figures, *[""] * (deepest - len(shares))])
    return rows


def category_table(reports: Sequence[DrafterReport], names: Sequence[str]) -> list[list[str]]:
    """Return a row for each report: its acceptance length in each category."""
    categories = list(dict.fromkeys(c for report in reports for c in report.by_category))
    rows = [["drafter", "verifier", "K", *categories]]
    for report, name in zip(reports, names, strict=True):
        found = report.by_category
        lengths = [f"{found[c].length:.3f}" if c in found else "-" for c in categories]
        rows.append([*_named(report, name), *lengths])
    return rows


def _named(report: DrafterReport, name: str) -> list[str]:
    return [name, report.plan.verifier, str(report.plan.paths)]
