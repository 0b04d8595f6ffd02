"""Definitions of a benchmark's figures, each as the ratio of two sums over conversations."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from eaglegbv.eval.estimates import Estimate, bootstrap_ratio
from eaglegbv.eval.records import Record


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

FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        figure.name: figure
        for figure in (
            BLOCK_EFFICIENCY,
            ACCEPTANCE_LENGTH,
            TOKENS_PER_SECOND,
            WALL_TOKENS_PER_SECOND,
            SECONDS_PER_FORWARD,
        )
    }
)
