"""Which setting is best, and which cannot be told from it: by intervals, not by eye."""

from collections.abc import Iterable, Sequence

import msgspec

from eaglegbv.eval.batches import BASELINE, Timing, rate_of
from eaglegbv.eval.estimates import Estimate, SideOfOne
from eaglegbv.eval.figures import Figure, whole
from eaglegbv.eval.records import Record, Results
from eaglegbv.eval.summary import paired_ratio


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """What is best in one cell.

    Attributes:
        leader: The highest.
        value: Its figure.
        tied: Those whose interval does not lie below the leader, highest first.
        behind: The rest, highest first.
    """

    leader: str
    value: float
    tied: tuple[str, ...]
    behind: tuple[str, ...]

    @property
    def best(self) -> tuple[str, ...]:
        """The leader and what cannot be told from it."""
        return (self.leader, *self.tied)


def rank_settings(results: Results, figure: Figure) -> dict[float, Rank]:
    """Rank the settings of a run at each temperature by a figure.

    A setting is behind where the whole 95% interval of its ratio to the leader, paired by question,
    lies below 1.
    """
    by_setting: dict[str, list[Record]] = {}
    for record in whole(results.records):
        by_setting.setdefault(record.setting, []).append(record)
    ranks = {}
    for temperature in dict.fromkeys(s.temperature for s in results.settings.settings):
        here = {
            s.name: by_setting[s.name]
            for s in results.settings.settings
            if s.temperature == temperature and s.name in by_setting
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


class Cell(msgspec.Struct, frozen=True, order=True):
    """A load: temperature, tokens of each prompt (0: the questions as they are), prompts."""

    temperature: float
    context: int
    batch: int


def spread(rates: Sequence[float]) -> Estimate:
    """Return the median of some repeats between the least and the most."""
    ordered = sorted(rates)
    middle = len(ordered) // 2
    value = ordered[middle] if len(ordered) % 2 else sum(ordered[middle - 1 : middle + 1]) / 2
    return Estimate(value, ordered[0], ordered[-1])


def over_plain(timings: Iterable[Timing]) -> dict[Cell, dict[str, Estimate]]:
    """Return each way's speed over plain decoding's in the same repeat, by cell.

    Values are medians over repeats, ends the least and the most of them.
    """
    calls: dict[Cell, dict[str, dict[int, list[Timing]]]] = {}
    for t in timings:
        cell = calls.setdefault(Cell(t.temperature, t.context, t.batch), {})
        cell.setdefault(t.way, {}).setdefault(t.repeat, []).append(t)
    found: dict[Cell, dict[str, Estimate]] = {}
    for key, ways in sorted(calls.items(), key=lambda item: item[0]):
        rates = {way: {r: rate_of(ts) for r, ts in own.items()} for way, own in ways.items()}
        plain = rates.get(BASELINE, {})
        ratios = {
            way: [rate / plain[repeat] for repeat, rate in own.items() if repeat in plain]
            for way, own in rates.items()
        }
        found[key] = {way: spread(own) for way, own in ratios.items() if own}
    return {key: ways for key, ways in found.items() if ways}


def rank_ways(ways: dict[str, Estimate]) -> Rank:
    """Rank ways by their speed over plain decoding.

    A way is behind where even its best repeat is below the leader's worst.
    """
    leader, *others = sorted(ways, key=lambda way: -ways[way].value)
    return Rank(
        leader=leader,
        value=ways[leader].value,
        tied=tuple(way for way in others if ways[way].high >= ways[leader].low),
        behind=tuple(way for way in others if ways[way].high < ways[leader].low),
    )
