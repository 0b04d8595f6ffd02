"""How commands write: colours where a terminal has them, and one way to show progress."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from tqdm import tqdm

LINE_SECONDS = 20.0  # seconds between two lines of progress where there is no terminal for a bar


def has_colours(*, err: bool = False) -> bool:
    """Whether standard output, or standard error, is a terminal whose user wants colours."""
    stream = sys.stderr if err else sys.stdout
    return stream.isatty() and not os.environ.get("NO_COLOR")


def styled(text: str, *, err: bool = False, **how: Any) -> str:  # noqa: ANN401
    """Return ``text`` in a style (see :func:`click.style`) where there are colours."""
    return typer.style(text, **how) if text and has_colours(err=err) else text


def print_note(text: str) -> None:
    """Print a line beside the results, dim in a terminal, on standard error."""
    typer.echo(styled(text, err=True, dim=True), err=True)


class Progress:
    """A bar on standard error; where that is no terminal, a line every :data:`LINE_SECONDS`."""

    def __init__(self, bar: "tqdm[NoReturn]", total: int, unit: str, what: str, done: int) -> None:
        self._bar, self._total, self._unit, self._what = bar, total, unit, what
        self._begun = self._told = time.monotonic()
        self._first = self._done = done

    def update(self, count: int = 1, note: str = "") -> None:
        """Count units that are done; ``note`` says what was last done, or how it went."""
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(count)
        self._done += count
        now = time.monotonic()
        if self._bar.disable and now - self._told >= LINE_SECONDS:
            self._told = now
            rest = (now - self._begun) / (self._done - self._first) * (self._total - self._done)
            about = f"{self._done}/{self._total} {self._unit}s, about {rest:.0f} s to go"
            typer.echo("; ".join(filter(None, (self._what, about, note))), err=True)


@contextmanager
def progress(
    total: int, unit: str, what: str = "", *, done: int = 0, leave: bool = True
) -> Iterator[Progress]:
    """Show how many of ``total`` units are done within this context; ``what`` they are for."""
    with tqdm(
        total=total, initial=done, desc=what, unit=unit, leave=leave, file=sys.stderr, disable=None
    ) as bar:
        yield Progress(bar, total, unit, what, done)
