"""What comes of measuring a paper's comparison: tables, and directions in which figures differ."""

from collections.abc import Sequence

import msgspec

from eaglegbv.eval.records import Environment
from eaglegbv.eval.report import with_interval
from eaglegbv.eval.statistics import Estimate

AGREES, AGAINST, OPEN = "agrees", "against", "not told apart"
SAME = 1e-6  # ratios nearer to 1 are rounding, and those of solvers to their tolerance


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A direction a paper gives, and what was measured."""

    statement: str  # the direction, with the cell it is about
    source: str  # who says so
    # The figure that should be higher over the other, with its paired interval; None where nothing
    # can be compared.
    ratio: Estimate | None

    @property
    def verdict(self) -> str:
        """Whether the interval lies above equality, below it, or on both sides."""
        return OPEN if self.ratio is None else self.ratio.told(AGREES, AGAINST, OPEN, SAME)


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table as it is printed."""

    title: str  # what it shows
    rows: list[list[str]]  # headings first, rows of one width
    notes: tuple[str, ...] = ()  # what a reader has to know


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What came of measuring a paper's comparison."""

    tables: tuple[Table, ...]  # our tables, the paper's figures beside ours where they are known
    findings: tuple[Finding, ...] = ()  # the directions, tested
    notes: tuple[str, ...] = ()  # what a reader has to know

    @property
    def exceptions(self) -> tuple[Finding, ...]:
        """The directions that are contradicted."""
        return tuple(one for one in self.findings if one.verdict == AGAINST)


class PaperResults(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison with a paper, as ``report.json`` has it."""

    report: Report  # what came of it
    title: str = ""  # the paper and what is compared
    environment: Environment | None = None  # where and when it was measured, if that is known


def findings_table(found: Sequence[Finding]) -> list[list[str]]:
    """Return findings as rows, headings first."""
    rows = [["should be", "ratio", "measured"]]
    for one in found:
        ratio = "-" if one.ratio is None else with_interval(one.ratio, 3)
        rows.append([one.statement, ratio, one.verdict])
    return rows
