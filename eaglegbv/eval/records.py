"""What a run saves: settings, environment, a record for each conversation; and the files of it."""

import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from itertools import product
from pathlib import Path
from shutil import which
from typing import Generic, TypeAlias, TypeVar

import msgspec
import torch

import eaglegbv
from eaglegbv.config import PLAIN, DraftSampling, Plan
from eaglegbv.devices import processor_name
from eaglegbv.errors import InvalidArgument, SamplingMismatch
from eaglegbv.metrics import Phase, RequestMetrics
from eaglegbv.sampling import SamplingParams
from eaglegbv.utils import Content, decode_json, make_numbers_plain, require_integers, write_whole
from eaglegbv.verifiers.registry import make_any_verifier


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


# Entries saved one a line as they come, so that a killed process loses at most one.


Entry = TypeVar("Entry", bound=msgspec.Struct)
Told = TypeVar("Told", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Journal(Generic[Entry]):
    """A file of JSON lines to which one process adds, while others may read it.

    A last line that its writer has not finished, or was killed while writing, is not read. The file
    need not exist yet; ``content`` says what its entries are, for messages.
    """

    path: Path
    kind: type[Entry]
    content: str

    def read(self, argument: str = "out") -> list[Entry]:
        """Return all entries without changing the file.

        Raises:
            InvalidArgument: The file cannot be read, or a line is not an entry; the message names
                the folder as the user does, by ``argument``.
        """
        lines, what = self._whole_lines().split(b"\n")[:-1], self.content
        return [
            decode_json(line, self.kind, argument=argument, place=f"{self.path}:{n}", expected=what)
            for n, line in enumerate(lines, start=1)
        ]

    def resume(self) -> list[Entry]:
        """Return all entries, and remove a last line that was cut short, so that more can be added.

        Errors are those of :meth:`read`.
        """
        entries = self.read()
        if self.path.is_file():
            os.truncate(self.path, len(self._whole_lines()))
        return entries

    def add(self, entry: Entry) -> None:
        """Append an entry to the file."""
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")

    def _whole_lines(self) -> bytes:
        content = self.path.read_bytes() if self.path.is_file() else b""
        return content[: content.rfind(b"\n") + 1]


# Data that a benchmark run saves: its settings, its environment, one record per conversation.


Key: TypeAlias = tuple[str, str, int]  # setting, question and repeat of a record
FORMAT = 1  # version of the layout of `results.json`


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One way of decoding to compare; a baseline is another library's, with a plain plan."""

    plan: Plan
    temperature: float = 1.0
    baseline: str | None = None

    def __post_init__(self) -> None:
        make_numbers_plain(self)
        SamplingParams(temperature=self.temperature)  # raises an error if it is out of range
        if self.baseline is not None and self.plan.speculative:
            raise InvalidArgument("plan", self.plan, f"plain decoding for {self.baseline}")

    @property
    def plain(self) -> bool:
        """Whether the engine decodes plainly, which is the basis of speed-ups."""
        return self.baseline is None and not self.plan.speculative

    @property
    def name(self) -> str:
        """Short name, unique among settings: it states what differs from the defaults."""
        plan, default = self.plan, Plan()
        if self.baseline is not None:
            parts = [self.baseline]
        elif not plan.speculative:
            parts = ["none"]
        else:
            ranks = ",".join("".join(map(str, node)) for node in plan.shape or ())
            unusual_if = {
                str(plan.draft_sampling): plan.draft_sampling is not None,
                f"W{plan.draft_width}": plan.draft_width != default.draft_width,
                f"V{plan.whole_vocab}": bool(plan.whole_vocab),
                f"D{plan.draft_temperature:g}": plan.draft_temperature != default.draft_temperature,
                f"C{plan.min_confidence:g}": plan.min_confidence > 0,
                f"B{plan.beam}": plan.beam is not None,
                f"N{plan.nodes}": plan.nodes is not None,
                f"S{ranks}": bool(plan.shape),
            }
            sizes = [f"K{plan.paths}", f"L{plan.depth}"]
            if plan.widths:
                sizes = ["x".join(map(str, plan.widths))]
            unusual = [word for word, is_unusual in unusual_if.items() if is_unusual]
            parts = [plan.verifier, *sizes, *unusual]
        if self.temperature != 1.0:
            parts.append(f"T{self.temperature:g}")
        return " ".join(parts)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Which questions are asked of which models."""

    suite: str
    origin: str  # where the questions of the suite were read from
    question_ids: tuple[str, ...]  # the questions asked, in order
    questions_sha256: str = ""  # hash of the questions; missing in results that did not record it
    model: str  # name or folder of the target
    drafter: str | None  # name or folder of the drafter, or None
    dtype: str = ""  # dtype in which the target computes; likewise


class RunSettings(Asked, frozen=True, kw_only=True):
    """All settings that determine what a run does; it is resumed only with equal ones.

    Attributes:
        system: System message before every conversation.
        max_tokens: Most tokens of an answer.
        seed: Seed from which every request's seed is derived.
        repeats: How many times to run everything.
    """

    system: str | None = None
    settings: tuple[Setting, ...]
    max_tokens: int
    seed: int
    repeats: int = 1
    template: str | None = None  # the whole chat template; likewise
    # What runs the plans: `local` or `sglang`; `transformers` if there are only baselines.
    backend: str = "local"
    backend_arguments: dict[str, str | int | float | bool | None] = {}
    compile_backend: str = ""  # backend with which the target was compiled; empty if it was not

    def __post_init__(self) -> None:
        make_numbers_plain(self)
        require_integers(self, max_tokens=(1, None), repeats=(1, None), seed=(0, None))
        names = [setting.name for setting in self.settings]
        if not names or len(set(names)) < len(names):
            raise InvalidArgument("settings", names, "one or more settings, each once")

    def keys(self, settings: Sequence[Setting]) -> Iterator[Key]:
        """Yield the keys of all records that these settings should have."""
        for repeat, question, one in product(range(self.repeats), self.question_ids, settings):
            yield one.name, question, repeat


class Turn(msgspec.Struct, kw_only=True):
    """One answer."""

    text: str
    completion_tokens: int  # its length in tokens; the first comes from the prompt's own forward
    finish_reason: str
    wall_seconds: float  # from the call to its return: prefill, decoding, and (de)tokenisation
    # The engine's counts. Of other libraries, only the time of prefill is known; other phases are
    # missing.
    metrics: RequestMetrics

    @property
    def decode_seconds(self) -> float:
        """Wall time without prefill."""
        return self.wall_seconds - self.metrics.seconds[Phase.PREFILL]


class Record(msgspec.Struct, kw_only=True):
    """One conversation: a question asked once in one setting, known by its name.

    The error is why it broke off; repeats are numbered from 0.
    """

    question_id: str
    category: str
    setting: str
    repeat: int
    turns: list[Turn]
    error: str | None = None

    @property
    def key(self) -> Key:
        """Key that identifies the record within a run."""
        return self.setting, self.question_id, self.repeat


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where and when a run was made."""

    started: str  # UTC time, ISO 8601
    versions: dict[str, str]  # version of each package, and of Python
    platform: str
    processor: str
    cores: int  # number of processor cores that the system reports
    threads: int  # number of threads with which PyTorch computes
    device: str  # device on which the target runs


class Results(msgspec.Struct, kw_only=True):
    """All that ``results.json`` contains besides the summary derived from it."""

    settings: RunSettings
    environment: Environment
    records: Sequence[Record]
    format: int = FORMAT


def project_version() -> str:
    """Return the version of this project, with the commit if it runs from a checkout.

    A copy of a checkout has no history; there, ``EAGLEGBV_COMMIT`` may name the commit.
    """
    root = Path(eaglegbv.__file__).parents[1]
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


# The folder of a run, in which it is resumed.


SHORT = 40  # most characters of a setting that a message shows


def changes(stored: msgspec.Struct, wanted: msgspec.Struct) -> str:
    """Return in words which fields of two structs differ, with their values if those are short."""
    short, long = [], []
    for field in wanted.__struct_fields__:
        both = getattr(stored, field), getattr(wanted, field)
        if both[0] == both[1]:
            continue
        if all(isinstance(v, str | int | float | None) and len(str(v)) <= SHORT for v in both):
            before, now = ("none" if value in (None, "") else value for value in both)
            short.append(f"{field} {before}, now {now}")
        else:
            long.append(field)
    return "; ".join([*short, *([f"other {', '.join(long)}"] if long else [])])


class Head(msgspec.Struct, Generic[Told], frozen=True, kw_only=True):
    """What a run's folder begins with, written before anything is measured."""

    settings: Told  # what is measured
    environment: Environment  # where the run was started


class Folder(Generic[Told, Entry]):
    """A folder with ``run.json`` (a :class:`Head`) and a journal of what is measured.

    Opening a folder that holds a run with equal settings resumes it: its environment is where it
    was started, and its records are all so far.

    Raises:
        InvalidArgument: The folder holds a run with other settings, or cannot be written.
    """

    def __init__(
        self,
        path: Path,
        settings: Told,
        environment: Environment,
        kind: type[Head[Told]],
        journal: Journal[Entry],
    ) -> None:
        self.path, self.settings, self._journal = path, settings, journal
        header = path / "run.json"
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not header.is_file():
                write_whole(header, pretty(kind(settings=settings, environment=environment)))
        except OSError as error:
            raise InvalidArgument("out", str(path), f"a folder for a run ({error})") from error
        head = read_json(header, kind, argument="out", expected="the head of a run")
        if head.settings != settings:
            what = changes(head.settings, settings)
            expected = f"a folder for this run, such as --out NEW: this one holds another ({what})"
            raise InvalidArgument("out", str(path), expected)
        self.environment = head.environment
        self.records = journal.resume()

    def add(self, record: Entry) -> None:
        """Add a record and save it."""
        self._journal.add(record)
        self.records.append(record)


def pretty(content: object) -> bytes:
    """Return indented JSON."""
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


# The settings that a benchmark compares, from lists of the values that vary.


@dataclass(frozen=True, slots=True)
class Grid:
    """Settings to compare, and the names of those that were left out."""

    settings: tuple[Setting, ...]
    left_out: tuple[str, ...] = ()


def grid(
    verifiers: Sequence[str],
    paths: Sequence[int],
    depths: Sequence[int],
    temperatures: Sequence[float],
    *,
    base: Plan,
    draft_samplings: Sequence[DraftSampling | None] = (),
    draft_temperatures: Sequence[float] = (),
    baselines: Sequence[str] = (),
) -> Grid:
    """Return every combination once, in the order of the lists.

    ``"none"`` is plain decoding, without paths, depth or distribution, once for each temperature. A
    verifier that takes fewer paths than requested runs with as many as it takes, which its
    setting's name says. Combinations for which a verifier is not lossless are left out, and named.

    ``base`` has all other values of every plan, and the defaults of the next two; a draft sampling
    of None is each verifier's own. Baselines come last, once for each temperature.

    Raises:
        InvalidArgument: A value is out of range, or a verifier does not exist.
        SamplingMismatch: A verifier takes none of the draft samplings.
    """
    lists = (
        temperatures,
        verifiers,
        draft_samplings or (base.draft_sampling,),
        draft_temperatures or (base.draft_temperature,),
        paths,
        depths,
    )
    kept: dict[Setting, None] = {}
    left_out: dict[Setting, SamplingMismatch] = {}
    for temperature, verifier, draft_sampling, hotter, k, depth in product(*lists):
        if verifier == "none":
            kept[Setting(plan=PLAIN, temperature=temperature)] = None
            continue
        plan = msgspec.structs.replace(
            base,
            verifier=verifier,
            paths=make_any_verifier(verifier).fitting_paths(k),
            depth=depth,
            draft_sampling=draft_sampling,
            draft_temperature=hotter,
        )
        setting = Setting(plan=plan, temperature=temperature)
        try:
            _check_sampling(plan)
            kept[setting] = None
        except SamplingMismatch as error:
            left_out[setting] = error
    for temperature, name in product(temperatures, baselines):
        kept[Setting(plan=PLAIN, temperature=temperature, baseline=name)] = None
    running = {setting.plan.verifier for setting in kept}
    for setting, mismatch in left_out.items():
        if setting.plan.verifier not in running:
            raise mismatch
    return Grid(tuple(kept), tuple(setting.name for setting in left_out))


def _check_sampling(plan: Plan) -> None:
    if plan.draft_sampling is None:
        return
    make_any_verifier(plan.verifier).check_sampling(plan.draft_sampling, plan.paths)
    if plan.paths < plan.draft_sampling.min_paths:
        expected = f"at least {plan.draft_sampling.min_paths} for {plan.draft_sampling}"
        raise SamplingMismatch("paths", plan.paths, expected)
