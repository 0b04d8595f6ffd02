"""Holding conversations in several settings, interleaved, and recording their figures."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Protocol

from eaglegbv.config import Plan
from eaglegbv.errors import EagleGBVError
from eaglegbv.eval.questions import Question
from eaglegbv.eval.records import Record, RunSettings, Setting, Turn
from eaglegbv.params import SamplingParams
from eaglegbv.request_metrics import RequestMetrics
from eaglegbv.uniforms import request_seed

Message = dict[str, str]

WARM_UP_TOKENS = 16


class Answer(Protocol):
    """The parts of a completion that the runner needs."""

    @property
    def text(self) -> str:
        """The answer."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens of the answer."""

    @property
    def finish_reason(self) -> str:
        """Why the answer ended."""

    @property
    def metrics(self) -> RequestMetrics:
        """The engine's counts."""


class Generate(Protocol):
    """Answers chat messages, as :meth:`eaglegbv.llm.LLM.generate` does."""

    def __call__(
        self, prompts: list[Message], sampling_params: SamplingParams, *, plan: Plan
    ) -> Answer:
        """Return the answer to one conversation."""


def run(
    generate: Generate,
    questions: Sequence[Question],
    settings: RunSettings,
    *,
    baselines: Mapping[str, Generate] = MappingProxyType({}),
    done: Collection[tuple[str, str, int]] = (),
    on_record: Callable[[Record], None],
) -> None:
    """Ask every question in every setting, ``settings.repeats`` times.

    Settings take turns question by question, and which one begins changes with the question, so
    that whatever slows the machine for a while slows all of them alike. Before that, each setting
    answers once without being recorded. Each conversation feeds the model's own answers back.

    Args:
        generate: Answers one conversation by a plan.
        questions: The questions to ask.
        settings: What to compare, and how.
        baselines: For each baseline, by name, what answers in its settings instead.
        done: Keys of records that need not be measured again.
        on_record: Receives each record as soon as it is measured.
    """
    finished = frozenset(done)
    todo = [
        (repeat, number, setting)
        for repeat, number, setting in _schedule(len(questions), settings)
        if (setting.name, questions[number].id, repeat) not in finished
    ]

    def answering(setting: Setting) -> Generate:
        return generate if setting.baseline is None else baselines[setting.baseline]

    for setting in dict.fromkeys(setting for _, _, setting in todo):
        _warm_up(answering(setting), questions[0], setting, settings)
    for repeat, number, setting in todo:
        seed = request_seed(settings.seed, repeat * len(questions) + number)
        answer = answering(setting)
        on_record(converse(answer, questions[number], setting, settings, repeat, seed))


def _schedule(questions: int, settings: RunSettings) -> Iterator[tuple[int, int, Setting]]:
    count = len(settings.settings)
    for repeat in range(settings.repeats):
        for number in range(questions):
            for position in range(count):
                yield repeat, number, settings.settings[(repeat + number + position) % count]


def _warm_up(
    generate: Generate, question: Question, setting: Setting, settings: RunSettings
) -> None:
    params = SamplingParams(temperature=setting.temperature, max_tokens=WARM_UP_TOKENS)
    # An error in the question is reported when it is asked.
    with suppress(EagleGBVError):
        generate(_messages(settings, question.turns[:1], []), params, plan=setting.plan)


def converse(
    generate: Generate,
    question: Question,
    setting: Setting,
    settings: RunSettings,
    repeat: int,
    seed: int,
) -> Record:
    """Hold one conversation, feeding the model's own answers back.

    Args:
        generate: Answers the conversation.
        question: The question to ask.
        setting: The setting to ask it in.
        settings: Settings of the run.
        repeat: Number of the repetition.
        seed: Seed from which every turn's seed is derived.
    """
    record = Record(
        question_id=question.id,
        category=question.category,
        setting=setting.name,
        repeat=repeat,
        turns=[],
    )
    for number in range(len(question.turns)):
        params = SamplingParams(
            temperature=setting.temperature,
            max_tokens=settings.max_tokens,
            seed=request_seed(seed, number),
        )
        answers = [turn.text for turn in record.turns]
        messages = _messages(settings, question.turns[: number + 1], answers)
        start = time.perf_counter()
        try:
            answer = generate(messages, params, plan=setting.plan)
        except EagleGBVError as error:  # for example, a conversation too long for the model
            record.error = str(error)
            break
        wall_seconds = time.perf_counter() - start
        record.turns.append(
            Turn(
                text=answer.text,
                completion_tokens=len(answer.token_ids),
                finish_reason=answer.finish_reason,
                wall_seconds=wall_seconds,
                metrics=answer.metrics,
            )
        )
    return record


def _messages(settings: RunSettings, turns: Sequence[str], answers: Sequence[str]) -> list[Message]:
    messages = [{"role": "system", "content": settings.system}] if settings.system else []
    for turn, answer in zip(turns[:-1], answers, strict=True):
        messages.append({"role": "user", "content": turn})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": turns[-1]})
    return messages
