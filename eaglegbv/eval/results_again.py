"""The section of a second run: which figures of the first it reproduces."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from eaglegbv.eval.compare import compare_runs
from eaglegbv.eval.estimates import Estimate, SideOfOne
from eaglegbv.eval.figures import BLOCK_EFFICIENCY, TOKENS_PER_SECOND, whole
from eaglegbv.eval.records import Record, Results, Setting
from eaglegbv.eval.report import markdown_table, with_interval
from eaglegbv.eval.results_sections import Section, where
from eaglegbv.eval.summary import paired_ratio, ratio_of_speedups

SPEEDUP = "speed-up"


def again_section(first: Results, second: Results) -> Section:
    """Return the section of the second of two runs with the same settings."""
    rows = [["setting", "figure", "first", "second", "second / first", "reproduced"]]
    counts: Counter[str] = Counter()
    settings: Counter[str] = Counter()
    for one in _reproductions(first, second):
        same = one.ratio.side_of_one() is SideOfOne.OPEN
        settings[one.figure] += 1
        counts[one.figure] += same
        rows.append(
            [
                *(one.setting, one.figure, f"{one.first:.3f}", f"{one.second:.3f}"),
                *(with_interval(one.ratio, 3), "yes" if same else "no"),
            ]
        )
    said = ", ".join(f"{name} in {counts[name]} of {settings[name]}" for name in settings)
    seeds = f"seeds {first.settings.seed} and {second.settings.seed}"
    return Section(
        f"{second.settings.suite}: a second run",
        (
            f"The same settings with {seeds}. A figure counts as reproduced where the 95% paired "
            f"interval of the second run's ratio to the first holds 1; of all settings: {said}. "
            "That the machine was faster or slower during one of them is in no interval; it shows "
            "in tokens/s, and cancels in the speed-up over plain decoding.",
            where(second.environment),
            markdown_table(rows),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Reproduction:
    """A figure of one setting in two runs, and the second's ratio to the first."""

    setting: str
    figure: str
    first: float
    second: float
    ratio: Estimate


def _reproductions(first: Results, second: Results) -> Iterator[_Reproduction]:
    for comparison in compare_runs(first, second):
        for one in comparison.differences:
            if one.figure in (BLOCK_EFFICIENCY.name, TOKENS_PER_SECOND.name) and one.ratio:
                yield _Reproduction(comparison.a, one.figure, one.a, one.b, one.ratio)
        setting = next(s for s in first.settings.settings if s.name == comparison.a)
        if not setting.plain:
            yield from _speedups(setting, first, second)


def _speedups(setting: Setting, first: Results, second: Results) -> Iterator[_Reproduction]:
    plain = [
        s.name for s in first.settings.settings if s.plain and s.temperature == setting.temperature
    ]
    own = [[_of(run, name) for name in (setting.name, *plain)] for run in (second, first)]
    if plain and all(all(records) for records in own):
        (ours, base), (earlier, earlier_base) = own
        yield _Reproduction(
            setting.name,
            SPEEDUP,
            paired_ratio(TOKENS_PER_SECOND, earlier, earlier_base).value,
            paired_ratio(TOKENS_PER_SECOND, ours, base).value,
            ratio_of_speedups(TOKENS_PER_SECOND, ours, base, earlier, earlier_base),
        )


def _of(results: Results, setting: str) -> list[Record]:
    return [record for record in whole(results.records) if record.setting == setting]
