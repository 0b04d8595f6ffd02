"""Tokens a second by batch and context: ways to generate side by side, in turns in one process.

Every way answers the same prompts with the same number of tokens, ends of sequence ignored; the
time is that of the whole call, prompts included. Ways take turns, and the one that begins changes,
so that whatever slows the machine for a while slows all of them alike. A small batch is measured
on several prompts, batch after batch: drafts of one text may do well or badly by chance.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol, Self

import msgspec

from eaglegbv.auto_plan import Planning
from eaglegbv.errors import EagleGBVError, InvalidArgument
from eaglegbv.eval.baselines import Generation
from eaglegbv.eval.questions import evenly
from eaglegbv.llm import LLM
from eaglegbv.metrics import FORWARDS, REASONS, Metric
from eaglegbv.params import SamplingParams
from eaglegbv.uniforms import request_seed

BASELINE = "none"
"""The way that others are compared with: plain decoding by the engine."""

WARM_UP_TOKENS = 24

FEW = 0.02
"""Plans of a smaller share than this are told together."""


class Cell(msgspec.Struct, frozen=True, order=True):
    """A load.

    Attributes:
        temperature: Of sampling.
        context: Tokens of each prompt; 0 for the questions as they are.
        batch: Prompts.
    """

    temperature: float
    context: int
    batch: int


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
        for answer in answers:
            if answer.error is not None:  # a prompt longer than the model's context, say
                raise EagleGBVError(answer.error)
        return sum(len(answer.token_ids) for answer in answers)


@dataclass(slots=True)
class WatchedWay:
    """A way of the engine whose choice of plans is counted, by cell; see :class:`Way`.

    Ways share an engine and its counters, so what they counted before a call is taken off.

    Attributes:
        way: The way.
        chosen: Requests times forwards by plan, and by reason, in each cell.
    """

    way: EngineWay
    chosen: dict[Cell, dict[Metric, Counter[str]]] = field(default_factory=dict)
    _last: dict[Metric, Counter[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """See :attr:`Way.name`."""
        return self.way.name

    @property
    def max_batch(self) -> int | None:
        """See :attr:`Way.max_batch`."""
        return self.way.max_batch

    def run(self, prompts: list[list[int]], tokens: int, *, temperature: float, seed: int) -> int:
        """See :meth:`Way.run`."""
        before = self._counted()
        came = self.way.run(prompts, tokens, temperature=temperature, seed=seed)
        self._last = {m: cells - before[m] for m, cells in self._counted().items()}
        return came

    def note(self, timing: "Timing") -> None:
        """Count the call that was timed last, if it was of this way; others only warmed up."""
        if timing.way == self.name:
            chosen = self.chosen.setdefault(timing.cell, {})
            for metric, counted in self._last.items():
                chosen.setdefault(metric, Counter()).update(counted)

    def _counted(self) -> dict[Metric, Counter[str]]:
        values = self.way.llm.metrics.values
        return {m: Counter({k: int(n) for k, n in values.get(m, {}).items()}) for m in _CHOICES}

    def explain(self) -> list[str]:
        """Return a line a cell: the shares of plans, and of why they were chosen."""
        lengths = any(cell.context for cell in self.chosen)
        return [
            f"{_label(cell.temperature, cell.context, self.name, lengths=lengths)}, "
            f"batch {cell.batch}: {_shares(counted[FORWARDS])}; {_shares(counted[REASONS])}"
            for cell, counted in self.chosen.items()
        ]


_CHOICES = (FORWARDS, REASONS)


def _shares(counted: Counter[str]) -> str:
    """Return names with their shares, the largest first, and the small ones as one."""
    total = max(1, counted.total())
    large = [(name, n) for name, n in counted.most_common() if n >= FEW * total]
    rest = counted.total() - sum(n for _, n in large)
    told = [*large, ("others", rest)] if rest else large
    return ", ".join(f"{name} {n / total:.0%}" for name, n in told)


@dataclass(frozen=True, slots=True)
class TransformersWay:
    """transformers' ``generate``; see :class:`Way`.

    Attributes:
        name: Its name in tables.
        generation: Plain or assisted, ends of sequence ignored.
    """

    name: str
    generation: Generation

    @property
    def max_batch(self) -> int | None:
        """See :attr:`Way.max_batch`."""
        return self.generation.baseline.max_batch

    def run(self, prompts: list[list[int]], tokens: int, *, temperature: float, seed: int) -> int:
        """See :meth:`Way.run`."""
        return self.generation(prompts, tokens, temperature=temperature, seed=seed).numel()


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
        first: Number of the first prompt.
    """

    way: str
    batch: int
    context: int
    temperature: float
    repeat: int
    tokens: int
    seconds: float
    first: int = 0

    @property
    def cell(self) -> Cell:
        """The load it was measured at."""
        return Cell(self.temperature, self.context, self.batch)

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

        They are spread evenly over the questions, so over their categories.

        Args:
            count: Number of prompts.
            length: Tokens of each; 0 for the questions as they are.
        """
        total = len(self.questions)
        places = evenly(count, total) if count < total else range(count)
        return [self._prompt(place, length) for place in places]

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
        prompts: Least number of prompts that a repeat answers, batch after batch.
        seed: Of everything drawn.
    """

    batches: Sequence[int]
    contexts: Sequence[int]
    temperatures: Sequence[float]
    tokens: int
    repeats: int
    prompts: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, values, low in (
            ("batches", self.batches, 1),
            ("contexts", self.contexts, 0),
            ("tokens", (self.tokens,), 1),
            ("repeats", (self.repeats,), 1),
            ("prompts", (self.prompts,), 1),
        ):
            if not values or min(values) < low:
                raise InvalidArgument(name, list(values), f"integers of at least {low}")

    def calls(self, batch: int) -> int:
        """Return how many batches of this size a repeat answers."""
        return -(-self.prompts // batch)


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
                asked = prompts(batch * grid.calls(batch), context)
                batches = [asked[n : n + batch] for n in range(0, len(asked), batch)]
                yield from _cell(fit, batches, grid, context, temperature)


def _cell(
    ways: Sequence[Way],
    batches: Sequence[list[list[int]]],
    grid: Grid,
    context: int,
    temperature: float,
) -> Iterator[Timing]:
    for way in ways:
        tokens = min(grid.tokens, WARM_UP_TOKENS)
        way.run(batches[0], tokens, temperature=temperature, seed=grid.seed)
    for repeat in range(grid.repeats):
        for number, asked in enumerate(batches):
            seed = request_seed(grid.seed, repeat * len(batches) + number)
            for place in range(len(ways)):
                way = ways[(place + repeat + number) % len(ways)]
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
                    first=number * len(asked),
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


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a way came to in a cell.

    Attributes:
        rates: Tokens a second of each repeat.
        ratios: Of the rate to that of plain decoding in the same repeat, where both were measured.
    """

    rates: tuple[float, ...]
    ratios: tuple[float, ...]


def speeds_by_cell(timings: Iterable[Timing]) -> dict[Cell, dict[str, Speeds]]:
    """Return the speeds of each way by cell, in order of first appearance."""
    cells: dict[Cell, dict[str, dict[int, list[Timing]]]] = {}
    for t in timings:
        ways = cells.setdefault(t.cell, {})
        ways.setdefault(t.way, {}).setdefault(t.repeat, []).append(t)
    return {cell: _speeds(ways) for cell, ways in cells.items()}


def _speeds(ways: Mapping[str, Mapping[int, Sequence[Timing]]]) -> dict[str, Speeds]:
    """Return the speeds of the ways in one cell, given their calls by repeat."""
    rates = {
        way: {repeat: _rate(calls) for repeat, calls in own.items()} for way, own in ways.items()
    }
    plain = rates.get(BASELINE, {})
    return {
        way: Speeds(
            rates=tuple(own.values()),
            ratios=tuple(rate / plain[repeat] for repeat, rate in own.items() if repeat in plain),
        )
        for way, own in rates.items()
    }


def _rate(calls: Sequence[Timing]) -> float:
    """Return tokens a second over the calls of a repeat."""
    return sum(t.tokens for t in calls) / sum(t.seconds for t in calls)


def summarise(timings: Iterable[Timing]) -> list[Row]:
    """Return medians over the repeats, in order of first appearance."""
    return [
        Row(
            way=way,
            batch=cell.batch,
            context=cell.context,
            temperature=cell.temperature,
            rate=median(own.rates),
            ratio=median(own.ratios) if own.ratios else None,
        )
        for cell, ways in speeds_by_cell(timings).items()
        for way, own in ways.items()
    ]


def table(rows: Sequence[Row], *, lengths: bool = True) -> list[list[str]]:
    """Return rows for a terminal, headings first: a line a way, a column a batch.

    Args:
        rows: In the order of the lines.
        lengths: Whether to say how long the prompts are, as where there are several lengths.
    """
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
            _label(temperature, context, way, lengths=lengths),
            *(figure(found.get(b)) for b in batches),
        ]
        for (temperature, context, way), found in lines.items()
    ]
    return [["tokens/s (of none)", *(f"batch {b}" for b in batches)], *body]


def _label(temperature: float, context: int, way: str, *, lengths: bool) -> str:
    """Return what a line is of; a context of 0 are the questions, of their own lengths."""
    length = f" {context or 'own'} tokens," if lengths else ""
    return f"T={temperature:g},{length} {way}"
