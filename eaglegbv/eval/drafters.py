"""Comparison of drafters: what a verifier accepts of each, by depth and by category."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from eaglegbv.config import Plan
from eaglegbv.eval.questions import Question
from eaglegbv.eval.statistics import (
    Acceptance,
    Estimate,
    bootstrap_ratio,
    bootstrap_ratio_of_ratios,
)
from eaglegbv.llm import LLM
from eaglegbv.metrics import RequestMetrics
from eaglegbv.request import FinishReason
from eaglegbv.rng import request_seed
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import Completion, Message


@dataclass(frozen=True, slots=True)
class Conversations:
    """The conversations to hold.

    Attributes:
        questions: The user's messages.
        temperature: Temperature of the answers.
        max_tokens: Most tokens of an answer.
        seed: Seed from which every answer's seed is derived, the same for all drafters.
        batch: Number of conversations held together.
    """

    questions: Sequence[Question]
    temperature: float = 1.0
    max_tokens: int = 128
    seed: int = 0
    batch: int = 16


class DrafterReport(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one drafter with one plan.

    Attributes:
        drafter: Name or folder of the drafter.
        plan: How it drafted, and the verifier.
        acceptance: Counts over all conversations.
        length: Acceptance length with its 95% bootstrap interval over questions.
        ratio: Acceptance length over the first drafter's with the same plan, paired by question;
            None for the first.
        by_category: Counts of each category of questions.
        by_question: Counts of each question that was answered to its end.
        errors: Number of conversations that broke off; they do not enter any figure.
    """

    drafter: str
    plan: Plan
    acceptance: Acceptance
    length: Estimate
    ratio: Estimate | None
    by_category: dict[str, Acceptance]
    by_question: dict[str, Acceptance]
    errors: int


def measure_drafter(
    llm: LLM,
    plan: Plan,
    conversations: Conversations,
    *,
    first: DrafterReport | None = None,
    on_batch: Callable[[int], object] = lambda _: None,
) -> DrafterReport:
    """Hold the conversations and count what is accepted.

    Args:
        llm: The target with the drafter.
        plan: How to speculate.
        conversations: The conversations.
        first: Report of the drafter to compare with, on the same plan.
        on_batch: Called with the number of conversations that have just ended.
    """
    questions, depth = conversations.questions, plan.depth
    answered: dict[str, Acceptance] = {}
    for begin in range(0, len(questions), conversations.batch):
        numbered = list(enumerate(questions))[begin : begin + conversations.batch]
        for number, metrics in _converse(llm, plan, conversations, dict(numbered)).items():
            answered[questions[number].id] = Acceptance.of(metrics, depth)
        on_batch(len(numbered))
    categories: dict[str, list[Acceptance]] = {}
    for question in questions:
        if question.id in answered:
            categories.setdefault(question.category, []).append(answered[question.id])
    own = list(answered.values())
    return DrafterReport(
        drafter=llm.drafter_name or "none",
        plan=plan,
        acceptance=Acceptance.pooled(own, depth),
        length=bootstrap_ratio([a.accepted for a in own], [a.forwards for a in own]),
        ratio=None if first is None else _ratio(answered, first.by_question),
        by_category={name: Acceptance.pooled(parts, depth) for name, parts in categories.items()},
        by_question=answered,
        errors=len(questions) - len(answered),
    )


def _converse(
    llm: LLM, plan: Plan, conversations: Conversations, questions: Mapping[int, Question]
) -> dict[int, list[RequestMetrics]]:
    """Return the counts of each conversation that was held to its end, by its number."""
    messages: dict[int, list[Message]] = {number: [] for number in questions}
    metrics: dict[int, list[RequestMetrics]] = {number: [] for number in questions}
    for turn in range(max(len(question.turns) for question in questions.values())):
        asked = [n for n in messages if turn < len(questions[n].turns)]
        for number in asked:
            messages[number].append({"role": "user", "content": questions[number].turns[turn]})
        params = [
            SamplingParams(
                temperature=conversations.temperature,
                max_tokens=conversations.max_tokens,
                seed=request_seed(request_seed(conversations.seed, number), turn),
            )
            for number in asked
        ]
        prompts = [messages[number] for number in asked]
        answers: list[Completion] = llm.generate(prompts, params, plan=plan)
        for number, answer in zip(asked, answers, strict=True):
            if answer.finish_reason is FinishReason.ERROR:
                del messages[number], metrics[number]
                continue
            messages[number].append({"role": "assistant", "content": answer.text})
            metrics[number].append(answer.metrics)
    return metrics


def _ratio(own: Mapping[str, Acceptance], other: Mapping[str, Acceptance]) -> Estimate:
    """Return the ratio of acceptance lengths on the questions that both answered."""
    pairs = [(a, other[question]) for question, a in own.items() if question in other]
    return bootstrap_ratio_of_ratios(
        [a.accepted for a, _ in pairs],
        [a.forwards for a, _ in pairs],
        [b.accepted for _, b in pairs],
        [b.forwards for _, b in pairs],
    )


def depth_table(reports: Sequence[DrafterReport], names: Sequence[str]) -> list[list[str]]:
    """Return a row for each report: its acceptance length, and the shares by depth."""
    deepest = max(report.plan.depth for report in reports)
    headings = ["drafter", "verifier", "K", "acceptance length", "ratio"]
    rows = [[*headings, *(f"{depth} or more" for depth in range(1, deepest + 1))]]
    for report, name in zip(reports, names, strict=True):
        shares = [f"{share:.3f}" for share in report.acceptance.shares]
        rows.append(
            [
                name,
                report.plan.verifier,
                str(report.plan.paths),
                _figure(report.length),
                "-" if report.ratio is None else _figure(report.ratio),
                *shares,
                *[""] * (deepest - len(shares)),
            ]
        )
    return rows


def category_table(reports: Sequence[DrafterReport], names: Sequence[str]) -> list[list[str]]:
    """Return a row for each report: its acceptance length in each category."""
    categories = list(dict.fromkeys(c for report in reports for c in report.by_category))
    rows = [["drafter", "verifier", "K", *categories]]
    for report, name in zip(reports, names, strict=True):
        found = report.by_category
        lengths = [f"{found[c].length:.3f}" if c in found else "-" for c in categories]
        rows.append([name, report.plan.verifier, str(report.plan.paths), *lengths])
    return rows


def _figure(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
