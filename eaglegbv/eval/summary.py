"""From records to figures: the one place where a run's figures are computed."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from eaglegbv.eval.estimates import (
    Estimate,
    bootstrap_ratio,
    bootstrap_ratio_of_ratios,
    median_or_zero,
    ratio_of_sums,
)
from eaglegbv.eval.records import Record, Results, Setting
from eaglegbv.metrics import Phase

OTHER = "other"
"""Wall time outside the engine's phases: templates, (de)tokenisation, bookkeeping."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one setting.

    Attributes:
        setting: Name of the setting.
        conversations: Conversations measured to their end.
        errors: Conversations that broke off; they count in no figure.
        committed_tokens: Tokens committed by decoding forwards.
        target_forwards: Decoding forwards of the target.
        acceptance_length: Accepted tokens per target forward.
        block_efficiency: Committed tokens per target forward.
        acceptance_by_depth: Share of the forwards offering a node at each depth that accepted one.
        tokens_per_second: Committed tokens per second of decoding, prefill excluded; the median
            over repeats.
        wall_tokens_per_second: Tokens of the answers per second, prefill included; likewise.
        speedup: ``tokens_per_second`` over that of plain decoding on the same questions; the
            median over repeats with a bootstrap interval over questions. None without plain
            decoding in the run.
        wall_speedup: The same of ``wall_tokens_per_second``.
        milliseconds_by_phase: Per answer token; ``other`` is wall time outside the phases.
    """

    setting: str
    conversations: int
    errors: int
    committed_tokens: int
    target_forwards: int
    acceptance_length: float
    block_efficiency: Estimate
    acceptance_by_depth: list[float]
    tokens_per_second: float
    wall_tokens_per_second: float
    speedup: Estimate | None
    wall_speedup: Estimate | None
    milliseconds_by_phase: dict[str, float]


class _Pace(msgspec.Struct, frozen=True):
    """Tokens and seconds of one conversation."""

    tokens: int
    seconds: float


_Paces = Mapping[tuple[int, str], _Pace]
"""By repeat and question."""


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
    """Records of plain decoding at the setting's temperature."""
    for other in results.settings.settings:
        if not other.plan.speculative and other.temperature == setting.temperature:
            return by_setting.get(other.name, ())
    return ()


def _summarise(setting: Setting, records: Sequence[Record], plain: Sequence[Record]) -> Summary:
    whole = [record for record in records if record.error is None]
    metrics = [turn.metrics for record in whole for turn in record.turns]
    by_question = defaultdict(list)
    for record in whole:
        by_question[record.question_id].append(record)
    committed = [sum(_committed(r) for r in rs) for rs in by_question.values()]
    forwards = [sum(_forwards(r) for r in rs) for rs in by_question.values()]
    return Summary(
        setting=setting.name,
        conversations=len(whole),
        errors=len(records) - len(whole),
        committed_tokens=sum(committed),
        target_forwards=sum(forwards),
        acceptance_length=ratio_of_sums([m.accepted_tokens for m in metrics], forwards),
        block_efficiency=bootstrap_ratio(committed, forwards),
        acceptance_by_depth=_acceptance_by_depth(whole),
        tokens_per_second=_median_rate(_decode_paces(whole)),
        wall_tokens_per_second=_median_rate(_wall_paces(whole)),
        speedup=_speedup(_decode_paces(whole), _decode_paces(plain)),
        wall_speedup=_speedup(_wall_paces(whole), _wall_paces(plain)),
        milliseconds_by_phase=_milliseconds_by_phase(whole),
    )


def _committed(record: Record) -> int:
    return sum(turn.metrics.committed_tokens for turn in record.turns)


def _forwards(record: Record) -> int:
    return sum(turn.metrics.target_forwards for turn in record.turns)


def _acceptance_by_depth(records: Iterable[Record]) -> list[float]:
    offered: defaultdict[int, int] = defaultdict(int)
    accepted: defaultdict[int, int] = defaultdict(int)
    for record in records:
        for turn in record.turns:
            for depth, count in enumerate(turn.metrics.offered_by_depth):
                offered[depth] += count
                accepted[depth] += turn.metrics.accepted_by_depth[depth]
    return [accepted[depth] / offered[depth] for depth in sorted(offered) if offered[depth]]


def _decode_paces(records: Iterable[Record]) -> _Paces:
    return {
        (r.repeat, r.question_id): _Pace(_committed(r), sum(t.decode_seconds for t in r.turns))
        for r in records
        if r.error is None
    }


def _wall_paces(records: Iterable[Record]) -> _Paces:
    return {
        (r.repeat, r.question_id): _Pace(
            sum(t.completion_tokens for t in r.turns), sum(t.wall_seconds for t in r.turns)
        )
        for r in records
        if r.error is None
    }


def _by_repeat(paces: _Paces) -> dict[int, list[_Pace]]:
    groups: defaultdict[int, list[_Pace]] = defaultdict(list)
    for (repeat, _), pace in paces.items():
        groups[repeat].append(pace)
    return groups


def _rate(paces: Sequence[_Pace]) -> float:
    return ratio_of_sums([p.tokens for p in paces], [p.seconds for p in paces])


def _median_rate(paces: _Paces) -> float:
    return median_or_zero([_rate(group) for group in _by_repeat(paces).values()])


def _speedup(paces: _Paces, plain: _Paces) -> Estimate | None:
    shared = sorted(paces.keys() & plain.keys())
    if not shared:
        return None
    ours = {key: paces[key] for key in shared}
    theirs = {key: plain[key] for key in shared}
    base = {repeat: _rate(group) for repeat, group in _by_repeat(theirs).items()}
    ratios = [
        _rate(group) / base[repeat] for repeat, group in _by_repeat(ours).items() if base[repeat]
    ]
    pooled = bootstrap_ratio_of_ratios(*_pooled(ours), *_pooled(theirs))
    return Estimate(median_or_zero(ratios), pooled.low, pooled.high)


def _pooled(paces: _Paces) -> tuple[list[float], list[float]]:
    """Tokens and seconds by question, repeats added up."""
    tokens: defaultdict[str, float] = defaultdict(float)
    seconds: defaultdict[str, float] = defaultdict(float)
    for (_, question), pace in paces.items():
        tokens[question] += pace.tokens
        seconds[question] += pace.seconds
    return list(tokens.values()), list(seconds.values())


def _milliseconds_by_phase(records: Iterable[Record]) -> dict[str, float]:
    turns = [turn for record in records for turn in record.turns]
    tokens = sum(turn.completion_tokens for turn in turns)
    if not tokens:
        return {}
    seconds = {
        str(phase): sum(turn.metrics.seconds.get(phase, 0.0) for turn in turns) for phase in Phase
    }
    seconds[OTHER] = sum(turn.wall_seconds for turn in turns) - sum(seconds.values())
    return {phase: 1000 * value / tokens for phase, value in seconds.items()}
