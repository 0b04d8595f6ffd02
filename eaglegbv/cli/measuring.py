"""What the commands that measure share: the engine's answers, progress, and errors."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from eaglegbv.eval.records import Record, RunSettings
    from eaglegbv.eval.summary import Summary


@contextmanager
def progress(settings: "RunSettings", done: int) -> Iterator[Callable[["Record"], None]]:
    """Show a progress bar on standard error, with the latest record's figures."""
    from tqdm import tqdm

    total = len(settings.question_ids) * len(settings.settings) * settings.repeats

    with tqdm(total=total, initial=done, unit="conversation", file=sys.stderr) as bar:

        def show(record: "Record") -> None:
            tokens = sum(turn.metrics.committed_tokens for turn in record.turns)
            forwards = sum(turn.metrics.target_forwards for turn in record.turns)
            seconds = sum(turn.decode_seconds for turn in record.turns)
            if forwards and seconds:
                figures = f"{tokens / forwards:.2f} tokens/forward, {tokens / seconds:.0f} tokens/s"
                bar.set_postfix_str(f"{record.setting}: {figures}", refresh=False)
            bar.update()

        yield show


def report_errors(summaries: list["Summary"]) -> None:
    """Say how many conversations broke off, if any did."""
    broken = {s.setting: s.errors for s in summaries if s.errors}
    if broken:
        counts = ", ".join(f"{setting}: {count}" for setting, count in broken.items())
        typer.echo(f"conversations that broke off, counted in no figure: {counts}", err=True)
