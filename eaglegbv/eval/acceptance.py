"""Acceptance pooled over requests: how many drafted tokens a target forward accepts."""

from collections.abc import Iterable
from typing import Self

import msgspec

from eaglegbv.request_metrics import RequestMetrics


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of decoding forwards.

    Attributes:
        forwards: Decoding forwards of the target.
        by_depth: Entry d - 1: forwards that accepted d tokens or more.
    """

    forwards: int
    by_depth: tuple[int, ...]

    @classmethod
    def of(cls, metrics: Iterable[RequestMetrics], depth: int) -> Self:
        """Pool requests whose trees are at most ``depth`` deep."""
        known = list(metrics)
        counts = [[*m.accepted_by_depth, *[0] * (depth - len(m.accepted_by_depth))] for m in known]
        return cls(
            forwards=sum(m.target_forwards for m in known),
            by_depth=tuple(sum(column) for column in zip([0] * depth, *counts, strict=True)),
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
        """Share of the forwards that accepted d tokens or more; they add up to the length."""
        return tuple(count / max(1, self.forwards) for count in self.by_depth)
