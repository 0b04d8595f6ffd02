"""What a run holds, and the folder in which it is kept as it is measured, so a killed run goes on.

A folder has ``head.json``, written before anything is measured, and ``observations.jsonl``, one
measured part a line. A single file of the same (:meth:`Run.compact`) has no texts.
"""

import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from shutil import which
from typing import Any

import msgspec
import torch

import eaglegbv
from eaglegbv.devices import processor_name
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.settings import Setting
from eaglegbv.utils import Content, decode_json, write_whole

DIGITS = 6  # digits to which sums are rounded in compact files
SHORT = 40  # most characters of a value that a message shows
OLD_FILES = ("run.json", "results.json", "cells.json", "report.json", "study.json")
"""What folders of version 0.1 hold."""


class Observation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one setting came to on one unit, such as a question; all figures are ratios of sums."""

    setting: str  # its name
    unit: str  # what questions, places or nodes are resampled as a whole by
    sums: dict[str, float] = {}  # by name, such as "tokens", "steps" or "seconds.verify"
    repeat: int = 0
    category: str = ""  # of the unit
    error: str | None = None  # why it broke off; then it counts in no figure
    texts: tuple[str, ...] = ()  # what was answered, turn by turn


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where and when a run was made."""

    started: str  # UTC time, ISO 8601
    versions: dict[str, str]  # version of each package, and of Python
    platform: str
    processor: str
    cores: int  # number of processor cores that the system reports
    threads: int  # number of threads with which PyTorch computes
    device: str  # device on which the target runs


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured, with what and where."""

    experiment: str  # its name
    # What determines the figures besides settings: models, questions, sizes; by name.
    setup: dict[str, Any]
    sheets: dict[str, tuple[Setting, ...]]  # settings by sheet
    environment: Environment


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured at once."""

    sheet: str
    key: str  # unique in the sheet
    observations: list[Observation]


class _File(Head, frozen=True, kw_only=True):
    parts: list[Part]


class Run:
    """What was measured so far, by sheet."""

    def __init__(self, head: Head, parts: Iterable[Part], folder: Path | None = None) -> None:
        self.head, self.folder = head, folder
        self._parts: dict[tuple[str, str], Part] = {}
        for part in parts:
            if (part.sheet, part.key) in self._parts:
                expected = f"parts that stand once, unlike {part.key}: did two processes write it?"
                raise InvalidArgument("out", str(folder), expected)
            self._parts[part.sheet, part.key] = part

    @classmethod
    def open(cls, folder: Path, head: Head) -> "Run":
        """Begin a run in a folder, or go on with one that has the same head but for when and where.

        A last line that a kill cut short is removed.

        Raises:
            InvalidArgument: The folder holds another run, or cannot be written.
        """
        path = folder / "head.json"
        _refuse_old(folder, "out")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not path.is_file():
                write_whole(path, pretty(head))
        except OSError as error:
            raise InvalidArgument("out", str(folder), f"a folder for a run ({error})") from error
        stored = read_json(path, Head, argument="out", expected="the head of a run")
        if other := differences(stored, head):
            expected = f"a folder for this run, such as --out NEW: this one holds another ({other})"
            raise InvalidArgument("out", str(folder), expected)
        lines = folder / "observations.jsonl"
        if lines.is_file():
            os.truncate(lines, len(_whole_lines(lines)))
        return cls(stored, _read_parts(lines, "out"), folder)

    @classmethod
    def read(cls, path: Path, argument: str = "run") -> "Run":
        """Read a run from its folder, finished or not, or from a compact file.

        Raises:
            InvalidArgument: There is no run; messages call it ``argument``.
        """
        _refuse_old(path, argument)
        if path.is_dir():
            head = read_json(path / "head.json", Head, argument=argument, expected="a run's folder")
            return cls(head, _read_parts(path / "observations.jsonl", argument), path)
        content = read_json(path, _File, argument=argument, expected="a run's folder or file")
        fields = {name: getattr(content, name) for name in Head.__struct_fields__}
        return cls(Head(**fields), content.parts)

    def part(
        self, sheet: str, key: str, measure: Callable[[], list[Observation]]
    ) -> list[Observation]:
        """Return a part; it is measured now, and kept, unless it was before."""
        known = self._parts.get((sheet, key))
        if known is None:
            known = Part(sheet=sheet, key=key, observations=measure())
            self._parts[sheet, key] = known
            if self.folder is not None:
                with (self.folder / "observations.jsonl").open("ab") as file:
                    file.write(msgspec.json.encode(known) + b"\n")
        return known.observations

    def has(self, sheet: str, key: str) -> bool:
        """Whether a part is measured."""
        return (sheet, key) in self._parts

    def observations(self, sheet: str) -> list[Observation]:
        """Return all that was observed of a sheet."""
        parts = (part for part in self._parts.values() if part.sheet == sheet)
        return [observation for part in parts for observation in part.observations]

    @property
    def sheets(self) -> list[str]:
        """Names of the sheets of which something is measured."""
        return list(dict.fromkeys(sheet for sheet, _ in self._parts))

    def compact(self) -> bytes:
        """Return a file of the run, without texts and with sums rounded, a part a line."""
        content = msgspec.to_builtins(self.head)
        content["setup"].pop("template", None)
        parts = [msgspec.json.encode(_compacted(part)) for part in self._parts.values()]
        text = msgspec.json.encode(content)
        return text[:-1] + b',"parts":[\n' + b",\n".join(parts) + b"\n]}\n"


def _compacted(part: Part) -> Part:
    return Part(
        sheet=part.sheet,
        key=part.key,
        observations=[
            msgspec.structs.replace(
                observation,
                texts=(),
                sums={k: round(v, DIGITS) for k, v in observation.sums.items() if v},
            )
            for observation in part.observations
        ],
    )


def _read_parts(path: Path, argument: str) -> list[Part]:
    lines = _whole_lines(path).split(b"\n")[:-1]
    return [
        decode_json(
            line, Part, argument=argument, place=f"{path}:{n}", expected="observations of a run"
        )
        for n, line in enumerate(lines, start=1)
    ]


def _whole_lines(path: Path) -> bytes:
    content = path.read_bytes() if path.is_file() else b""
    return content[: content.rfind(b"\n") + 1]


def _refuse_old(path: Path, argument: str) -> None:
    folder, names = (path, OLD_FILES) if path.is_dir() else (path.parent, (path.name,))
    old = any(name in OLD_FILES and (folder / name).is_file() for name in names)
    if old and not (folder / "head.json").is_file():
        raise InvalidArgument(argument, str(path), "a run of this version; version 0.1 reads this")


def differences(stored: Head, wanted: Head) -> str:
    """Return in words where two heads differ, but for when and where they were begun."""
    before = _facts(stored)
    now = _facts(wanted)
    names = [name for name in (before | now) if before.get(name) != now.get(name)]
    short = [n for n in names if all(_is_short(facts.get(n)) for facts in (before, now))]
    words = [f"{name} {_said(before.get(name))}, now {_said(now.get(name))}" for name in short]
    if long := ", ".join(name for name in names if name not in short):
        words.append(f"other {long}")
    return "; ".join(words)


def _is_short(value: object) -> bool:
    return isinstance(value, str | int | float | None) and len(str(value)) <= SHORT


def _said(value: object) -> object:
    return "none" if value in (None, "") else value


def _facts(head: Head) -> dict[str, object]:
    facts: dict[str, object] = msgspec.to_builtins(head)
    setup = msgspec.to_builtins(head.setup)
    return {"experiment": head.experiment, **setup, "settings": facts["sheets"]}


def read_json(path: Path, kind: type[Content], *, argument: str, expected: str) -> Content:
    """Return the content of a file, which should be ``expected``.

    Raises:
        InvalidArgument: The file cannot be read, or its content is of another type; the message
            names it as the user does, by ``argument``.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidArgument(argument, str(path), f"{expected} ({error})") from error
    return decode_json(content, kind, argument=argument, place=str(path), expected=expected)


def pretty(content: object) -> bytes:
    """Return indented JSON."""
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def project_version() -> str:
    """Return the version of this project, with the commit if it runs from a checkout.

    A copy of a checkout has no history; there, ``EAGLEGBV_COMMIT`` may name the commit.
    """
    root = Path(eaglegbv.__file__).resolve().parents[1]  # an installation may be links
    commit = os.environ.get("EAGLEGBV_COMMIT", "")
    if not commit and (root / ".git").exists() and which("git"):
        describe = ("git", "describe", "--always", "--dirty", "--exclude", "*")
        done = subprocess.run(describe, cwd=root, capture_output=True, text=True, check=False)
        commit = done.stdout.strip()
    return f"{eaglegbv.__version__}+{commit}" if commit else eaglegbv.__version__


def describe_environment(device: str, packages: Sequence[str] = ()) -> Environment:
    """Return the environment of this process, with versions of further ``packages``."""
    versions = {"python": platform.python_version(), "eaglegbv": project_version()}
    for package in ("torch", "transformers", "tokenizers", "numpy", *packages):
        versions[package] = metadata.version(package)
    return Environment(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions,
        platform=platform.platform(),
        processor=processor_name(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
    )
