"""What papers compare, as settings to run, and the directions in which they say figures differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

import msgspec

from eaglegbv.eval.compare import compare, side
from eaglegbv.eval.estimates import Estimate
from eaglegbv.eval.figures import BLOCK_EFFICIENCY
from eaglegbv.eval.records import Results, Setting

Axis: TypeAlias = Literal["paths", "depth"]

MORE = "at least"
AGREES, AGAINST, OPEN = "agrees", "against", "not told apart"


@dataclass(frozen=True, slots=True)
class Order:
    """A verifier's block efficiency is at least another's, in every cell both have.

    Attributes:
        better: The verifier that should commit as many tokens a forward or more.
        worse: The other; where it takes one path alone, its one-path setting stands in every cell.
        source: Who says so.
    """

    better: str
    worse: str
    source: str


@dataclass(frozen=True, slots=True)
class Rise:
    """A verifier's block efficiency does not fall along an axis, from its least to its most.

    Attributes:
        verifier: Which.
        axis: Along what.
        source: Who says so.
    """

    verifier: str
    axis: Axis
    source: str


@dataclass(frozen=True, slots=True)
class Paper:
    """The settings of a paper's comparison and what it says about them.

    Attributes:
        title: Paper and what is compared.
        verifiers: What is compared.
        paths: Numbers of paths.
        depths: Lengths of a path.
        temperatures: Sampling temperatures.
        orders: Verifiers by rank.
        rises: Trends.
    """

    title: str
    verifiers: tuple[str, ...]
    paths: tuple[int, ...]
    depths: tuple[int, ...]
    temperatures: tuple[float, ...]
    orders: tuple[Order, ...]
    rises: tuple[Rise, ...]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A direction a paper gives, and what was measured.

    Attributes:
        statement: The direction, with the cell it is about.
        source: Who says so.
        ratio: Block efficiency of the setting that should be higher over that of the other, with
            its paired interval; None where nothing can be compared.
    """

    statement: str
    source: str
    ratio: Estimate | None

    @property
    def verdict(self) -> str:
        """Whether the interval lies above equality, below it, or on both sides."""
        if self.ratio is None or self.ratio.low <= 1 <= self.ratio.high:
            return OPEN
        return AGREES if self.ratio.low > 1 else AGAINST


_BV = "Sun et al., arXiv 2403.10444"
_GBV = "Thomas & Pal, arXiv 2602.16961"
_OURS = "this package's claim for otbv"
_MULTI = ("block", "gbv", "specinfer", "spectr", "traversal", "otbv")
_GBV_ORDERS = (
    Order("gbv", "block", _GBV),
    *(Order("otbv", other, _OURS) for other in _MULTI if other != "otbv"),
)

PAPERS: Mapping[str, Paper] = MappingProxyType(
    {
        "bv": Paper(
            title=f"Block verification ({_BV}): token and block by draft length",
            verifiers=("token", "block"),
            paths=(1,),
            depths=(4, 6, 8),
            temperatures=(1.0,),
            orders=(Order("block", "token", _BV),),
            rises=(Rise("token", "depth", _BV), Rise("block", "depth", _BV)),
        ),
        "gbv-paths": Paper(
            title=f"Greedy multi-path block verification ({_GBV}): by number of paths",
            verifiers=_MULTI,
            paths=(1, 2, 3, 4),
            depths=(8,),
            temperatures=(1.0,),
            orders=_GBV_ORDERS,
            rises=(Rise("gbv", "paths", _GBV), Rise("otbv", "paths", _OURS)),
        ),
        "gbv-temperatures": Paper(
            title=f"Greedy multi-path block verification ({_GBV}): by temperature",
            verifiers=_MULTI,
            paths=(3,),
            depths=(8,),
            temperatures=(0.2, 0.4, 0.6, 0.8, 1.0),
            orders=_GBV_ORDERS,
            rises=(),
        ),
    }
)


def findings(paper: Paper, results: Results) -> list[Finding]:
    """Return every direction of a paper that a run can speak to, cell by cell.

    Raises:
        InvalidArgument: Two settings have no question in common that both answered to the end.
    """
    measured = {record.setting for record in results.records}
    settings = [s for s in results.settings.settings if s.name in measured]
    found: list[Finding] = []
    for order in paper.orders:
        for better in _of(settings, order.better):
            worse = _counterpart(settings, better, order.worse)
            if worse is not None:
                found.append(_finding(results, better, worse, order.source))
    for rise in paper.rises:
        found += _rises(results, settings, rise)
    return found


def table(found: Sequence[Finding]) -> list[list[str]]:
    """Return findings as rows, headings first."""
    rows = [["should be", "ratio", "measured"]]
    for one in found:
        interval = "-"
        if one.ratio is not None:
            interval = f"{one.ratio.value:.3f} [{one.ratio.low:.3f}, {one.ratio.high:.3f}]"
        rows.append([one.statement, interval, one.verdict])
    return rows


def _rises(results: Results, settings: Sequence[Setting], rise: Rise) -> list[Finding]:
    cells: dict[Setting, list[Setting]] = {}
    for setting in _of(settings, rise.verifier):
        cells.setdefault(_without(setting, rise.axis), []).append(setting)
    found = []
    for cell in cells.values():
        ordered = sorted(cell, key=lambda setting: _along(setting, rise.axis))
        if len(ordered) > 1:
            found.append(_finding(results, ordered[-1], ordered[0], rise.source))
    return found


def _finding(results: Results, better: Setting, worse: Setting, source: str) -> Finding:
    comparison = compare(side(results, worse.name), side(results, better.name))
    ratio = next(d.ratio for d in comparison.differences if d.figure == BLOCK_EFFICIENCY.name)
    return Finding(statement=f"{better.name} {MORE} {worse.name}", source=source, ratio=ratio)


def _of(settings: Sequence[Setting], verifier: str) -> list[Setting]:
    return [setting for setting in settings if setting.plan.verifier == verifier]


def _counterpart(settings: Sequence[Setting], setting: Setting, verifier: str) -> Setting | None:
    """Return the other verifier's setting of the same cell, or its only one along paths."""
    others = [
        other
        for other in _of(settings, verifier)
        if other.temperature == setting.temperature and other.plan.depth == setting.plan.depth
    ]
    same = [other for other in others if other.plan.paths == setting.plan.paths]
    alone = others if len(others) == 1 and others[0].plan.paths == 1 else []
    return next(iter(same or alone), None)


def _along(setting: Setting, axis: Axis) -> int:
    return setting.plan.paths if axis == "paths" else setting.plan.depth


def _without(setting: Setting, axis: Axis) -> Setting:
    plan = setting.plan
    alike = (
        msgspec.structs.replace(plan, paths=1)
        if axis == "paths"
        else msgspec.structs.replace(plan, depth=1)
    )
    return msgspec.structs.replace(setting, plan=alike)
