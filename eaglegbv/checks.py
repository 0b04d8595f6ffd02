"""Checks of a user's values: numbers within limits, or an error that states the limits."""

from collections.abc import Sequence
from math import isfinite

from eaglegbv.errors import InvalidArgument


def require_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise :class:`InvalidArgument` unless ``value`` is an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        inside = False
    else:
        inside = low <= value and (high is None or value <= high)
    if not inside:
        limits = f"of at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidArgument(name, value, f"an integer {limits}")


def require_number(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> None:
    """Raise :class:`InvalidArgument` unless ``value`` is a number in [low, high].

    Args:
        name: Name of the argument.
        value: Value of the argument.
        low: Lower limit, finite.
        high: Upper limit, finite.
        open_low: Whether ``low`` itself is refused too.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        inside = False
    else:
        # NaN is outside every range.
        inside = low <= value <= high and not (open_low and value == low)
    if not inside:
        bracket = "(" if open_low else "["
        raise InvalidArgument(name, value, f"a number in {bracket}{low:g}, {high:g}]")


def require_numbers(name: str, values: Sequence[float], *, count: int) -> None:
    """Raise :class:`InvalidArgument` unless there are ``count`` values, all finite."""
    if len(values) != count or not all(map(isfinite, values)):
        raise InvalidArgument(name, values, f"{count} finite numbers")
