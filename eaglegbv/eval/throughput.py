"""Tokens a second of several ways to generate, which take turns, by batch and context."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import TypeAlias

import msgspec
import numpy as np
from scipy import stats

from eaglegbv.config import Planning
from eaglegbv.errors import EagleGBVError, InvalidArgument
from eaglegbv.eval.baselines import Generation
from eaglegbv.eval.random_models import PairEngine
from eaglegbv.eval.report import pivot
from eaglegbv.eval.statistics import Estimate
from eaglegbv.llm import LLM
from eaglegbv.metrics import FORWARDS, REASONS, Metric
from eaglegbv.rng import request_seed
from eaglegbv.sampling import SamplingParams
from eaglegbv.utils import grouped

Prompts: TypeAlias = list[list[int]]
"""Token ids of each prompt."""


class Cell(msgspec.Struct, frozen=True, order=True):
    """A load."""

    temperature: float  # sampling temperature
    context: int  # tokens of each prompt; 0 for the questions as they are
    batch: int  # number of prompts


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What a call made: tokens, and an engine's decoding forwards, once for each request."""

    tokens: int  # number of tokens generated
    plans: dict[str, int] = {}  # forwards by plan
    reasons: dict[str, int] = {}  # forwards by the reason for the choice of their plan


class Timing(Counts, frozen=True, kw_only=True):
    """One timed call, prompts included."""

    way: str  # name of the way
    batch: int  # number of prompts
    context: int  # tokens of each prompt; 0 for the questions as they are
    temperature: float  # sampling temperature
    repeat: int  # number of the repeat
    seconds: float  # wall time
    first: int = 0  # number of the first prompt

    @property
    def cell(self) -> Cell:
        """The load at which it was measured."""
        return Cell(self.temperature, self.context, self.batch)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


# Ways to generate: the engine with one planning, and transformers.


@dataclass(frozen=True, slots=True)
class Way:
    """A way to generate."""

    name: str  # name in tables
    # Answers prompts with so many tokens each, at a temperature, with a seed.
    run: Callable[[Prompts, int, float, int], Counts]
    max_batch: int | None = None  # most prompts at once; None for any number


def run_engine(
    llm: LLM | PairEngine,
    plan: Planning,
    prompts: Prompts,
    tokens: int,
    temperature: float,
    seed: int,
) -> Counts:
    """Answer by the engine, which plans all requests so; see :class:`Way`."""

    def counted(metric: Metric) -> Counter[str]:
        values = llm.metrics.values.get(metric, {})
        return Counter({name: int(count) for name, count in values.items()})

    usual = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    seeds = (request_seed(seed, n) for n in range(len(prompts)))
    params = [msgspec.structs.replace(usual, seed=seed_of_prompt) for seed_of_prompt in seeds]
    plans, reasons = counted(FORWARDS), counted(REASONS)  # ways share an engine and its counters
    answers = llm.generate(prompts, params, plan=plan)
    for answer in answers:
        if answer.error is not None:  # for example, a prompt longer than the model's context
            raise EagleGBVError(str(answer.error))
    return Counts(
        tokens=sum(len(answer.token_ids) for answer in answers),
        plans=dict(counted(FORWARDS) - plans),
        reasons=dict(counted(REASONS) - reasons),
    )


def run_library(
    generation: Generation, prompts: Prompts, tokens: int, temperature: float, seed: int
) -> Counts:
    """Answer by transformers, past ends of sequence; see :class:`Way`."""
    answers = generation(prompts, tokens, temperature=temperature, seed=seed)
    return Counts(tokens=answers.numel())


# The time is that of the whole call, including prompts. Ways take turns, as the settings of a run
# do. A small batch is measured on several prompts, batch after batch, because drafts of a single
# text may be good or bad by chance.


BASELINE = "none"  # the way that others are compared with: the engine's plain decoding
AUTOMATIC = "auto"  # the way whose plans the engine chooses
WARM_UP_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Grid:
    """Settings of a measurement.

    Attributes:
        batches: Numbers of prompts at once.
        contexts: Tokens of a prompt; 0 for the questions as they are.
        temperature: Sampling temperatures.
        tokens: Tokens of an answer.
        repeats: How many times to run everything.
        prompts: Least number of prompts that a repeat answers, batch after batch.
        seed: Seed of all random numbers.
    """

    batches: Sequence[int] = (1, 2, 4, 8, 16)
    contexts: Sequence[int] = (0,)
    temperature: Sequence[float] = (1.0,)
    tokens: int = 64
    repeats: int = 3
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
    ways: Sequence[Way], prompts: Callable[[int, int], Prompts], grid: Grid
) -> Iterator[Timing]:
    """Time every way in every cell of a grid.

    Args:
        ways: The ways to compare.
        prompts: Returns the given number of prompts of the given length (0: as they are).
        grid: What to measure.
    """
    for temperature, context, batch in product(grid.temperature, grid.contexts, grid.batches):
        fit = [way for way in ways if way.max_batch is None or batch <= way.max_batch]
        calls = grid.calls(batch)
        asked = prompts(batch * calls, context)
        for way in fit:
            way.run(asked[:batch], min(grid.tokens, WARM_UP_TOKENS), temperature, grid.seed)
        for repeat, call, place in product(range(grid.repeats), range(calls), range(len(fit))):
            way, first = fit[(place + repeat + call) % len(fit)], call * batch
            seed = request_seed(grid.seed, repeat * calls + call)
            start = time.perf_counter()
            counts = way.run(asked[first : first + batch], grid.tokens, temperature, seed)
            yield Timing(
                **msgspec.structs.asdict(counts),
                way=way.name,
                batch=batch,
                context=context,
                temperature=temperature,
                repeat=repeat,
                seconds=time.perf_counter() - start,
                first=first,
            )


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of a way in a cell."""

    rates: tuple[float, ...]  # tokens a second of each repeat
    # Ratio of the rate to that of plain decoding in the same repeat, where both were measured.
    ratios: tuple[float, ...]

    def __str__(self) -> str:
        """Return the median rate, and in brackets the median ratio if there is one."""
        ratio = f" ({median(self.ratios):.2f})" if self.ratios else ""
        return f"{median(self.rates):.0f}{ratio}"


def speeds_by_cell(timings: Iterable[Timing]) -> dict[Cell, dict[str, Speeds]]:
    """Return the speeds of each way by cell, in order of first appearance."""
    speeds: dict[Cell, dict[str, Speeds]] = {}
    for cell, calls in grouped(timings, lambda t: t.cell).items():
        rates = {
            way: {n: _rate(some) for n, some in grouped(of_way, lambda t: t.repeat).items()}
            for way, of_way in grouped(calls, lambda t: t.way).items()
        }
        plain = rates.get(BASELINE, {})
        speeds[cell] = {
            way: Speeds(
                rates=tuple(own.values()),
                ratios=tuple(rate / plain[n] for n, rate in own.items() if n in plain),
            )
            for way, own in rates.items()
        }
    return speeds


def _rate(calls: Sequence[Timing]) -> float:
    return sum(t.tokens for t in calls) / sum(t.seconds for t in calls)


def over_plain(timings: Iterable[Timing]) -> dict[Cell, dict[str, Estimate]]:
    """Return each way's speed over plain decoding's in the same repeat, by cell.

    Values are medians over repeats; the ends are the lowest and the highest repeat.
    """
    ratios = {
        cell: {
            way: Estimate(median(one.ratios), min(one.ratios), max(one.ratios))
            for way, one in ways.items()
            if one.ratios
        }
        for cell, ways in speeds_by_cell(timings).items()
    }
    return {cell: ratios[cell] for cell in sorted(ratios) if ratios[cell]}


# Tables for a terminal of tokens a second and of the plans chosen.


FEW = 0.02  # plans with a smaller share than this are shown together


def rate_table(timings: Iterable[Timing]) -> list[list[str]]:
    """Return table rows, headings first: one row for each way, one column for each batch size.

    The lengths of the prompts are stated if they differ from those of the questions.
    """
    by_cell = speeds_by_cell(timings)
    lengths = any(cell.context for cell in by_cell)
    return pivot(
        "tokens/s (of none)",
        {
            (_label(cell, way, lengths=lengths), f"batch {cell.batch}"): str(speeds)
            for cell, ways in by_cell.items()
            for way, speeds in ways.items()
        },
    )


def _label(cell: Cell, way: str, *, lengths: bool) -> str:
    """Return the heading of a row; a context of 0 means questions at their original lengths."""
    length = f" {cell.context or 'own'} tokens," if lengths else ""
    return f"T={cell.temperature:g},{length} {way}"


def choice_lines(timings: Iterable[Timing]) -> list[str]:
    """Return one line for each cell: the shares of the plans auto chose, and of the reasons."""
    chosen: dict[Cell, tuple[Counter[str], Counter[str]]] = {}
    for t in timings:
        if t.way == AUTOMATIC:
            plans, reasons = chosen.setdefault(t.cell, (Counter(), Counter()))
            plans.update(t.plans)
            reasons.update(t.reasons)
    lengths = any(cell.context for cell in chosen)
    return [
        f"{_label(cell, AUTOMATIC, lengths=lengths)}, batch {cell.batch}: "
        f"{_shares(plans)}; {_shares(reasons)}"
        for cell, (plans, reasons) in chosen.items()
    ]


def paired_lines(timings: Iterable[Timing]) -> list[str]:
    """Return one line for each cell: how many times as fast as the best other way auto is.

    The best is the one with the most tokens a second over all calls; plain decoding follows. Calls
    are paired by repeat and prompts, and the 95% intervals are those of the mean logarithm.
    """
    lines = []
    for cell, calls in grouped(timings, lambda t: t.cell).items():
        ways = grouped(calls, lambda t: t.way)
        others = [name for name in ways if name != AUTOMATIC]
        if AUTOMATIC not in ways or not others:
            continue
        best = max(others, key=lambda name: _rate(ways[name]))
        for other in dict.fromkeys((best, BASELINE)):
            ratio = paired_ratio(calls, AUTOMATIC, other)
            if ratio is not None:
                label = _label(cell, AUTOMATIC, lengths=bool(cell.context))
                lines.append(
                    f"{label} / {other}, batch {cell.batch}: {ratio.value:.3f} "
                    f"[{ratio.low:.3f}, {ratio.high:.3f}]"
                )
    return lines


def paired_ratio(timings: Iterable[Timing], way: str, other: str) -> Estimate | None:
    """Return how many times as fast ``way`` is as ``other``, over calls of the same prompts.

    It is the mean of the logarithms with its 95% interval; None for fewer than two such calls.
    """
    rates: dict[str, dict[tuple[Cell, int, int], float]] = {way: {}, other: {}}
    for t in timings:
        if t.way in rates:
            rates[t.way][t.cell, t.repeat, t.first] = t.rate
    both = rates[way].keys() & rates[other].keys()
    logs = np.log([rates[way][call] / rates[other][call] for call in both])
    if len(logs) < 2:
        return None
    half = 1.96 * stats.sem(logs)
    low, middle, high = np.exp(logs.mean() + np.array([-half, 0, half]))
    return Estimate(float(middle), float(low), float(high))


def _shares(counted: Counter[str]) -> str:
    total = max(1, counted.total())
    large = [(name, n) for name, n in counted.most_common() if n >= FEW * total]
    rest = counted.total() - sum(n for _, n in large)
    shown = [*large, ("others", rest)] if rest else large
    return ", ".join(f"{name} {n / total:.0%}" for name, n in shown)
