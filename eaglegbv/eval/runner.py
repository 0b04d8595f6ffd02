"""The folder of a run, where records are saved as they are measured, so a killed run loses none."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from eaglegbv.errors import EagleGBVError, InvalidArgument
from eaglegbv.eval.questions import Question
from eaglegbv.eval.records import (
    Environment,
    Folder,
    Head,
    Journal,
    Key,
    Record,
    Results,
    RunSettings,
    Setting,
    Turn,
    pretty,
    read_json,
)
from eaglegbv.eval.statistics import FIGURES
from eaglegbv.rng import request_seed
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import Completion
from eaglegbv.utils import write_whole


class RunFolder(Folder[RunSettings, Record]):
    """The folder of a benchmark; see :class:`eaglegbv.eval.records.Folder`."""

    def __init__(self, path: Path, settings: RunSettings, environment: Environment) -> None:
        super().__init__(path, settings, environment, Head[RunSettings], _journal(path))
        _check(path, settings, self.records, "out")

    @property
    def done(self) -> frozenset[Key]:
        """The keys of all records that were measured."""
        return frozenset(record.key for record in self.records)

    def results(self) -> Results:
        """Return all that was measured so far."""
        return Results(settings=self.settings, environment=self.environment, records=self.records)


def write_results(folder: Path, results: Results, summary: Sequence[msgspec.Struct]) -> Path:
    """Write ``results.json`` into ``folder``, with what the figures mean and their summary."""
    path = folder / "results.json"
    content = {
        "format": results.format,
        "settings": results.settings,
        "environment": results.environment,
        "definitions": {name: figure.definition for name, figure in FIGURES.items()},
        "summary": summary,
        "records": results.records,
    }
    write_whole(path, pretty(content))
    return path


def read_results(
    path: Path, argument: str = "results", *, expected: str = "a results.json"
) -> Results:
    """Read a ``results.json``; ``argument`` and ``expected`` are for messages.

    Raises:
        InvalidArgument: The file cannot be read or is not a ``results.json``.
    """
    results = read_json(path, Results, argument=argument, expected=expected)
    _check(path, results.settings, results.records, argument)
    return results


def load_results(path: Path, argument: str = "results") -> Results:
    """Read a run from its folder, finished or not, or from a ``results.json``.

    Raises:
        InvalidArgument: There is no run.
    """
    header = path / "run.json"
    if not header.is_file():
        return read_results(path / "results.json" if path.is_dir() else path, argument)
    run = read_json(header, Head[RunSettings], argument=argument, expected="the head of a run")
    records = _journal(path).read(argument)
    _check(path, run.settings, records, argument)
    return Results(settings=run.settings, environment=run.environment, records=records)


def _check(path: Path, settings: RunSettings, records: Sequence[Record], argument: str) -> None:
    """Raise unless every record belongs to a setting of the run and occurs once.

    A setting's name leaves out values equal to the defaults, so a version with other defaults names
    the settings of an older run differently. Their records must not be dropped silently.
    """
    known = {setting.name for setting in settings.settings}
    strange = sorted({record.setting for record in records} - known)
    if strange:
        raise InvalidArgument(
            argument,
            str(path),
            f"records of {', '.join(sorted(known))}, not of {', '.join(strange)}: "
            "another version, with other defaults, has measured it",
        )
    twice = [key for key, count in Counter(record.key for record in records).items() if count > 1]
    if twice:
        expected = f"records that each stand once, unlike {twice[0]}: did two processes write it?"
        raise InvalidArgument(argument, str(path), expected)


def _journal(folder: Path) -> Journal[Record]:
    return Journal(folder / "records.jsonl", Record, "records of a run")


# Holding conversations in several settings, interleaved, and recording their figures.


WARM_UP_TOKENS = 16


Generate: TypeAlias = Callable[..., Completion]
"""Answers chat messages as :meth:`eaglegbv.llm.LLM.generate` does: prompts, params, ``plan=``."""


def run(
    generate: Generate,
    questions: Sequence[Question],
    settings: RunSettings,
    *,
    baselines: Mapping[str, Generate] = MappingProxyType({}),
    at_once: int | None = None,
    done: Collection[Key] = (),
    on_record: Callable[[Record], None],
) -> None:
    """Ask every question in every setting, ``settings.repeats`` times.

    Settings take turns question by question, and which one begins changes with the question, so
    that whatever slows the machine for a while slows all of them alike. Before that, each setting
    answers once without being recorded. Each conversation feeds the model's own answers back, and a
    question's seed is the same in every setting.

    Baselines, by name, answer in their settings instead of ``generate``, if there are any. With
    ``at_once``, so many conversations are held at a time, in several threads, and nothing is
    answered before. Records whose keys are done are not measured again; ``on_record`` gets each of
    the others as soon as it is complete, in the calling thread.
    """
    todo = _todo(questions, settings, done)
    answering = {
        s: generate if s.baseline is None or not baselines else baselines[s.baseline]
        for s in settings.settings
    }
    if at_once is not None:
        with ThreadPoolExecutor(at_once) as pool:
            waiting = [pool.submit(_converse, answering[a[0]], settings, *a) for a in todo]
            try:
                for future in as_completed(waiting):
                    on_record(future.result())
            finally:
                pool.shutdown(cancel_futures=True)
        return
    short = msgspec.structs.replace(settings, max_tokens=WARM_UP_TOKENS)
    first = msgspec.structs.replace(questions[0], turns=questions[0].turns[:1])
    for setting in dict.fromkeys(setting for setting, *_ in todo):
        _converse(answering[setting], short, setting, first, 0, 0)
    for asked in todo:
        on_record(_converse(answering[asked[0]], settings, *asked))


def _todo(
    questions: Sequence[Question], settings: RunSettings, done: Collection[Key]
) -> list[tuple[Setting, Question, int, int]]:
    """Return setting, question, repeat and seed of each conversation that is not done, in turns."""
    finished, count = frozenset(done), len(settings.settings)
    return [
        (setting, question, repeat, request_seed(settings.seed, repeat * len(questions) + number))
        for repeat in range(settings.repeats)
        for number, question in enumerate(questions)
        for position in range(count)
        for setting in [settings.settings[(repeat + number + position) % count]]
        if (setting.name, question.id, repeat) not in finished
    ]


def _converse(
    generate: Generate,
    settings: RunSettings,
    setting: Setting,
    question: Question,
    repeat: int,
    seed: int,
) -> Record:
    """Hold one conversation, feeding the model's own answers back; turns have seeds of ``seed``."""
    record = Record(
        question_id=question.id,
        category=question.category,
        setting=setting.name,
        repeat=repeat,
        turns=[],
    )
    messages = [{"role": "system", "content": settings.system}] if settings.system else []
    for number, asked in enumerate(question.turns):
        messages = [*messages, {"role": "user", "content": asked}]
        params = SamplingParams(
            temperature=setting.temperature,
            max_tokens=settings.max_tokens,
            seed=request_seed(seed, number),
        )
        start = time.perf_counter()
        try:
            answer = generate(messages, params, plan=setting.plan)
        except EagleGBVError as error:  # for example, a conversation too long for the model
            record.error = str(error)
            break
        wall_seconds = time.perf_counter() - start
        messages = [*messages, {"role": "assistant", "content": answer.text}]
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
