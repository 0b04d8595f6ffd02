"""The best setting, and those that cannot be told apart from it, judged by intervals."""

from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from eaglegbv.eval.batches import speeds_by_cell
from eaglegbv.eval.estimates import Estimate, SideOfOne
from eaglegbv.eval.figures import Figure, whole
from eaglegbv.eval.records import Record, Results
from eaglegbv.eval.summary import paired_ratio
from eaglegbv.eval.timing import Cell, Timing


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


def over_plain(timings: Iterable[Timing]) -> dict[Cell, dict[str, Estimate]]:
    """Return each way's speed over plain decoding's in the same repeat, by cell.

    Values are medians over repeats; the ends are the lowest and the highest repeat.
    """
    found = {
        cell: {way: _spread(own.ratios) for way, own in ways.items() if own.ratios}
        for cell, ways in sorted(speeds_by_cell(timings).items(), key=lambda item: item[0])
    }
    return {cell: ways for cell, ways in found.items() if ways}


def _spread(repeats: Sequence[float]) -> Estimate:
    """Return the median of some repeats, with the lowest and the highest as its interval."""
    return Estimate(median(repeats), min(repeats), max(repeats))


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
