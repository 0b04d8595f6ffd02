"""Acceptance pooled over requests: how many drafted tokens a target forward accepts."""

from collections.abc import Iterable, Sequence
from typing import Self

import msgspec

from eaglegbv.request_metrics import RequestMetrics


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
