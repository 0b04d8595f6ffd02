"""Code shared by the commands that measure: settings of a run, progress, and errors."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eaglegbv.eval.questions import QuestionSet
    from eaglegbv.eval.records import Record, RunSettings, Setting
    from eaglegbv.eval.statistics import Summary
    from eaglegbv.loading import NamedModels

Scalar: TypeAlias = str | int | float | bool | None


def run_settings(
    questions: "QuestionSet",
    models: "NamedModels",
    settings: "tuple[Setting, ...]",
    *,
    max_tokens: int,
    seed: int,
    repeats: int = 1,
    system: str | None = None,
    backend: str = "local",
    backend_arguments: "Mapping[str, Scalar] | None" = None,
    compile_backend: str | None = None,
) -> "RunSettings":
    """Return the settings of a run; see :class:`eaglegbv.eval.records.RunSettings`.

    Raises:
        InvalidArgument: A number is out of range, or two settings are the same.
    """
    from eaglegbv.eval.records import RunSettings

    return RunSettings(
        suite=questions.suite,
        origin=questions.origin,
        question_ids=tuple(question.id for question in questions.questions),
        questions_sha256=questions.sha256,
        model=models.name,
        drafter=models.drafter_name,
        system=system,
        settings=settings,
        max_tokens=max_tokens,
        seed=seed,
        repeats=repeats,
        backend=backend,
        backend_arguments=dict(backend_arguments or {}),
        compile_backend=compile_backend or "",
    )


@contextmanager
def progress(
    settings: "RunSettings", records: "Sequence[Record]" = ()
) -> "Iterator[Callable[[Record], None]]":
    """Show a progress bar on standard error if that is a terminal.

    It shows the figures so far of the setting that ran last; those of all would not fit on a line.

    Args:
        settings: Settings of the run.
        records: Records from earlier sittings.
    """
    from tqdm import tqdm

    total = len(settings.question_ids) * len(settings.settings) * settings.repeats
    figures = _SoFar([setting.name for setting in settings.settings])
    for record in records:
        figures.add(record)

    known = len(records)
    with tqdm(
        total=total, initial=known, unit="conversation", file=sys.stderr, disable=None
    ) as bar:

        def show(record: "Record") -> None:
            figures.add(record)
            bar.set_postfix_str(figures.text(record.setting), refresh=False)
            bar.update()

        yield show


class _SoFar:
    """Figures of each setting over all records so far."""

    def __init__(self, settings: list[str]) -> None:
        from eaglegbv.eval.statistics import BLOCK_EFFICIENCY, TOKENS_PER_SECOND, Sums

        self._figures = (BLOCK_EFFICIENCY, TOKENS_PER_SECOND)
        self._sums = {name: [Sums(0.0, 0.0) for _ in self._figures] for name in settings}

    def add(self, record: "Record") -> None:
        """Count a conversation that was held to its end."""
        if record.error is None:
            known = self._sums[record.setting]
            self._sums[record.setting] = [
                total + figure.of(record)
                for total, figure in zip(known, self._figures, strict=True)
            ]

    def text(self, name: str) -> str:
        """Return tokens a forward and tokens a second of a setting; empty if it has none yet."""
        efficiency, rate = self._sums[name]
        if not efficiency.below:
            return ""
        return f"{name}: {efficiency.ratio:.2f} tokens/forward, {rate.ratio:.0f} tokens/s"


def report_errors(summaries: list["Summary"]) -> None:
    """Print how many conversations broke off, if any did."""
    broken = {s.setting: s.errors for s in summaries if s.errors}
    if broken:
        counts = ", ".join(f"{setting}: {count}" for setting, count in broken.items())
        typer.echo(f"conversations that broke off, counted in no figure: {counts}", err=True)
