"""Tokens a second by batch and context of several ways to generate, which take turns in a process.

Every way answers the same prompts with the same number of tokens, ignoring ends of sequence. The
time is that of the whole call, including prompts. Ways take turns, and which one begins changes, so
that whatever slows the machine for a while slows all of them alike. A small batch is measured on
several prompts, batch after batch, because drafts of a single text may be good or bad by chance.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.timing import Cell, Timing
from eaglegbv.eval.ways import Way
from eaglegbv.uniforms import request_seed

BASELINE = "none"
"""The way that others are compared with: the engine's plain decoding."""

WARM_UP_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Grid:
    """Settings of a measurement.

    Attributes:
        batches: Numbers of prompts.
        contexts: Lengths of the prompts; 0 for the questions as they are.
        temperatures: Sampling temperatures.
        tokens: Tokens of an answer.
        repeats: Number of repeats.
        prompts: Least number of prompts that a repeat answers, batch after batch.
        seed: Seed of all random numbers.
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
        """Return how many batches of this size are answered in a repeat."""
        return -(-self.prompts // batch)


def measure(
    ways: Sequence[Way],
    prompts: Callable[[int, int], list[list[int]]],
    grid: Grid,
) -> Iterator[Timing]:
    """Time every way in every cell of a grid.

    Args:
        ways: The ways to compare.
        prompts: Returns the given number of prompts of the given length (0: as they are).
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
    """Figures of a way in a cell, over the repeats.

    Attributes:
        way: Name of the way.
        batch: Number of prompts.
        context: Tokens of each prompt; 0 for the questions as they are.
        temperature: Sampling temperature.
        rate: Median tokens a second.
        ratio: Median ratio to plain decoding in the same repeat; None if that was not measured.
    """

    way: str
    batch: int
    context: int
    temperature: float
    rate: float
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of a way in a cell.

    Attributes:
        rates: Tokens a second of each repeat.
        ratios: Ratio of the rate to that of plain decoding in the same repeat, where both were
            measured.
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
    """Return tokens a second over all calls of a repeat."""
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
