"""Conversations with several turns, held in every setting by whatever answers."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Self, TypeAlias

import msgspec

from eaglegbv.errors import EagleGBVError
from eaglegbv.eval.experiment import Part
from eaglegbv.eval.figures import OTHER
from eaglegbv.eval.observations import Observation
from eaglegbv.eval.questions import Question
from eaglegbv.eval.settings import Setting
from eaglegbv.metrics import Phase, RequestMetrics
from eaglegbv.rng import request_seed
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import Completion
from eaglegbv.utils import require_integers

SHEET = "conversations"
WARM_UP_TOKENS = 16
AT_ONCE_PARTS = 4  # conversations of a part, over those that are held at a time

Generate: TypeAlias = Callable[..., Completion]
"""Answers chat messages as :meth:`eaglegbv.llm.LLM.generate` does: prompts, params, ``plan=``."""


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """How conversations are held.

    Attributes:
        max_tokens: Most tokens of an answer.
        seed: Seed of all random numbers.
        repeats: How many times to run everything.
        system: System message before every conversation.
        at_once: Number of conversations at a time; where none is given, settings take turns.
    """

    max_tokens: int = 128
    seed: int = 0
    repeats: int = 1
    system: str | None = None
    at_once: int | None = None

    def __post_init__(self) -> None:
        require_integers(self, ("at_once",), repeats=(1, None), at_once=(1, 1024))
        SamplingParams(max_tokens=self.max_tokens, seed=self.seed)  # refuses what is out of range


class Turn(msgspec.Struct):
    """One turn's answer."""

    completion_tokens: int  # its length; the first token comes from the prompt's own forward
    wall_seconds: float  # from the call to its return: prefill, decoding, and (de)tokenisation
    metrics: RequestMetrics
    text: str = ""


def conversation_sums(turns: Iterable[Turn]) -> dict[str, float]:
    """Return what a conversation came to."""
    sums: dict[str, float] = {}

    def add(name: str, value: float) -> None:
        if value:
            sums[name] = sums.get(name, 0.0) + value

    for turn in turns:
        metrics = turn.metrics
        wall = turn.wall_seconds
        for name, value in request_sums(metrics).items():
            add(name, value)
        add("answer_tokens", turn.completion_tokens)
        add("wall_seconds", wall)
        add("seconds", wall - metrics.seconds.get(Phase.PREFILL, 0.0))
        add(f"seconds.{OTHER}", wall - sum(metrics.seconds.values()))
    return sums


def request_sums(metrics: RequestMetrics) -> dict[str, float]:
    """Return the counts and phases of a request as sums."""
    sums = {
        "tokens": float(metrics.committed_tokens),
        "steps": float(metrics.target_forwards),
        "nodes": float(metrics.drafted_nodes),
        "accepted": float(metrics.accepted_tokens),
        "offered": float(sum(metrics.offered_by_depth)),
        "answers": 1.0,
    }
    # A walk down the tree tries a level where it accepted all before: the last one tried refuses
    # its drafts, unless the path is at its end.
    whole = metrics.accepted_by_depth[-1] if metrics.accepted_by_depth else 0
    sums["trials"] = sums["steps"] + sums["accepted"] - whole
    counts = {"offered": metrics.offered_by_depth, "accepted": metrics.accepted_by_depth}
    for name, by_depth in counts.items():
        sums |= {f"{name}.{depth}": float(n) for depth, n in enumerate(by_depth, start=1)}
    sums |= {f"plans.{plan}": float(count) for plan, count in metrics.plans.items()}
    return sums | {f"seconds.{phase}": spent for phase, spent in metrics.seconds.items()}


@dataclass(slots=True)
class Sitting:
    """What answers in some settings, which take turns; it is opened when it is first asked."""

    settings: tuple[Setting, ...]
    open: Callable[[], AbstractContextManager[Generate]]
    baselines: Mapping[str, Generate] = field(default_factory=dict)  # by name

    def answering(self, setting: Setting, opened: Generate) -> Generate:
        """Return what answers in a setting."""
        return self.baselines.get(setting.who, opened)


@dataclass(slots=True)
class Conversations:
    """Every question in every setting, some times, with the model's own answers fed back.

    Settings of a sitting take turns question by question, and which one begins changes with the
    question, so that whatever slows the machine for a while slows all of them alike. Before it is
    first recorded, a setting answers once. A question's seed is the same in every setting. With
    ``at_once``, so many conversations are held at a time, and nothing is answered before.
    """

    sittings: Sequence[Sitting]
    questions: Sequence[Question]
    how: Holding
    _stack: ExitStack = field(default_factory=ExitStack)
    _opened: tuple[Sitting, Generate] | None = None
    _warm: set[Setting] = field(default_factory=set)

    def __call__(self, settings: Sequence[Setting]) -> Iterator[Part]:
        """Yield the parts of all settings, sitting by sitting."""
        wanted = set(settings)
        for sitting in self.sittings:
            own = [setting for setting in sitting.settings if setting in wanted]
            yield from (
                self._in_turns(sitting, own)
                if self.how.at_once is None
                else self._together(sitting, own, AT_ONCE_PARTS * self.how.at_once)
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close what was opened last."""
        self._opened = None
        self._stack.close()

    def _in_turns(self, sitting: Sitting, settings: Sequence[Setting]) -> Iterator[Part]:
        for repeat in range(self.how.repeats):
            for number, question in enumerate(self.questions):
                for position in range(len(settings)):
                    setting = settings[(repeat + number + position) % len(settings)]
                    hold = partial(self._one, sitting, setting, repeat, number)
                    yield Part(f"{setting.name} {question.id} {repeat}", 1, hold)

    def _together(self, sitting: Sitting, settings: Sequence[Setting], size: int) -> Iterator[Part]:
        for setting in settings:
            for repeat in range(self.how.repeats):
                for first in range(0, len(self.questions), size):
                    numbers = range(first, min(first + size, len(self.questions)))
                    hold = partial(self._many, sitting, setting, repeat, numbers)
                    yield Part(f"{setting.name} {first} {repeat}", len(numbers), hold)

    def _answering(self, sitting: Sitting, setting: Setting) -> Generate:
        if self._opened is None or self._opened[0] is not sitting:
            self.__exit__()
            self._opened = sitting, self._stack.enter_context(sitting.open())
        return sitting.answering(setting, self._opened[1])

    def _one(
        self, sitting: Sitting, setting: Setting, repeat: int, number: int
    ) -> list[Observation]:
        generate = self._answering(sitting, setting)
        if setting not in self._warm:
            self._warm.add(setting)
            first = msgspec.structs.replace(self.questions[0], turns=self.questions[0].turns[:1])
            self._turns(generate, setting, first, 0, WARM_UP_TOKENS)
        return [self._converse(generate, setting, repeat, number)]

    def _many(
        self, sitting: Sitting, setting: Setting, repeat: int, numbers: Sequence[int]
    ) -> list[Observation]:
        hold = partial(self._converse, self._answering(sitting, setting), setting, repeat)
        with ThreadPoolExecutor(self.how.at_once) as pool:
            return list(pool.map(hold, numbers))

    def _converse(
        self, generate: Generate, setting: Setting, repeat: int, number: int
    ) -> Observation:
        question = self.questions[number]
        seed = request_seed(self.how.seed, repeat * len(self.questions) + number)
        turns, error = self._turns(generate, setting, question, seed, self.how.max_tokens)
        return Observation(
            setting=setting.name,
            unit=question.id,
            category=question.category,
            repeat=repeat,
            sums=conversation_sums(turns),
            error=error,
            texts=tuple(turn.text for turn in turns),
        )

    def _turns(
        self, generate: Generate, setting: Setting, question: Question, seed: int, tokens: int
    ) -> tuple[list[Turn], str | None]:
        """Hold a conversation; return its turns, and why it broke off if it did."""
        system = question.system or self.how.system
        messages = [{"role": "system", "content": system}] if system else []
        turns: list[Turn] = []
        for number, text in enumerate(question.turns):
            messages = [*messages, {"role": "user", "content": text}]
            params = SamplingParams(
                temperature=setting.temperature,
                max_tokens=tokens,
                seed=request_seed(seed, number),
            )
            start = time.perf_counter()
            try:
                answer = generate(messages, params, plan=setting.plan)
            except EagleGBVError as error:  # for example, a conversation too long for the model
                return turns, str(error)
            wall_seconds = time.perf_counter() - start
            messages = [*messages, {"role": "assistant", "content": answer.text}]
            turns.append(Turn(len(answer.token_ids), wall_seconds, answer.metrics, answer.text))
        return turns, None
