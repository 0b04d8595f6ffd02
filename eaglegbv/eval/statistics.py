"""Estimates from a few noisy runs: medians, ratios of sums, and intervals for them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from eaglegbv.config import Plan
from eaglegbv.eval.records import Record, Results, Setting, Turn
from eaglegbv.metrics import Phase, RequestMetrics
from eaglegbv.utils import grouped

RESAMPLES = 2000
COVERAGE = 0.95


class Estimate(msgspec.Struct, frozen=True):
    """A figure with its 95% interval; the ends are equal if only one unit was measured."""

    value: float
    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Self:
        """Return a figure without noise."""
        return cls(value, value, value)

    def told(self, above: str, below: str, neither: str, slack: float = 0.0) -> str:
        """Return the word for an interval above 1, below it, or around it: not told apart from it.

        An end may be so far from 1 as ``slack`` and still count as 1.
        """
        if self.low > 1 + slack:
            return above
        return below if self.high < 1 - slack else neither


def bootstrap_ratio(
    above: Sequence[float], below: Sequence[float], *base: Sequence[float], seed: int = 0
) -> Estimate:
    """Return sum(above) / sum(below), or its ratio to that of ``base``, with its interval.

    All have one entry for each unit (a question), and units are resampled as a whole, by ``seed``;
    ``base`` is nothing, or other numerators and denominators to compare with.
    """
    ones = [1.0] * len(above)
    return bootstrap([above, below, *(base or (ones, ones))], _double_ratio, seed=seed)


def bootstrap(
    columns: Sequence[Sequence[float]],
    figure: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    seed: int = 0,
) -> Estimate:
    """Return a figure of column sums with its percentile bootstrap interval.

    Columns have one entry for each unit; ``figure`` maps sums ``[columns, ...]`` to ``[...]``.
    """
    entries = np.array(columns, dtype=np.float64)
    units = entries.shape[1]
    if not units:
        return Estimate.exactly(0.0)
    draws = np.random.default_rng(seed).integers(units, size=(RESAMPLES, units))
    resampled = figure(entries[:, draws].sum(axis=2))
    low, high = np.quantile(resampled, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Estimate(float(figure(entries.sum(axis=1))), float(low), float(high))


def _double_ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    below = np.asarray(sums[1] * sums[2])
    above = np.asarray(sums[0] * sums[3])
    return np.asarray(np.divide(above, below, out=np.zeros_like(below), where=below > 0))


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """How many drafted tokens target forwards accept, pooled over requests."""

    forwards: int  # decoding forwards of the target
    # Entry d - 1 is the number of forwards that accepted at least d tokens.
    by_depth: tuple[int, ...]

    @classmethod
    def of(cls, metrics: Sequence[RequestMetrics], depth: int) -> Self:
        """Pool requests whose trees are at most ``depth`` deep."""
        accepted = added([0] * depth, *(m.accepted_by_depth for m in metrics))
        return cls(forwards=sum(m.target_forwards for m in metrics), by_depth=tuple(accepted))

    @property
    def length(self) -> float:
        """Acceptance length: accepted tokens per forward."""
        return sum(self.by_depth) / max(1, self.forwards)

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares of the forwards that accepted at least d tokens; their sum is the length."""
        return tuple(count / max(1, self.forwards) for count in self.by_depth)


def added(*counts: Sequence[int]) -> list[int]:
    """Return the sum of lists entry by entry; the shorter ones count as 0 beyond their ends."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


# A benchmark's figures, each as the ratio of two sums over conversations.


@dataclass(frozen=True, slots=True)
class Figure:
    """A ratio of two sums over the answers of conversations that did not break off.

    Its definition says what is divided by what, and whether prefill counts.
    """

    name: str
    definition: str
    above: Callable[[Turn], float]
    below: Callable[[Turn], float]

    def of(self, records: Iterable[Record]) -> float:
        """Return the figure; 0 if nothing was counted."""
        above, below = map(sum, self.columns(records))
        return above / below if below else 0.0

    def columns(
        self, records: Iterable[Record], questions: Iterable[str] | None = None
    ) -> tuple[list[float], list[float]]:
        """Return the numerators and denominators of questions (all by default) over repeats."""
        held = grouped(whole(records), lambda record: record.question_id)
        asked = held if questions is None else questions
        turns = [[turn for record in held.get(q, ()) for turn in record.turns] for q in asked]
        return [sum(map(self.above, t)) for t in turns], [sum(map(self.below, t)) for t in turns]

    def pooled(self, records: Iterable[Record]) -> Estimate:
        """Return the figure with its bootstrap interval over questions."""
        return bootstrap_ratio(*self.columns(records))


def whole(records: Iterable[Record]) -> list[Record]:
    """Return the conversations that did not break off; the others do not count."""
    return [record for record in records if record.error is None]


BLOCK_EFFICIENCY = Figure(
    "block efficiency",
    "tokens committed by decoding forwards per decoding forward of the target; "
    "prefill and the token it brings are not counted",
    lambda turn: turn.metrics.committed_tokens,
    lambda turn: turn.metrics.target_forwards,
)
ACCEPTANCE_LENGTH = Figure(
    "acceptance length",
    "drafted tokens accepted per decoding forward of the target; prefill is not counted",
    lambda turn: turn.metrics.accepted_tokens,
    lambda turn: turn.metrics.target_forwards,
)
TOKENS_PER_SECOND = Figure(
    "tokens/s",
    "tokens committed by decoding forwards per second of wall time less prefill: "
    "prefill is not counted, neither its time nor the token it brings",
    lambda turn: turn.metrics.committed_tokens,
    lambda turn: turn.decode_seconds,
)
WALL_TOKENS_PER_SECOND = Figure(
    "tokens/s with prefill",
    "all tokens of the answers per second of all wall time: prefill, chat template and "
    "(de)tokenisation are counted",
    lambda turn: turn.completion_tokens,
    lambda turn: turn.wall_seconds,
)
SECONDS_PER_FORWARD = Figure(
    "ms/forward",
    "milliseconds of wall time less prefill per decoding forward; prefill is not counted",
    lambda turn: 1000 * turn.decode_seconds,
    lambda turn: turn.metrics.target_forwards,
)
FIGURES: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (
        *(BLOCK_EFFICIENCY, ACCEPTANCE_LENGTH),
        *(TOKENS_PER_SECOND, WALL_TOKENS_PER_SECOND, SECONDS_PER_FORWARD),
    )
}


# The figures of a run, from its records.


OTHER = "other"
"""Phase of wall time outside the engine's phases: templates, (de)tokenisation, bookkeeping."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one setting, as :data:`FIGURES` defines them.

    Speeds are medians over repeats; intervals are bootstrap intervals over questions.
    """

    setting: str
    plan: Plan
    temperature: float
    conversations: int  # number of conversations measured to their end
    errors: int  # number of conversations that broke off; they count in no figure
    committed_tokens: int
    target_forwards: int
    acceptance_length: float
    block_efficiency: Estimate
    # Share of the forwards offering a node at each depth that accepted one.
    acceptance_by_depth: list[float]
    tokens_per_second: Estimate
    wall_tokens_per_second: Estimate
    # `tokens_per_second` over that of plain decoding on the same questions; None without plain
    # decoding in the run.
    speedup: Estimate | None
    wall_speedup: Estimate | None  # the same ratio for `wall_tokens_per_second`
    # Milliseconds per answer token in each known phase; `other` is wall time outside them.
    milliseconds_by_phase: dict[str, float]


def summarise(results: Results) -> list[Summary]:
    """Return the figures of every setting with a record, in the run's order."""
    by_setting = grouped(results.records, lambda record: record.setting)
    # What others are compared with: plain decoding at the same temperature.
    plain = {
        s.temperature: by_setting.get(s.name, []) for s in results.settings.settings if s.plain
    }
    return [
        _summarise(setting, by_setting[setting.name], plain.get(setting.temperature, []))
        for setting in results.settings.settings
        if setting.name in by_setting
    ]


def _summarise(setting: Setting, records: Sequence[Record], plain: Sequence[Record]) -> Summary:
    counted = whole(records)
    turns = [turn for record in counted for turn in record.turns]
    metrics = [turn.metrics for turn in turns]
    return Summary(
        setting=setting.name,
        plan=setting.plan,
        temperature=setting.temperature,
        conversations=len(counted),
        errors=len(records) - len(counted),
        committed_tokens=sum(m.committed_tokens for m in metrics),
        target_forwards=sum(m.target_forwards for m in metrics),
        acceptance_length=ACCEPTANCE_LENGTH.of(counted),
        block_efficiency=BLOCK_EFFICIENCY.pooled(counted),
        acceptance_by_depth=_acceptance_by_depth(metrics),
        tokens_per_second=_median_over_repeats(TOKENS_PER_SECOND, counted),
        wall_tokens_per_second=_median_over_repeats(WALL_TOKENS_PER_SECOND, counted),
        speedup=_speedup(TOKENS_PER_SECOND, counted, plain),
        wall_speedup=_speedup(WALL_TOKENS_PER_SECOND, counted, plain),
        milliseconds_by_phase=_milliseconds_by_phase(turns),
    )


def _acceptance_by_depth(metrics: Sequence[RequestMetrics]) -> list[float]:
    offered = added(*(m.offered_by_depth for m in metrics))
    accepted = added(*(m.accepted_by_depth for m in metrics))
    return [a / o for a, o in zip(accepted, offered, strict=True) if o]


def _speedup(figure: Figure, records: Sequence[Record], plain: Sequence[Record]) -> Estimate | None:
    both = [{(r.repeat, r.question_id): r for r in whole(side)} for side in (records, plain)]
    shared = sorted(both[0].keys() & both[1].keys())
    paired = ([side[key] for key in shared] for side in both)
    return _median_over_repeats(figure, *paired) if shared else None


def _median_over_repeats(figure: Figure, *records: Sequence[Record]) -> Estimate:
    """Return the median over repeats of a figure, of records or of some over others.

    The bootstrap resamples questions and computes the same median. So the value lies within its
    interval, which a median need not do with the interval of pooled repeats.
    """
    questions = sorted({r.question_id for side in records for r in side})
    repeats = sorted({r.repeat for side in records for r in side})
    columns = [
        column
        for repeat in repeats
        for side in records
        for column in figure.columns([r for r in side if r.repeat == repeat], questions)
    ]
    if not columns:
        return Estimate.exactly(0.0)

    def median(totals: NDArray[np.float64]) -> NDArray[np.float64]:
        pairs = totals.reshape(len(repeats), len(records), 2, *totals.shape[1:])
        below = np.where(pairs[:, :, 1] > 0, pairs[:, :, 1], np.nan)
        ratios = pairs[:, :, 0] / below
        if len(records) > 1:
            ratios[:, 0] /= np.where(ratios[:, 1] > 0, ratios[:, 1], np.nan)
        unknown = np.isnan(ratios[:, 0])
        return np.asarray(np.nanmedian(np.where(unknown.all(axis=0), 0.0, ratios[:, 0]), axis=0))

    return bootstrap(columns, median)


def paired_ratio(figure: Figure, records: Sequence[Record], base: Sequence[Record]) -> Estimate:
    """Return a figure over that of ``base`` on the questions both answered, repeats pooled."""
    asked, asked_of_base = ({r.question_id for r in whole(side)} for side in (records, base))
    shared = sorted(asked & asked_of_base)
    return bootstrap_ratio(*figure.columns(records, shared), *figure.columns(base, shared))


def _milliseconds_by_phase(turns: Sequence[Turn]) -> dict[str, float]:
    tokens = sum(turn.completion_tokens for turn in turns)
    if not tokens:
        return {}
    timed = {phase for turn in turns for phase in turn.metrics.seconds}
    milliseconds = {
        str(phase): sum(1000 * turn.metrics.seconds.get(phase, 0.0) for turn in turns) / tokens
        for phase in Phase
        if phase in timed
    }
    wall = sum(1000 * turn.wall_seconds for turn in turns) / tokens
    return {**milliseconds, OTHER: wall - sum(milliseconds.values())}


# The best setting, and those that cannot be told apart from it, judged by intervals.


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """Ranking within one cell: who leads with which figure, and the others, highest first.

    Those that are tied cannot be told apart from the leader.
    """

    leader: str
    value: float
    tied: tuple[str, ...]
    behind: tuple[str, ...]


def rank_settings(results: Results, figure: Figure) -> dict[float, Rank]:
    """Rank the settings of a run at each temperature by a figure.

    A setting is behind if the whole 95% interval of its ratio to the leader, paired by question,
    lies below 1.
    """
    by_setting = grouped(whole(results.records), lambda record: record.setting)
    measured = [s for s in results.settings.settings if s.name in by_setting]
    return {
        temperature: _rank({s.name: by_setting[s.name] for s in settings}, figure)
        for temperature, settings in grouped(measured, lambda s: s.temperature).items()
    }


def _rank(records: dict[str, list[Record]], figure: Figure) -> Rank:
    def is_behind(name: str, leader: str) -> bool:
        return paired_ratio(figure, records[name], records[leader]).high < 1

    return _ranked({name: figure.of(held) for name, held in records.items()}, is_behind)


def _ranked(values: Mapping[str, float], is_behind: Callable[[str, str], bool]) -> Rank:
    leader, *others = sorted(values, key=lambda name: -values[name])
    behind = tuple(name for name in others if is_behind(name, leader))
    tied = tuple(name for name in others if name not in behind)
    return Rank(leader=leader, value=values[leader], tied=tied, behind=behind)


def rank_ways(ways: Mapping[str, Estimate]) -> Rank:
    """Rank ways by their speed over plain decoding.

    A way is behind if even its best repeat is below the leader's worst.
    """
    values = {way: speed.value for way, speed in ways.items()}
    return _ranked(values, lambda way, leader: ways[way].high < ways[leader].low)
