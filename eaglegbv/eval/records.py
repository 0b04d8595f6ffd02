"""What a run saves: settings, environment, a record for each conversation; and the files of it."""

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

import msgspec
import torch

from eaglegbv.config import PLAIN, Plan
from eaglegbv.devices import processor_name
from eaglegbv.errors import InvalidArgument, SamplingMismatch
from eaglegbv.loading import TINY_TARGET
from eaglegbv.metrics import Phase, RequestMetrics
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling
from eaglegbv.utils import Content, decode_json
from eaglegbv.verifiers.registry import make_any_verifier


def read_json(path: Path, kind: type[Content], *, argument: str, expected: str) -> Content:
    """Return the content of a file.

    Args:
        path: The file.
        kind: Type of its content.
        argument: The user's name for the file, for messages.
        expected: What the file should be, for messages.

    Raises:
        InvalidArgument: The file cannot be read, or its content is of another type.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidArgument(argument, str(path), f"{expected} ({error})") from error
    return decode_json(content, kind, argument=argument, place=str(path), expected=expected)


# Entries saved one a line as they come, so that a killed process loses at most one.


Entry = TypeVar("Entry", bound=msgspec.Struct)


class Journal(Generic[Entry]):
    """A file of JSON lines to which one process adds, while others may read it.

    A last line that its writer has not finished, or was killed while writing, is not read.
    """

    def __init__(self, path: Path, kind: type[Entry], content: str) -> None:
        """Name a file, which need not exist yet.

        Args:
            path: The file.
            kind: Type of its entries.
            content: What the entries are, for messages.
        """
        self._path = path
        self._kind = kind
        self._content = content

    def read(self, argument: str = "out") -> list[Entry]:
        """Return all entries without changing the file.

        Args:
            argument: The user's name for the journal's folder, for messages.

        Raises:
            InvalidArgument: The file cannot be read, or a line is not an entry.
        """
        return [
            decode_json(
                line,
                self._kind,
                argument=argument,
                place=f"{self._path}:{number}",
                expected=self._content,
            )
            for number, line in enumerate(self._whole_lines().split(b"\n")[:-1], start=1)
        ]

    def resume(self) -> list[Entry]:
        """Return all entries, and remove a last line that was cut short, so that more can be added.

        Raises:
            InvalidArgument: The file cannot be read, or a line is not an entry.
        """
        entries = self.read()
        if self._path.is_file():
            os.truncate(self._path, len(self._whole_lines()))
        return entries

    def add(self, entry: Entry) -> None:
        """Append an entry to the file."""
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")

    def _whole_lines(self) -> bytes:
        content = self._path.read_bytes() if self._path.is_file() else b""
        return content[: content.rfind(b"\n") + 1]


# Data that a benchmark run saves: its settings, its environment, one record per conversation.


Key: TypeAlias = tuple[str, str, int]
"""Setting, question and repeat of a record."""

FORMAT = 1
"""Version of the layout of ``results.json``."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One way of decoding that a run compares.

    Attributes:
        plan: How to speculate; plain decoding for a baseline.
        temperature: Sampling temperature.
        baseline: Name of another library's way to generate, or None for the engine's.
    """

    plan: Plan
    temperature: float = 1.0
    baseline: str | None = None

    def __post_init__(self) -> None:
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
            parts = [plan.verifier, f"K{plan.paths}", f"L{plan.depth}"]
            if plan.draft_sampling is not None:
                parts.append(str(plan.draft_sampling))
            if plan.draft_width != default.draft_width:
                parts.append(f"W{plan.draft_width}")
            if plan.whole_vocab:
                parts.append(f"V{plan.whole_vocab}")
            if plan.draft_temperature != default.draft_temperature:
                parts.append(f"D{plan.draft_temperature:g}")
            if plan.min_confidence > 0:
                parts.append(f"C{plan.min_confidence:g}")
            if plan.beam is not None:
                parts.append(f"B{plan.beam}")
            if plan.nodes is not None:
                parts.append(f"N{plan.nodes}")
            if plan.shape:
                ranks = ("".join(map(str, node)) for node in plan.shape)
                parts.append(f"S{','.join(ranks)}")
        if self.temperature != 1.0:
            parts.append(f"T{self.temperature:g}")
        return " ".join(parts)


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings that determine what a run does; it is resumed only with equal ones.

    Attributes:
        suite: Name of the suite.
        origin: Where its questions were read from.
        question_ids: The questions asked, in order.
        model: Name or folder of the target.
        drafter: Name or folder of the drafter, or None.
        system: System prompt before every conversation, or None.
        template: The whole chat template; None in results that did not record it.
        questions_sha256: Hash of the questions; empty in results that did not record it.
        dtype: Dtype in which the target computes; empty in results that did not record it.
        draft_quantization: How the drafter's weights are held; empty in results that did not record
            it.
        backend: What runs the plans: ``local`` or ``sglang``; ``transformers`` if there are only
            baselines.
        backend_arguments: Further arguments of the backend.
        compile_backend: Backend with which this engine was compiled; empty if it was not.
        settings: The settings to compare.
        max_tokens: Most tokens of an answer.
        seed: Seed from which every request's seed is derived.
        repeats: Number of times that everything is run.
    """

    suite: str
    origin: str
    question_ids: tuple[str, ...]
    model: str
    drafter: str | None
    system: str | None
    settings: tuple[Setting, ...]
    max_tokens: int
    seed: int
    repeats: int
    template: str | None = None
    questions_sha256: str = ""
    dtype: str = ""
    draft_quantization: str = ""
    backend: str = "local"
    backend_arguments: dict[str, str | int | float | bool | None] = {}
    compile_backend: str = ""

    def __post_init__(self) -> None:
        for name, value in (("max_tokens", self.max_tokens), ("repeats", self.repeats)):
            if value < 1:
                raise InvalidArgument(name, value, "an integer of at least 1")
        if self.seed < 0:
            raise InvalidArgument("seed", self.seed, "an integer of at least 0")
        names = [setting.name for setting in self.settings]
        if not names or len(set(names)) < len(names):
            raise InvalidArgument("settings", names, "one or more settings, each once")

    def keys(self, settings: Sequence[Setting]) -> Iterator[Key]:
        """Yield the keys of all records that these settings should have."""
        for repeat in range(self.repeats):
            for question in self.question_ids:
                for setting in settings:
                    yield setting.name, question, repeat


class Turn(msgspec.Struct, kw_only=True):
    """One answer.

    Attributes:
        text: The answer.
        completion_tokens: Its length in tokens; the first comes from the prompt's own forward.
        finish_reason: Why it ended.
        wall_seconds: From the call to its return: prefill, decoding, and (de)tokenisation.
        metrics: The engine's counts. Of other libraries, only the time of prefill is known; other
            phases are missing.
    """

    text: str
    completion_tokens: int
    finish_reason: str
    wall_seconds: float
    metrics: RequestMetrics

    @property
    def decode_seconds(self) -> float:
        """Wall time without prefill."""
        return self.wall_seconds - self.metrics.seconds[Phase.PREFILL]


class Record(msgspec.Struct, kw_only=True):
    """One conversation: a question asked once in one setting.

    Attributes:
        question_id: Id of the question.
        category: Category of the question.
        setting: Name of the setting.
        repeat: Number of the repetition, from 0.
        turns: The answers, in order.
        error: Why the conversation broke off, or None.
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
    """Where and when a run was made.

    Attributes:
        started: UTC time, ISO 8601.
        versions: Version of each package, and of Python.
        platform: Operating system and architecture.
        processor: Name of the processor.
        cores: Number of processor cores that the system reports.
        threads: Number of threads with which PyTorch computes.
        device: Device on which the target runs.
    """

    started: str
    versions: dict[str, str]
    platform: str
    processor: str
    cores: int
    threads: int
    device: str


class Results(msgspec.Struct, kw_only=True):
    """All that ``results.json`` contains besides the summary derived from it."""

    settings: RunSettings
    environment: Environment
    records: Sequence[Record]
    format: int = FORMAT


def describe_environment(device: str, packages: Sequence[str] = ()) -> Environment:
    """Return the environment of this process.

    Args:
        device: The target's device.
        packages: Further packages whose versions to record.
    """
    usual = ("eaglegbv", "torch", "transformers", "tokenizers", "numpy")
    versions = {package: metadata.version(package) for package in (*usual, *packages)}
    return Environment(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), **versions},
        platform=platform.platform(),
        processor=processor_name(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
    )


def name_of_model(model: str) -> str:
    """Return ``tiny`` for the packaged target, wherever it is; other names unchanged."""
    return "tiny" if Path(model) == TINY_TARGET else model


# The settings that a benchmark compares, from lists of the values that vary.


@dataclass(frozen=True, slots=True)
class Grid:
    """Settings to compare.

    Attributes:
        settings: Every lossless combination, once.
        left_out: Names of combinations that are not lossless, or whose distribution needs more
            paths.
    """

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

    ``"none"`` has no paths, depth or distribution, and occurs once for each temperature. A verifier
    that takes fewer paths than requested runs with as many as it takes, which its setting's name
    says. Combinations of a verifier with a distribution for which it is not lossless are left out,
    and named.

    Args:
        verifiers: Names of verifiers, including ``"none"`` for plain decoding.
        paths: Numbers of paths.
        depths: Lengths of a path.
        temperatures: Sampling temperatures.
        base: All other values of every plan.
        draft_samplings: Draft samplings, None for each verifier's own; by default that of ``base``.
        draft_temperatures: Multiples of the sampling temperature; by default that of ``base``.
        baselines: Names of other libraries' ways, which come after the rest, once for each
            temperature.

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
