"""Errors that a user may meet. Errors about an argument state its name, value and expectation."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Self


class EagleGBVError(Exception):
    """Base of every error that this package raises deliberately; each keeps its arguments."""

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (*vars(self).values(),) or self.args


LONGEST_VALUE = 200  # characters of a value that a message shows


def shown(value: object) -> str:
    """Return a value as messages show it: a long one is cut."""
    text = repr(value)
    if len(text) <= LONGEST_VALUE:
        return text
    return f"{text[:LONGEST_VALUE]}... ({len(text)} characters)"


class InvalidArgument(EagleGBVError, ValueError):
    """An argument is outside what the callee accepts."""

    def __init__(self, argument: str, value: object, expected: str) -> None:
        super().__init__(f"{argument}={shown(value)}: expected {expected}")
        self.argument = argument
        self.value = value
        self.expected = expected


def one_of(names: Iterable[str], given: object = None) -> str:
    """Return the expectation for a name: ``one of a, b``.

    Args:
        names: The possible names; members of an enumeration count by their values.
        given: The name that was given; a similar possible name is mentioned first.
    """
    known = [str(name) for name in names]
    close = get_close_matches(given, known, n=1) if isinstance(given, str) else []
    perhaps = f"{close[0]}, perhaps; " if close else ""
    return f"{perhaps}one of {', '.join(known)}"


def first_line(error: Exception) -> str:
    """Return the first line of another library's message, or its error's name if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class NotInstalled(EagleGBVError):
    """A package that an extra of this one requires is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install -e '.[{extra}]' in a checkout")
        self.package = package
        self.extra = extra


class ModelNotSupported(InvalidArgument):
    """The engine cannot drive the target model, for example because it ignores our attention."""


class DrafterMismatch(InvalidArgument):
    """A drafter's tensors, sizes or vocabulary do not fit its configuration or the target."""


class SamplingMismatch(InvalidArgument):
    """A verifier was given a draft tree of a sampling for which it is not lossless."""


class InvalidProbabilities(InvalidArgument):
    """NaN logits, probabilities that do not sum to 1, or a drafted token of draft probability 0."""


class OutOfSlots(EagleGBVError):
    """The KV pool has fewer free slots than a forward needs."""

    def __init__(self, wanted: int, free: int, total: int) -> None:
        size = "" if wanted <= total else ": more kv_slots are needed, whatever the model's context"
        super().__init__(f"KV pool: {wanted} slots wanted, {free} free of {total}{size}")
        self.wanted = wanted
        self.free = free
        self.total = total


class EngineBusy(EagleGBVError):
    """The engine was asked for a step within a step, for example by an observer or a finaliser."""


class StepFailed(EagleGBVError):
    """A step of the engine broke off; its requests ended, but the engine continues."""

    def __init__(self, request: int, cause: str) -> None:
        super().__init__(f"request {request}: a step broke off: {cause}")
        self.request = request
        self.cause = cause

    @classmethod
    def of(cls, request: int, error: BaseException) -> Self:
        """Return what ends a request in whose step ``error`` was raised."""
        failed = cls(request, f"{type(error).__name__}: {error}")
        failed.__cause__ = error
        return failed
