"""Files of measurements from which a page of results is written: compact, named, in one folder."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.drafters import DrafterReport
from eaglegbv.eval.json_files import read_json
from eaglegbv.eval.papers.base import Report
from eaglegbv.eval.records import Environment, Record, Results, Turn
from eaglegbv.eval.store import load_results, read_results
from eaglegbv.eval.study import Study
from eaglegbv.eval.timing import Timing
from eaglegbv.request_metrics import RequestMetrics
from eaglegbv.stopwatch import Phase

DIGITS = 6
"""Digits to which seconds are rounded."""


_Content = TypeVar("_Content")


class PaperResults(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison with a paper.

    Attributes:
        report: The ``report.json`` that ``bench paper`` wrote.
        title: The paper and what is compared.
        environment: Where and when it was measured, if its folder tells.
    """

    report: Report
    title: str = ""
    environment: Environment | None = None


class BatchResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results that ``bench batch --out`` wrote.

    Attributes:
        timings: Timings of all calls.
        environment: Where and when they were measured.
        model: Target.
        drafter: Drafter.
        verifier: Verifier of the fixed plans.
        suite: Source of the prompts.
        compile_backend: Backend with which the engine was compiled; empty if it was not.
        dtype: Dtype in which all models computed; empty in files older than this field.
        draft_quantization: How the drafter's weights were held; empty in files older than this
            field.
    """

    timings: tuple[Timing, ...]
    environment: Environment
    model: str = ""
    drafter: str = ""
    verifier: str = ""
    suite: str = ""
    compile_backend: str = ""
    dtype: str = ""
    draft_quantization: str = ""


class NamedReport(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter's report, with the name under which it is shown."""

    name: str
    report: DrafterReport


class DrafterResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results that ``bench drafters --json`` printed.

    Attributes:
        origin: Where the questions come from.
        drafters: Drafters and plans, in order.
        environment: Where and when they were measured, if it was recorded.
    """

    origin: str
    drafters: tuple[NamedReport, ...]
    environment: Environment | None = None


Evidence: TypeAlias = Results | PaperResults | BatchResults | DrafterResults | Study

KINDS: Mapping[str, type[Evidence]] = {
    "mt-bench": Results,
    "baselines": Results,
    "grid": Results,
    "set": Results,
    "paper": PaperResults,
    "study": Study,
    "batch": BatchResults,
    "drafters": DrafterResults,
}
"""Kind of a file, by how its name begins: ``mt-bench-again.json`` is a run too."""

AGAIN = "-again"
"""End of the name of a second run with the same settings."""


def read_evidence(folder: Path) -> dict[str, Evidence]:
    """Return the content of every file of a folder, by name without suffix, in order of names.

    Files with names of no known kind belong to other pages and are not read; see
    :func:`other_files`.

    Raises:
        InvalidArgument: A file's content is not what its name says.
    """
    known = set(_files(folder)) - set(other_files(folder))
    return {path.stem: _read(path) for path in sorted(known)}


def other_files(folder: Path) -> list[Path]:
    """Return the files of a folder whose names begin with none of :data:`KINDS`."""
    return [path for path in _files(folder) if _kind(path.stem) is None]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def add_evidence(folder: Path, name: str, source: Path) -> Path:
    """Save the parts of a measured file or run that the page needs, as ``folder/name.json``.

    Args:
        folder: Folder to write to.
        name: Name, which states the kind; see :data:`KINDS`.
        source: Folder of a run or of a comparison with a paper, or a file.

    Raises:
        InvalidArgument: The name is of no known kind, or the source is not of this kind.
    """
    content = _encoded(_from(kind_of(name), source))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_bytes(content + b"\n")
    return path


def kind_of(name: str) -> type[Evidence]:
    """Return the type of the content of a file with this name.

    Raises:
        InvalidArgument: The name begins with none of :data:`KINDS`.
    """
    found = _kind(name)
    if found is None:
        raise InvalidArgument("name", name, f"one that begins with {', '.join(sorted(KINDS))}")
    return found


def _kind(name: str) -> type[Evidence] | None:
    found = kind_among(KINDS, name)
    return None if found is None else KINDS[found]


def kind_among(kinds: Iterable[str], name: str) -> str | None:
    """Return the longest of ``kinds`` with which a file's name begins, or None."""
    found = [kind for kind in kinds if name == kind or name.startswith(f"{kind}-")]
    return max(found, key=len, default=None)


def compact(results: Results) -> Results:
    """Return a run with one turn per conversation and without texts; no figure changes."""
    return Results(
        settings=msgspec.structs.replace(
            # The folder from which it was read matters to no reader of the page.
            results.settings,
            origin=Path(results.settings.origin).name,
        ),
        environment=results.environment,
        records=[_compact_record(record) for record in results.records],
    )


def _compact_record(record: Record) -> Record:
    return msgspec.structs.replace(record, turns=[_sum(record.turns)] if record.turns else [])


def _sum(turns: Sequence[Turn]) -> Turn:
    return Turn(
        text="",
        completion_tokens=sum(turn.completion_tokens for turn in turns),
        finish_reason="",
        wall_seconds=round(sum(turn.wall_seconds for turn in turns), DIGITS),
        metrics=reduce(_add, (turn.metrics for turn in turns), RequestMetrics()),
    )


def _add(a: RequestMetrics, b: RequestMetrics) -> RequestMetrics:
    """Add up the counts from which figures are computed.

    No figure needs plans, cached tokens or pre-emptions, and files are smaller without them.
    """
    phases = [phase for phase in Phase if phase in a.seconds or phase in b.seconds]
    return RequestMetrics(
        prompt_tokens=a.prompt_tokens + b.prompt_tokens,
        target_forwards=a.target_forwards + b.target_forwards,
        committed_tokens=a.committed_tokens + b.committed_tokens,
        accepted_tokens=a.accepted_tokens + b.accepted_tokens,
        drafted_nodes=a.drafted_nodes + b.drafted_nodes,
        offered_by_depth=_columns(a.offered_by_depth, b.offered_by_depth),
        accepted_by_depth=_columns(a.accepted_by_depth, b.accepted_by_depth),
        seconds={
            phase: round(a.seconds.get(phase, 0.0) + b.seconds.get(phase, 0.0), DIGITS)
            for phase in phases
        },
    )


def _columns(a: Sequence[int], b: Sequence[int]) -> list[int]:
    longest = max(len(a), len(b))
    padded = [[*column, *[0] * (longest - len(column))] for column in (a, b)]
    return [sum(pair) for pair in zip(*padded, strict=True)]


def _from(kind: type[Evidence], source: Path) -> Evidence:
    if kind is Results:
        return compact(load_results(source))
    if kind is PaperResults and source.is_dir():
        report = _decode(source / "report.json", Report)
        return PaperResults(
            report=report,
            title=_title(source / "report.txt"),
            environment=_environment(source),
        )
    if kind is Study and source.is_dir():
        source /= "study.json"
    if kind is DrafterResults:
        return _without_questions(_decode(source, DrafterResults))
    return _decode(source, kind)


def _title(report: Path) -> str:
    return report.read_text(encoding="utf-8").partition("\n")[0] if report.is_file() else ""


def _environment(folder: Path) -> Environment | None:
    """Return where a comparison was measured, from the first file of its folder that tells."""
    found = (_where(path.read_bytes()) for path in sorted(folder.glob("*.json")))
    return next(filter(None, found), None)


class _Where(msgspec.Struct):
    environment: Environment | None = None


def _where(content: bytes) -> Environment | None:
    try:
        return msgspec.json.decode(content, type=_Where).environment
    except msgspec.DecodeError:  # for example, a file of texts
        return None


def _without_questions(found: DrafterResults) -> DrafterResults:
    bare = [
        msgspec.structs.replace(one, report=msgspec.structs.replace(one.report, by_question={}))
        for one in found.drafters
    ]
    return msgspec.structs.replace(found, origin=Path(found.origin).name, drafters=tuple(bare))


def _read(path: Path) -> Evidence:
    kind = kind_of(path.stem)
    return read_results(path) if kind is Results else _decode(path, kind)


def _decode(path: Path, kind: type[_Content]) -> _Content:
    return read_json(path, kind, argument="file", expected=f"a readable file of {kind.__name__}")


def _encoded(evidence: Evidence) -> bytes:
    """Encode with one record a line, leaving out counts of a run that are zero."""
    content = msgspec.to_builtins(evidence)
    if not isinstance(evidence, Results):
        return msgspec.json.encode(content)
    for record in content["records"]:
        for turn in record["turns"]:
            turn["metrics"] = {name: value for name, value in turn["metrics"].items() if value}
    records = ",\n".join(_plain(record) for record in content.pop("records"))
    return f'{_plain(content)[:-1]},"records":[\n{records}\n]}}'.encode()


def _plain(content: object) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))
