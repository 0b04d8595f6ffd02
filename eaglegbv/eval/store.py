"""The folder of a run: records are kept as they are measured, so a killed run loses none."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.figures import FIGURES
from eaglegbv.eval.records import Environment, Key, Record, Results, RunSettings, Setting


class _Run(msgspec.Struct, kw_only=True):
    """First lines of a run, written before anything is measured."""

    settings: RunSettings
    environment: Environment


SHORT = 40
"""Letters of a setting that a message has room for."""


def another_run(path: Path, found: msgspec.Struct, wanted: msgspec.Struct) -> InvalidArgument:
    """Return the error of a folder that holds a run of other settings than are wanted now."""
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
        settings: Of the run.
        environment: Where the run was started.
        records: What is measured so far, earlier sittings included.

    Raises:
        InvalidArgument: The folder holds a run with other settings, or cannot be written.
    """

    def __init__(self, path: Path, settings: RunSettings, environment: Environment) -> None:
        self.path = path
        self.settings = settings
        self._records_file = path / "records.jsonl"
        header = path / "run.json"
        try:
            path.mkdir(parents=True, exist_ok=True)
            if header.is_file():
                run = msgspec.json.decode(header.read_bytes(), type=_Run)
            else:
                run = _Run(settings=settings, environment=environment)
                _write_whole(header, _pretty(run))
        except (OSError, msgspec.DecodeError) as error:
            raise InvalidArgument("out", str(path), f"a folder for a run ({error})") from error
        if run.settings != settings:
            raise another_run(path, run.settings, settings)
        self.environment = run.environment
        self.records = self._read_records()
        _check(path, settings, self.records, "out")

    def _read_records(self) -> list[Record]:
        if not self._records_file.is_file():
            return []
        whole, end, cut = self._records_file.read_bytes().rpartition(b"\n")
        if cut:  # the process was killed while it wrote this line; it is measured again
            os.truncate(self._records_file, len(whole) + len(end))
        try:
            return [msgspec.json.decode(line, type=Record) for line in whole.splitlines()]
        except msgspec.DecodeError as error:
            raise InvalidArgument("out", str(self.path), f"records of a run ({error})") from error

    def add(self, record: Record) -> None:
        """Keep a record."""
        with self._records_file.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
        self.records.append(record)

    @property
    def done(self) -> frozenset[Key]:
        """The keys of all that was measured."""
        return frozenset(record.key for record in self.records)

    def has_all(self, settings: Sequence[Setting]) -> bool:
        """Whether all that some of the settings come to was measured."""
        return self.done.issuperset(self.settings.keys(settings))

    def results(self) -> Results:
        """Return all that was measured."""
        return Results(settings=self.settings, environment=self.environment, records=self.records)


def write_results(folder: Path, results: Results, summary: Sequence[msgspec.Struct]) -> Path:
    """Write ``results.json`` into ``folder``.

    It has the settings, the environment, what the figures mean (and whether prefill counts in
    them), the summary and the records.
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
    _write_whole(path, _pretty(content))
    return path


def read_results(path: Path, argument: str = "results") -> Results:
    """Read a ``results.json``.

    Args:
        path: The file.
        argument: What a user called it, for messages.

    Raises:
        InvalidArgument: The file cannot be read or is not one.
    """
    try:
        results = msgspec.json.decode(path.read_bytes(), type=Results)
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidArgument(argument, str(path), f"a results.json ({error})") from error
    _check(path, results.settings, results.records, argument)
    return results


def load_results(path: Path, argument: str = "results") -> Results:
    """Read a run from its folder, finished or not, or from a ``results.json``.

    Args:
        path: The folder or the file.
        argument: What a user called it, for messages.

    Raises:
        InvalidArgument: There is no run.
    """
    header = path / "run.json"
    if not header.is_file():
        return read_results(path / "results.json" if path.is_dir() else path, argument)
    run = _read_header(header, argument)
    lines = path / "records.jsonl"
    try:
        whole = lines.read_bytes().rpartition(b"\n")[0] if lines.is_file() else b""
        records = [msgspec.json.decode(line, type=Record) for line in whole.splitlines()]
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidArgument(argument, str(path), f"records of a run ({error})") from error
    _check(path, run.settings, records, argument)
    return Results(settings=run.settings, environment=run.environment, records=records)


def _check(path: Path, settings: RunSettings, records: Sequence[Record], argument: str) -> None:
    """Raise unless every record belongs to a setting of the run, and stands once.

    A setting's name leaves out what is the default, so a version with other defaults names the
    settings of an older run differently; their records must not be dropped in silence.
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


def _read_header(header: Path, argument: str) -> _Run:
    try:
        return msgspec.json.decode(header.read_bytes(), type=_Run)
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidArgument(argument, str(header), f"the head of a run ({error})") from error


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a process that is killed leaves it as it was, or whole."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


def _pretty(content: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"
