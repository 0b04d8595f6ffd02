"""The folder of a run, where records are saved as they are measured, so a killed run loses none."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.figures import FIGURES
from eaglegbv.eval.journal import Journal
from eaglegbv.eval.json_files import read_json
from eaglegbv.eval.records import Environment, Key, Record, Results, RunSettings, Setting
from eaglegbv.files import write_whole


class _Run(msgspec.Struct, kw_only=True):
    """Header of a run, written before anything is measured."""

    settings: RunSettings
    environment: Environment


SHORT = 40
"""Most characters of a setting that a message shows."""


def another_run(path: Path, found: msgspec.Struct, wanted: msgspec.Struct) -> InvalidArgument:
    """Return the error for a folder that holds a run with other settings than those wanted now."""
    short, long = [], []
    for field in wanted.__struct_fields__:
        values = [getattr(settings, field) for settings in (found, wanted)]
        if values[0] == values[1]:
            continue
        if all(_is_short(value) for value in values):
            before, now = ("none" if value in (None, "") else value for value in values)
            short.append(f"{field} {before}, now {now}")
        else:
            long.append(field)
    told = "; ".join([*short, *([f"other {', '.join(long)}"] if long else [])])
    expected = f"a folder for this run, such as --out NEW: this one holds another ({told})"
    return InvalidArgument("out", str(path), expected)


def _is_short(value: object) -> bool:
    return value is None or (isinstance(value, str | int | float) and len(str(value)) <= SHORT)


class RunFolder:
    """A folder with ``run.json`` (settings) and ``records.jsonl`` (one line a record).

    Opening a folder that holds a run with equal settings resumes it.

    Attributes:
        path: The folder.
        settings: Settings of the run.
        environment: Where the run was started.
        records: All records so far, including those of earlier sessions.

    Raises:
        InvalidArgument: The folder holds a run with other settings, or cannot be written.
    """

    def __init__(self, path: Path, settings: RunSettings, environment: Environment) -> None:
        self.path = path
        self.settings = settings
        self._journal = _journal(path)
        header = path / "run.json"
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not header.is_file():
                write_whole(header, _pretty(_Run(settings=settings, environment=environment)))
        except OSError as error:
            raise InvalidArgument("out", str(path), f"a folder for a run ({error})") from error
        run = read_json(header, _Run, argument="out", expected="the head of a run")
        if run.settings != settings:
            raise another_run(path, run.settings, settings)
        self.environment = run.environment
        self.records = self._journal.resume()
        _check(path, settings, self.records, "out")

    def add(self, record: Record) -> None:
        """Add a record and save it."""
        self._journal.add(record)
        self.records.append(record)

    @property
    def done(self) -> frozenset[Key]:
        """The keys of all records that were measured."""
        return frozenset(record.key for record in self.records)

    def has_all(self, settings: Sequence[Setting]) -> bool:
        """Return whether all records that these settings should have were measured."""
        return self.done.issuperset(self.settings.keys(settings))

    def results(self) -> Results:
        """Return all that was measured so far."""
        return Results(settings=self.settings, environment=self.environment, records=self.records)


def write_results(folder: Path, results: Results, summary: Sequence[msgspec.Struct]) -> Path:
    """Write ``results.json`` into ``folder``.

    The file has the settings, the environment, the definitions of the figures (and whether prefill
    counts in them), the summary and the records.
    """
    path = folder / "results.json"
    content = {
        "format": results.format,
        "settings": results.settings,
        "environment": results.environment,
        "definitions": {name: figure.definition for name, figure in FIGURES.items()},
        "summary": summary,
        "records": results.records,
    }
    write_whole(path, _pretty(content))
    return path


def read_results(
    path: Path, argument: str = "results", *, expected: str = "a results.json"
) -> Results:
    """Read a ``results.json``.

    Args:
        path: The file.
        argument: The user's name for the file, for messages.
        expected: What the file may be, for messages.

    Raises:
        InvalidArgument: The file cannot be read or is not a ``results.json``.
    """
    results = read_json(path, Results, argument=argument, expected=expected)
    _check(path, results.settings, results.records, argument)
    return results


def load_results(path: Path, argument: str = "results") -> Results:
    """Read a run from its folder, finished or not, or from a ``results.json``.

    Args:
        path: The folder or the file.
        argument: The user's name for the folder or file, for messages.

    Raises:
        InvalidArgument: There is no run.
    """
    header = path / "run.json"
    if not header.is_file():
        return read_results(path / "results.json" if path.is_dir() else path, argument)
    run = read_json(header, _Run, argument=argument, expected="the head of a run")
    records = _journal(path).read(argument)
    _check(path, run.settings, records, argument)
    return Results(settings=run.settings, environment=run.environment, records=records)


def _check(path: Path, settings: RunSettings, records: Sequence[Record], argument: str) -> None:
    """Raise unless every record belongs to a setting of the run and occurs once.

    A setting's name leaves out values equal to the defaults, so a version with other defaults names
    the settings of an older run differently. Their records must not be dropped silently.
    """
    known = {setting.name for setting in settings.settings}
    strange = sorted({record.setting for record in records} - known)
    if strange:
        raise InvalidArgument(
            argument,
            str(path),
            f"records of {', '.join(sorted(known))}, not of {', '.join(strange)}: "
            "another version, with other defaults, has measured it",
        )
    twice = [key for key, count in Counter(record.key for record in records).items() if count > 1]
    if twice:
        expected = f"records that each stand once, unlike {twice[0]}: did two processes write it?"
        raise InvalidArgument(argument, str(path), expected)


def _journal(folder: Path) -> Journal[Record]:
    return Journal(folder / "records.jsonl", Record, "records of a run")


def _pretty(content: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"
