"""Tables for a terminal of tokens a second and of the plans chosen."""

from collections import Counter
from collections.abc import Sequence

from eaglegbv.eval.batches import Row
from eaglegbv.eval.ways import WatchedWay
from eaglegbv.metrics import FORWARDS, REASONS

FEW = 0.02
"""Plans with a smaller share than this are shown together."""


def rate_table(rows: Sequence[Row], *, lengths: bool = True) -> list[list[str]]:
    """Return table rows, headings first: one row for each way, one column for each batch size.

    Args:
        rows: Rows in the order of the table.
        lengths: Whether to state the lengths of the prompts, needed where they differ.
    """
    batches = sorted({row.batch for row in rows})
    lines: dict[tuple[float, int, str], dict[int, Row]] = {}
    for row in rows:
        lines.setdefault((row.temperature, row.context, row.way), {})[row.batch] = row

    def figure(row: Row | None) -> str:
        if row is None:
            return "-"
        ratio = "" if row.ratio is None else f" ({row.ratio:.2f})"
        return f"{row.rate:.0f}{ratio}"

    body = [
        [
            _label(temperature, context, way, lengths=lengths),
            *(figure(found.get(b)) for b in batches),
        ]
        for (temperature, context, way), found in lines.items()
    ]
    return [["tokens/s (of none)", *(f"batch {b}" for b in batches)], *body]


def _label(temperature: float, context: int, way: str, *, lengths: bool) -> str:
    """Return the heading of a row; a context of 0 means questions at their original lengths."""
    length = f" {context or 'own'} tokens," if lengths else ""
    return f"T={temperature:g},{length} {way}"


def choice_lines(way: WatchedWay) -> list[str]:
    """Return one line for each cell: the shares of the plans chosen, and of the reasons."""
    lengths = any(cell.context for cell in way.chosen)
    return [
        f"{_label(cell.temperature, cell.context, way.name, lengths=lengths)}, batch {cell.batch}: "
        f"{_shares(counted[FORWARDS])}; {_shares(counted[REASONS])}"
        for cell, counted in way.chosen.items()
    ]


def _shares(counted: Counter[str]) -> str:
    """Return names with their shares, the largest first and the small ones combined."""
    total = max(1, counted.total())
    large = [(name, n) for name, n in counted.most_common() if n >= FEW * total]
    rest = counted.total() - sum(n for _, n in large)
    shown = [*large, ("others", rest)] if rest else large
    return ", ".join(f"{name} {n / total:.0%}" for name, n in shown)
