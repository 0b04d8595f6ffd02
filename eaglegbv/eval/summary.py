"""Computation of a run's figures from its records."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from eaglegbv.eval.estimates import (
    Estimate,
    bootstrap,
    bootstrap_ratio_of_ratios,
)
from eaglegbv.eval.figures import (
    ACCEPTANCE_LENGTH,
    BLOCK_EFFICIENCY,
    TOKENS_PER_SECOND,
    WALL_TOKENS_PER_SECOND,
    Figure,
    Sums,
    whole,
)
from eaglegbv.eval.records import Record, Results, Setting
from eaglegbv.stopwatch import Phase

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
    by_setting: defaultdict[str, list[Record]] = defaultdict(list)
    for record in results.records:
        by_setting[record.setting].append(record)
    return [
        _summarise(setting, by_setting[setting.name], _plain(setting, results, by_setting))
        for setting in results.settings.settings
        if by_setting[setting.name]
    ]


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
        tokens_per_second=_rate(TOKENS_PER_SECOND, counted),
        wall_tokens_per_second=_rate(WALL_TOKENS_PER_SECOND, counted),
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


def _rate(figure: Figure, records: Sequence[Record]) -> Estimate:
    return _median_over_repeats(figure, records)


def _speedup(figure: Figure, records: Sequence[Record], plain: Sequence[Record]) -> Estimate | None:
    ours = {(r.repeat, r.question_id): r for r in whole(records)}
    theirs = {(r.repeat, r.question_id): r for r in whole(plain)}
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        return None
    return _median_over_repeats(
        figure, [ours[key] for key in shared], [theirs[key] for key in shared]
    )


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


def ratio_of_speedups(
    figure: Figure,
    records: Sequence[Record],
    plain: Sequence[Record],
    other_records: Sequence[Record],
    other_plain: Sequence[Record],
) -> Estimate:
    """Return one run's speed-up over another's, on the questions that all four answered.

    Within each run, how fast the machine was cancels out.
    """
    sums = [figure.by_question(r) for r in (records, plain, other_records, other_plain)]
    shared = sorted(set.intersection(*(set(one) for one in sums)))
    columns = [
        column
        for one in sums
        for column in ([one[q].above for q in shared], [one[q].below for q in shared])
    ]

    def ratio(totals: NDArray[np.float64]) -> NDArray[np.float64]:
        ours, base, theirs, their_base = (
            totals[2 * n] / np.maximum(totals[2 * n + 1], np.finfo(np.float64).tiny)
            for n in range(4)
        )
        return np.asarray(ours / base / (theirs / their_base))

    return bootstrap(columns, ratio)


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
