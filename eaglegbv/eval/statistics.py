"""Estimates from a few noisy runs: medians, ratios of sums, and intervals for them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from statistics import median
from types import MappingProxyType
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from eaglegbv.eval.records import Record, Results, Setting
from eaglegbv.eval.throughput import Cell, Timing, speeds_by_cell
from eaglegbv.metrics import Phase, RequestMetrics

RESAMPLES = 2000
COVERAGE = 0.95


class SideOfOne(Enum):
    """Where the interval of a ratio lies relative to 1."""

    ABOVE = auto()
    BELOW = auto()
    OPEN = auto()
    """The interval contains 1: the two figures cannot be told apart."""


class Estimate(msgspec.Struct, frozen=True):
    """A figure with its 95% interval; the ends are equal if only one unit was measured."""

    value: float
    low: float
    high: float

    def side_of_one(self, slack: float = 0.0) -> SideOfOne:
        """Return on which side of 1 the whole interval lies.

        Args:
            slack: How far an end may be from 1 and still count as 1.
        """
        if self.low > 1 + slack:
            return SideOfOne.ABOVE
        return SideOfOne.BELOW if self.high < 1 - slack else SideOfOne.OPEN


def bootstrap_ratio(
    numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0
) -> Estimate:
    """Return sum(numerators) / sum(denominators) with its percentile bootstrap interval.

    Args:
        numerators: One entry for each unit (a question); units are resampled as a whole.
        denominators: One entry for each unit.
        seed: Seed of the resampling.
    """
    return bootstrap_ratio_of_ratios(
        numerators, denominators, [1.0] * len(numerators), [1.0] * len(numerators), seed=seed
    )


def bootstrap_ratio_of_ratios(
    numerators: Sequence[float],
    denominators: Sequence[float],
    base_numerators: Sequence[float],
    base_denominators: Sequence[float],
    *,
    seed: int = 0,
) -> Estimate:
    """Return (sum n / sum d) / (sum base n / sum base d), paired by unit, with its interval."""
    return bootstrap(
        [numerators, denominators, base_numerators, base_denominators], _double_ratio, seed=seed
    )


def bootstrap(
    columns: Sequence[Sequence[float]],
    figure: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    seed: int = 0,
) -> Estimate:
    """Return a figure of column sums with its percentile bootstrap interval.

    Args:
        columns: Columns with one entry for each unit; units are resampled as a whole, in all
            columns alike.
        figure: Maps sums ``[columns, ...]`` to values ``[...]``.
        seed: Seed of the resampling.
    """
    entries = np.array(columns, dtype=np.float64)
    units = entries.shape[1]
    if not units:
        return Estimate(0.0, 0.0, 0.0)
    draws = np.random.default_rng(seed).integers(units, size=(RESAMPLES, units))
    resampled = figure(entries[:, draws].sum(axis=2))
    low, high = np.quantile(resampled, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Estimate(float(figure(entries.sum(axis=1))), float(low), float(high))


def _double_ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    above: NDArray[np.float64] = np.asarray(sums[0] * sums[3])
    below: NDArray[np.float64] = np.asarray(sums[1] * sums[2])
    return np.where(below > 0, above / np.where(below > 0, below, 1.0), 0.0)


# Acceptance pooled over requests: how many drafted tokens a target forward accepts.


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of decoding forwards.

    Attributes:
        forwards: Decoding forwards of the target.
        by_depth: Entry d - 1 is the number of forwards that accepted at least d tokens.
    """

    forwards: int
    by_depth: tuple[int, ...]

    @classmethod
    def of(cls, metrics: Iterable[RequestMetrics], depth: int) -> Self:
        """Pool requests whose trees are at most ``depth`` deep."""
        return cls.pooled(
            [
                cls(
                    forwards=m.target_forwards,
                    by_depth=(*m.accepted_by_depth, *[0] * (depth - len(m.accepted_by_depth))),
                )
                for m in metrics
            ],
            depth,
        )

    @classmethod
    def pooled(cls, parts: "Sequence[Acceptance]", depth: int) -> Self:
        """Add up counts, each of ``depth`` entries."""
        columns = zip([0] * depth, *(part.by_depth for part in parts), strict=True)
        return cls(
            forwards=sum(part.forwards for part in parts),
            by_depth=tuple(sum(column) for column in columns),
        )

    @property
    def accepted(self) -> int:
        """Tokens accepted."""
        return sum(self.by_depth)

    @property
    def length(self) -> float:
        """Acceptance length: accepted tokens per forward."""
        return self.accepted / max(1, self.forwards)

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares of the forwards that accepted at least d tokens; their sum is the length."""
        return tuple(count / max(1, self.forwards) for count in self.by_depth)


# A benchmark's figures, each as the ratio of two sums over conversations.


@dataclass(frozen=True, slots=True)
class Sums:
    """Numerator and denominator of a figure."""

    above: float
    below: float

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.above + other.above, self.below + other.below)

    @property
    def ratio(self) -> float:
        """Value of the figure; 0 if nothing was counted."""
        return self.above / self.below if self.below else 0.0


@dataclass(frozen=True, slots=True)
class Figure:
    """A ratio of two sums over conversations.

    Attributes:
        name: Heading of its column.
        definition: What is divided by what, and whether prefill counts.
        above: Returns what a conversation adds to the numerator.
        below: Returns what a conversation adds to the denominator.
    """

    name: str
    definition: str
    above: Callable[[Record], float]
    below: Callable[[Record], float]

    def of(self, record: Record) -> Sums:
        """Return the sums of one conversation."""
        return Sums(self.above(record), self.below(record))

    def by_question(self, records: Iterable[Record]) -> dict[str, Sums]:
        """Return the sums of each question over its repeats, without broken conversations."""
        sums: defaultdict[str, Sums] = defaultdict(lambda: Sums(0.0, 0.0))
        for record in whole(records):
            sums[record.question_id] += self.of(record)
        return dict(sums)

    def pooled(self, records: Iterable[Record]) -> Estimate:
        """Return the figure with its bootstrap interval over questions."""
        sums = list(self.by_question(records).values())
        return bootstrap_ratio([s.above for s in sums], [s.below for s in sums])


def whole(records: Iterable[Record]) -> list[Record]:
    """Return the conversations that did not break off; the others do not count."""
    return [record for record in records if record.error is None]


def _committed(record: Record) -> float:
    return sum(turn.metrics.committed_tokens for turn in record.turns)


def _forwards(record: Record) -> float:
    return sum(turn.metrics.target_forwards for turn in record.turns)


def _decode_seconds(record: Record) -> float:
    return sum(turn.decode_seconds for turn in record.turns)


BLOCK_EFFICIENCY = Figure(
    "block efficiency",
    "tokens committed by decoding forwards per decoding forward of the target; "
    "prefill and the token it brings are not counted",
    _committed,
    _forwards,
)
ACCEPTANCE_LENGTH = Figure(
    "acceptance length",
    "drafted tokens accepted per decoding forward of the target; prefill is not counted",
    lambda record: sum(turn.metrics.accepted_tokens for turn in record.turns),
    _forwards,
)
TOKENS_PER_SECOND = Figure(
    "tokens/s",
    "tokens committed by decoding forwards per second of wall time less prefill: "
    "prefill is not counted, neither its time nor the token it brings",
    _committed,
    _decode_seconds,
)
WALL_TOKENS_PER_SECOND = Figure(
    "tokens/s with prefill",
    "all tokens of the answers per second of all wall time: prefill, chat template and "
    "(de)tokenisation are counted",
    lambda record: sum(turn.completion_tokens for turn in record.turns),
    lambda record: sum(turn.wall_seconds for turn in record.turns),
)
SECONDS_PER_FORWARD = Figure(
    "ms/forward",
    "milliseconds of wall time less prefill per decoding forward; prefill is not counted",
    lambda record: 1000 * _decode_seconds(record),
    _forwards,
)

_ALL = (
    *(BLOCK_EFFICIENCY, ACCEPTANCE_LENGTH),
    *(TOKENS_PER_SECOND, WALL_TOKENS_PER_SECOND, SECONDS_PER_FORWARD),
)
FIGURES: Mapping[str, Figure] = MappingProxyType({figure.name: figure for figure in _ALL})


# The figures of a run, from its records.


OTHER = "other"
"""Phase of wall time outside the engine's phases: templates, (de)tokenisation, bookkeeping."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one setting.

    Attributes:
        setting: Name of the setting.
        conversations: Number of conversations measured to their end.
        errors: Number of conversations that broke off; they count in no figure.
        committed_tokens: Tokens committed by decoding forwards.
        target_forwards: Decoding forwards of the target.
        acceptance_length: Accepted tokens per target forward.
        block_efficiency: Committed tokens per target forward.
        acceptance_by_depth: Share of the forwards offering a node at each depth that accepted one.
        tokens_per_second: Committed tokens per second of decoding, prefill excluded; the median
            over repeats with a bootstrap interval over questions.
        wall_tokens_per_second: Tokens of the answers per second, prefill included, with the same
            median and interval.
        speedup: ``tokens_per_second`` over that of plain decoding on the same questions; the
            median over repeats with a bootstrap interval over questions. None without plain
            decoding in the run.
        wall_speedup: The same ratio for ``wall_tokens_per_second``.
        milliseconds_by_phase: Milliseconds per answer token in each known phase; ``other`` is wall
            time outside them.
    """

    setting: str
    conversations: int
    errors: int
    committed_tokens: int
    target_forwards: int
    acceptance_length: float
    block_efficiency: Estimate
    acceptance_by_depth: list[float]
    tokens_per_second: Estimate
    wall_tokens_per_second: Estimate
    speedup: Estimate | None
    wall_speedup: Estimate | None
    milliseconds_by_phase: dict[str, float]


def summarise(results: Results) -> list[Summary]:
    """Return the figures of every setting with a record, in the run's order."""
    by_setting = _by_setting(results)
    return [
        _summarise(setting, by_setting[setting.name], _plain(setting, results, by_setting))
        for setting in results.settings.settings
        if setting.name in by_setting
    ]


def _by_setting(results: Results) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in results.records:
        found.setdefault(record.setting, []).append(record)
    return found


def _plain(
    setting: Setting, results: Results, by_setting: Mapping[str, Sequence[Record]]
) -> Sequence[Record]:
    """Return the records of plain decoding at the setting's temperature."""
    for other in results.settings.settings:
        if other.plain and other.temperature == setting.temperature:
            return by_setting.get(other.name, ())
    return ()


def _summarise(setting: Setting, records: Sequence[Record], plain: Sequence[Record]) -> Summary:
    counted = whole(records)
    metrics = [turn.metrics for record in counted for turn in record.turns]
    accepted = ACCEPTANCE_LENGTH.by_question(counted).values()
    return Summary(
        setting=setting.name,
        conversations=len(counted),
        errors=len(records) - len(counted),
        committed_tokens=sum(m.committed_tokens for m in metrics),
        target_forwards=sum(m.target_forwards for m in metrics),
        acceptance_length=sum(accepted, start=Sums(0.0, 0.0)).ratio,
        block_efficiency=BLOCK_EFFICIENCY.pooled(counted),
        acceptance_by_depth=_acceptance_by_depth(counted),
        tokens_per_second=_median_over_repeats(TOKENS_PER_SECOND, counted),
        wall_tokens_per_second=_median_over_repeats(WALL_TOKENS_PER_SECOND, counted),
        speedup=_speedup(TOKENS_PER_SECOND, counted, plain),
        wall_speedup=_speedup(WALL_TOKENS_PER_SECOND, counted, plain),
        milliseconds_by_phase=_milliseconds_by_phase(counted),
    )


def _acceptance_by_depth(records: Iterable[Record]) -> list[float]:
    offered: defaultdict[int, int] = defaultdict(int)
    accepted: defaultdict[int, int] = defaultdict(int)
    for record in records:
        for turn in record.turns:
            for depth, count in enumerate(turn.metrics.offered_by_depth):
                offered[depth] += count
                accepted[depth] += turn.metrics.accepted_by_depth[depth]
    return [accepted[depth] / offered[depth] for depth in sorted(offered) if offered[depth]]


def _speedup(figure: Figure, records: Sequence[Record], plain: Sequence[Record]) -> Estimate | None:
    ours, theirs = ({(r.repeat, r.question_id): r for r in whole(own)} for own in (records, plain))
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        return None
    return _median_over_repeats(figure, *([own[key] for key in shared] for own in (ours, theirs)))


def _median_over_repeats(figure: Figure, *records: Sequence[Record]) -> Estimate:
    """Return the median over repeats of a figure, of records or of some over others.

    The bootstrap resamples questions and computes the same median. So the value lies within its
    interval, which a median need not do with the interval of pooled repeats.
    """
    questions = sorted({r.question_id for own in records for r in own})
    repeats = sorted({r.repeat for own in records for r in own})
    columns: list[list[float]] = []
    for repeat in repeats:
        for own in records:
            sums = figure.by_question(r for r in own if r.repeat == repeat)
            here = [sums.get(question, Sums(0.0, 0.0)) for question in questions]
            columns += [[s.above for s in here], [s.below for s in here]]
    if not columns:
        return Estimate(0.0, 0.0, 0.0)

    def median(totals: NDArray[np.float64]) -> NDArray[np.float64]:
        pairs = totals.reshape(len(repeats), len(records), 2, *totals.shape[1:])
        below = np.where(pairs[:, :, 1] > 0, pairs[:, :, 1], np.nan)
        ratios = pairs[:, :, 0] / below
        if len(records) > 1:
            ratios[:, 0] /= np.where(ratios[:, 1] > 0, ratios[:, 1], np.nan)
        return _median_of_known(ratios[:, 0])

    return bootstrap(columns, median)


def _median_of_known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median over the first axis without NaN; 0 if all are NaN."""
    some = ~np.isnan(values).all(axis=0)
    medians = np.zeros(values.shape[1:])
    medians[some] = np.nanmedian(values[:, some], axis=0)
    return medians


def paired_ratio(figure: Figure, records: Sequence[Record], base: Sequence[Record]) -> Estimate:
    """Return a figure over that of ``base`` on the questions both answered, repeats pooled."""
    ours, theirs = figure.by_question(records), figure.by_question(base)
    shared = sorted(ours.keys() & theirs.keys())
    return bootstrap_ratio_of_ratios(
        [ours[question].above for question in shared],
        [ours[question].below for question in shared],
        [theirs[question].above for question in shared],
        [theirs[question].below for question in shared],
    )


def _milliseconds_by_phase(records: Iterable[Record]) -> dict[str, float]:
    turns = [turn for record in records for turn in record.turns]
    tokens = sum(turn.completion_tokens for turn in turns)
    if not tokens:
        return {}
    told = {phase for turn in turns for phase in turn.metrics.seconds}
    seconds = {
        str(phase): sum(turn.metrics.seconds.get(phase, 0.0) for turn in turns)
        for phase in Phase
        if phase in told
    }
    seconds[OTHER] = sum(turn.wall_seconds for turn in turns) - sum(seconds.values())
    return {phase: 1000 * value / tokens for phase, value in seconds.items()}


# The best setting, and those that cannot be told apart from it, judged by intervals.


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """Ranking within one cell.

    Attributes:
        leader: The one with the highest figure.
        value: The leader's figure.
        tied: Those whose interval does not lie below the leader, highest first.
        behind: The others, highest first.
    """

    leader: str
    value: float
    tied: tuple[str, ...]
    behind: tuple[str, ...]

    @property
    def best(self) -> tuple[str, ...]:
        """The leader, and those that cannot be told apart from it."""
        return (self.leader, *self.tied)


def rank_settings(results: Results, figure: Figure) -> dict[float, Rank]:
    """Rank the settings of a run at each temperature by a figure.

    A setting is behind if the whole 95% interval of its ratio to the leader, paired by question,
    lies below 1.
    """
    by_setting = _by_setting(results)
    ranks = {}
    for temperature in dict.fromkeys(s.temperature for s in results.settings.settings):
        here = {
            s.name: own
            for s in results.settings.settings
            if s.temperature == temperature and (own := whole(by_setting.get(s.name, ())))
        }
        if here:
            ranks[temperature] = _rank(here, figure)
    return ranks


def _rank(records: dict[str, list[Record]], figure: Figure) -> Rank:
    values = {name: figure.pooled(own).value for name, own in records.items()}
    leader, *others = sorted(values, key=lambda name: -values[name])
    sides = {n: paired_ratio(figure, records[n], records[leader]).side_of_one() for n in others}
    return Rank(
        leader=leader,
        value=values[leader],
        tied=tuple(name for name in others if sides[name] is not SideOfOne.BELOW),
        behind=tuple(name for name in others if sides[name] is SideOfOne.BELOW),
    )


def over_plain(timings: Iterable[Timing]) -> dict[Cell, dict[str, Estimate]]:
    """Return each way's speed over plain decoding's in the same repeat, by cell.

    Values are medians over repeats; the ends are the lowest and the highest repeat.
    """
    found = {
        cell: {
            way: Estimate(median(own.ratios), min(own.ratios), max(own.ratios))
            for way, own in ways.items()
            if own.ratios
        }
        for cell, ways in sorted(speeds_by_cell(timings).items(), key=lambda item: item[0])
    }
    return {cell: ways for cell, ways in found.items() if ways}


def rank_ways(ways: dict[str, Estimate]) -> Rank:
    """Rank ways by their speed over plain decoding.

    A way is behind if even its best repeat is below the leader's worst.
    """
    leader, *others = sorted(ways, key=lambda way: -ways[way].value)
    return Rank(
        leader=leader,
        value=ways[leader].value,
        tied=tuple(way for way in others if ways[way].high >= ways[leader].low),
        behind=tuple(way for way in others if ways[way].high < ways[leader].low),
    )
