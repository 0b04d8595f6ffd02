"""The folder of a run, where records are saved as they are measured, so a killed run loses none."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import msgspec

from eaglegbv.config import Plan
from eaglegbv.errors import EagleGBVError, InvalidArgument
from eaglegbv.eval.questions import Question
from eaglegbv.eval.records import (
    Environment,
    Journal,
    Key,
    Record,
    Results,
    RunSettings,
    Setting,
    Turn,
    read_json,
)
from eaglegbv.eval.statistics import FIGURES
from eaglegbv.metrics import RequestMetrics
from eaglegbv.rng import request_seed
from eaglegbv.sampling import SamplingParams
from eaglegbv.utils import write_whole


class _Run(msgspec.Struct, kw_only=True):
    """Header of a run, written before anything is measured."""

    settings: RunSettings
    environment: Environment


SHORT = 40
"""Most characters of a setting that a message shows."""


def another_run(path: Path, found: msgspec.Struct, wanted: msgspec.Struct) -> InvalidArgument:
    """Return the error for a folder that holds a run with other settings than those wanted now."""
    short, long = [], []
    for field in wanted.__struct_fields__:
        values = [getattr(settings, field) for settings in (found, wanted)]
        if values[0] == values[1]:
            continue
        if all(_is_short(value) for value in values):
            before, now = ("none" if value in (None, "") else value for value in values)
            short.append(f"{field} {before}, now {now}")
        else:
            long.append(field)
    told = "; ".join([*short, *([f"other {', '.join(long)}"] if long else [])])
    expected = f"a folder for this run, such as --out NEW: this one holds another ({told})"
    return InvalidArgument("out", str(path), expected)


def _is_short(value: object) -> bool:
    return value is None or (isinstance(value, str | int | float) and len(str(value)) <= SHORT)


class RunFolder:
    """A folder with ``run.json`` (settings) and ``records.jsonl`` (one line a record).

    Opening a folder that holds a run with equal settings resumes it.

    Attributes:
        path: The folder.
        settings: Settings of the run.
        environment: Where the run was started.
        records: All records so far, including those of earlier sessions.

    Raises:
        InvalidArgument: The folder holds a run with other settings, or cannot be written.
    """

    def __init__(self, path: Path, settings: RunSettings, environment: Environment) -> None:
        self.path = path
        self.settings = settings
        self._journal = _journal(path)
        header = path / "run.json"
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not header.is_file():
                write_whole(header, _pretty(_Run(settings=settings, environment=environment)))
        except OSError as error:
            raise InvalidArgument("out", str(path), f"a folder for a run ({error})") from error
        run = read_json(header, _Run, argument="out", expected="the head of a run")
        if run.settings != settings:
            raise another_run(path, run.settings, settings)
        self.environment = run.environment
        self.records = self._journal.resume()
        _check(path, settings, self.records, "out")

    def add(self, record: Record) -> None:
        """Add a record and save it."""
        self._journal.add(record)
        self.records.append(record)

    @property
    def done(self) -> frozenset[Key]:
        """The keys of all records that were measured."""
        return frozenset(record.key for record in self.records)

    def has_all(self, settings: Sequence[Setting]) -> bool:
        """Return whether all records that these settings should have were measured."""
        return self.done.issuperset(self.settings.keys(settings))

    def results(self) -> Results:
        """Return all that was measured so far."""
        return Results(settings=self.settings, environment=self.environment, records=self.records)


def write_results(folder: Path, results: Results, summary: Sequence[msgspec.Struct]) -> Path:
    """Write ``results.json`` into ``folder``.

    The file has the settings, the environment, the definitions of the figures (and whether prefill
    counts in them), the summary and the records.
    """
    path = folder / "results.json"
    content = {
        "format": results.format,
        "settings": results.settings,
        "environment": results.environment,
        "definitions": {name: figure.definition for name, figure in FIGURES.items()},
        "summary": summary,
        "records": results.records,
    }
    write_whole(path, _pretty(content))
    return path


def read_results(
    path: Path, argument: str = "results", *, expected: str = "a results.json"
) -> Results:
    """Read a ``results.json``.

    Args:
        path: The file.
        argument: The user's name for the file, for messages.
        expected: What the file may be, for messages.

    Raises:
        InvalidArgument: The file cannot be read or is not a ``results.json``.
    """
    results = read_json(path, Results, argument=argument, expected=expected)
    _check(path, results.settings, results.records, argument)
    return results


def load_results(path: Path, argument: str = "results") -> Results:
    """Read a run from its folder, finished or not, or from a ``results.json``.

    Args:
        path: The folder or the file.
        argument: The user's name for the folder or file, for messages.

    Raises:
        InvalidArgument: There is no run.
    """
    header = path / "run.json"
    if not header.is_file():
        return read_results(path / "results.json" if path.is_dir() else path, argument)
    run = read_json(header, _Run, argument=argument, expected="the head of a run")
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


def _pretty(content: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


# Holding conversations in several settings, interleaved, and recording their figures.


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


def hold_at_once(
    generate: Generate,
    questions: Sequence[Question],
    settings: RunSettings,
    *,
    own: Sequence[Setting],
    at_once: int,
    done: Collection[Key],
    on_record: Callable[[Record], None],
) -> None:
    """Ask every question in some of the settings, several conversations at a time.

    Args:
        generate: Answers conversations; called from several threads.
        questions: The questions to ask.
        settings: Settings of the whole run; a question's seed is the same in every setting.
        own: The settings in which ``generate`` answers.
        at_once: Number of conversations at a time.
        done: Keys of records that need not be held again.
        on_record: Receives each record, in the calling thread, as soon as it is complete.
    """
    with ThreadPoolExecutor(at_once) as pool:
        waiting = [
            pool.submit(converse, generate, question, setting, settings, repeat, seed)
            for repeat in range(settings.repeats)
            for setting in own
            for number, question in enumerate(questions)
            for seed in [request_seed(settings.seed, repeat * len(questions) + number)]
            if (setting.name, question.id, repeat) not in done
        ]
        try:
            for future in as_completed(waiting):
                on_record(future.result())
        finally:
            pool.shutdown(cancel_futures=True)
