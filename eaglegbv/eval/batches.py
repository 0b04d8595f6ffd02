"""Tokens a second by batch and context: ways to generate side by side, in turns in one process.

Every way answers the same prompts with the same number of tokens, ends of sequence ignored; the
time is that of the whole call, prompts included. Ways take turns, and the one that begins changes,
so that whatever slows the machine for a while slows all of them alike.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol, Self

import msgspec
import torch
from transformers import PreTrainedModel

from eaglegbv.auto_plan import Planning
from eaglegbv.errors import InvalidArgument
from eaglegbv.llm import LLM
from eaglegbv.params import SamplingParams
from eaglegbv.uniforms import request_seed

BASELINE = "none"
"""The way that others are compared with: plain decoding by the engine."""

WARM_UP_TOKENS = 24


class Way(Protocol):
    """A way to generate."""

    @property
    def name(self) -> str:
        """Its name in tables."""

    @property
    def max_batch(self) -> int | None:
        """Most prompts it takes at once; None for any number."""

    def run(self, prompts: list[list[int]], tokens: int, *, temperature: float, seed: int) -> int:
        """Answer all prompts with ``tokens`` tokens each, and return how many came."""


@dataclass(frozen=True, slots=True)
class EngineWay:
    """The engine by one planning."""

    name: str
    llm: LLM
    plan: Planning
    max_batch: int | None = None

    def run(self, prompts: list[list[int]], tokens: int, *, temperature: float, seed: int) -> int:
        """See :meth:`Way.run`."""
        params = [
            SamplingParams(
                temperature=temperature,
                max_tokens=tokens,
                ignore_eos=True,
                seed=request_seed(seed, n),
            )
            for n in range(len(prompts))
        ]
        answers = self.llm.generate(prompts, params, plan=self.plan)
        return sum(len(answer.token_ids) for answer in answers)


@dataclass(frozen=True, slots=True)
class TransformersWay:
    """transformers' ``generate``, prompts padded to the left.

    Attributes:
        name: See :class:`Way`.
        model: A model that knows no end of sequence.
        max_batch: See :class:`Way`.
        options: Further arguments, such as those of assisted generation.
    """

    name: str
    model: PreTrainedModel
    options: Mapping[str, object]
    max_batch: int | None = None

    def run(self, prompts: list[list[int]], tokens: int, *, temperature: float, seed: int) -> int:
        """See :meth:`Way.run`."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        how: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            torch.manual_seed(seed)
            how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        device = self.model.device
        with torch.inference_mode():
            generate: Any = self.model.generate
            out = generate(
                ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=tokens,
                pad_token_id=0,
                **how,
                **self.options,
            )
        return int((out.shape[1] - longest) * len(prompts))


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One call.

    Attributes:
        way: Name.
        batch: Prompts.
        context: Tokens of each prompt; 0 for the questions as they are.
        temperature: Of sampling.
        repeat: Number of the repeat.
        tokens: Tokens that came.
        seconds: Wall time.
    """

    way: str
    batch: int
    context: int
    temperature: float
    repeat: int
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Prompts of any length, made of questions.

    Attributes:
        questions: As the model reads them, chat template included.
    """

    questions: Sequence[Sequence[int]]

    @classmethod
    def of(cls, llm: LLM, texts: Sequence[str]) -> Self:
        """Encode user messages."""
        if not texts:
            raise InvalidArgument("questions", 0, "at least one question")
        return cls([llm.encode([{"role": "user", "content": text}]) for text in texts])

    def take(self, count: int, length: int) -> list[list[int]]:
        """Return ``count`` prompts: different questions, or so many tokens of several.

        Args:
            count: Number of prompts.
            length: Tokens of each; 0 for the questions as they are.
        """
        return [self._prompt(n, length) for n in range(count)]

    def _prompt(self, first: int, length: int) -> list[int]:
        if not length:
            return list(self.questions[first % len(self.questions)])
        tokens: list[int] = []
        while len(tokens) < length:
            # The last question stays whole, so that the model has something to answer.
            tokens = [*self.questions[first % len(self.questions)], *tokens]
            first += 1
        return tokens[-length:]


@dataclass(frozen=True, slots=True)
class Grid:
    """What to measure.

    Attributes:
        batches: Numbers of prompts.
        contexts: Lengths of the prompts; 0 for the questions as they are.
        temperatures: Sampling temperatures.
        tokens: Tokens of an answer.
        repeats: How often.
        seed: Of everything drawn.
    """

    batches: Sequence[int]
    contexts: Sequence[int]
    temperatures: Sequence[float]
    tokens: int
    repeats: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name, values, low in (
            ("batches", self.batches, 1),
            ("contexts", self.contexts, 0),
            ("tokens", (self.tokens,), 1),
            ("repeats", (self.repeats,), 1),
        ):
            if not values or min(values) < low:
                raise InvalidArgument(name, list(values), f"integers of at least {low}")


def measure(
    ways: Sequence[Way],
    prompts: Callable[[int, int], list[list[int]]],
    grid: Grid,
) -> Iterator[Timing]:
    """Time every way in every cell of a grid.

    Args:
        ways: What to compare.
        prompts: Returns so many prompts of so many tokens (0: as they are).
        grid: What to measure.
    """
    for temperature in grid.temperatures:
        for context in grid.contexts:
            for batch in grid.batches:
                fit = [way for way in ways if way.max_batch is None or batch <= way.max_batch]
                yield from _cell(fit, prompts(batch, context), grid, context, temperature)


def _cell(
    ways: Sequence[Way], asked: list[list[int]], grid: Grid, context: int, temperature: float
) -> Iterator[Timing]:
    for way in ways:
        tokens = min(grid.tokens, WARM_UP_TOKENS)
        way.run(asked, tokens, temperature=temperature, seed=grid.seed)
    for repeat in range(grid.repeats):
        seed = request_seed(grid.seed, repeat)
        for place in range(len(ways)):
            way = ways[(place + repeat) % len(ways)]
            start = time.perf_counter()
            tokens = way.run(asked, grid.tokens, temperature=temperature, seed=seed)
            yield Timing(
                way=way.name,
                batch=len(asked),
                context=context,
                temperature=temperature,
                repeat=repeat,
                tokens=tokens,
                seconds=time.perf_counter() - start,
            )


@dataclass(frozen=True, slots=True)
class Row:
    """A way in a cell, over the repeats.

    Attributes:
        way: Name.
        batch: Prompts.
        context: Tokens of each; 0 for the questions as they are.
        temperature: Of sampling.
        rate: Median tokens a second.
        ratio: Median of the ratio to plain decoding in the same repeat; None without that.
    """

    way: str
    batch: int
    context: int
    temperature: float
    rate: float
    ratio: float | None


def summarise(timings: Sequence[Timing]) -> list[Row]:
    """Return medians, in order of first appearance."""
    cells: dict[tuple[float, int, int], dict[str, dict[int, float]]] = {}
    for t in timings:
        cell = cells.setdefault((t.temperature, t.context, t.batch), {})
        cell.setdefault(t.way, {})[t.repeat] = t.rate
    rows = []
    for (temperature, context, batch), ways in cells.items():
        plain = ways.get(BASELINE, {})
        for way, rates in ways.items():
            ratios = [rate / plain[repeat] for repeat, rate in rates.items() if repeat in plain]
            ratio = median(ratios) if ratios else None
            rows.append(Row(way, batch, context, temperature, median(rates.values()), ratio))
    return rows


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Return rows for a terminal, headings first: a line a way, a column a batch."""
    batches = sorted({row.batch for row in rows})
    lines: dict[tuple[float, int, str], dict[int, Row]] = {}
    for row in rows:
        lines.setdefault((row.temperature, row.context, row.way), {})[row.batch] = row

    def figure(row: Row | None) -> str:
        if row is None:
            return "-"
        ratio = "" if row.ratio is None else f" ({row.ratio:.2f})"
        return f"{row.rate:.0f}{ratio}"

    body = [
        [
            f"T={temperature:g}, {context or 'own'} tokens, {way}",
            *(figure(found.get(b)) for b in batches),
        ]
        for (temperature, context, way), found in lines.items()
    ]
    return [["tokens/s (of none)", *(f"batch {b}" for b in batches)], *body]
