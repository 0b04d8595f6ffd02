"""Laws over a small vocabulary as tuples, in floating point or exact rationals."""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import TypeAlias

from eaglegbv.errors import InvalidProbabilities

Number: TypeAlias = float | Fraction
"""A probability or a weight; code using it is exact when every input is a ``Fraction``."""

Probs: TypeAlias = tuple[Number, ...]
"""A law (or weights) over the vocabulary: entry x belongs to token x."""

Prefix: TypeAlias = tuple[int, ...]
"""Tokens from below the root to a node; the root is ``()``."""

LawAt: TypeAlias = Callable[[Prefix], Probs]
"""The law of the next token after a prefix."""


def positive(x: Number) -> Number:
    """Return max(x, 0) without changing the kind of number."""
    return x if x > 0 else x - x


def magnitude(x: Number) -> Number:
    """Return |x|."""
    return x if x >= 0 else -x


def share(weight: Number, total: Number) -> Number:
    """Return weight / total, exactly 1 where they are equal."""
    return 1 if weight == total else weight / total


def normalised(weights: Iterable[Number]) -> Probs:
    """Return the law in proportion to ``weights``.

    Raises:
        InvalidProbabilities: No weight is positive.
    """
    weights = tuple(weights)
    total = sum(weights)
    if not total > 0:
        raise InvalidProbabilities("weights", weights, "a positive sum")
    return tuple(share(w, total) if w else w for w in weights)


def residual(scale: Number, p: Sequence[Number], b: Sequence[Number]) -> Probs:
    """Return the weights max(scale p - b, 0)."""
    return tuple(positive(scale * px - bx) for px, bx in zip(p, b, strict=True))


def residual_or_target(scale: Number, p: Probs, b: Sequence[Number]) -> Probs:
    """Return :func:`residual`, or ``p`` where the residual vanishes.

    A residual without mass is drawn from with probability zero; rounding can still lead there, and
    then only the target's own law is a harmless answer.
    """
    weights = residual(scale, p, b)
    return weights if sum(weights) > 0 else p


def support(law: Sequence[Number]) -> tuple[int, ...]:
    """Return the tokens of positive probability, ascending."""
    return tuple(x for x, mass in enumerate(law) if mass > 0)


def most_likely(law: Sequence[Number], count: int) -> tuple[int, ...]:
    """Return the ``count`` most likely tokens of the law's support, ties by token id."""
    return tuple(sorted(support(law), key=lambda x: (-law[x], x))[:count])
