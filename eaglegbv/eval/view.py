"""A run or a trace as one HTML page that needs neither a server nor a network."""

import html
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TypeAlias

import msgspec

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.figures import FIGURES
from eaglegbv.eval.records import Record, Results
from eaglegbv.eval.report import facts
from eaglegbv.eval.store import load_results
from eaglegbv.eval.summary import summarise

Content: TypeAlias = dict[str, object]


class _Event(msgspec.Struct):
    """An event of a Chrome trace; those without a time name things."""

    name: str
    ph: str
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, object] = msgspec.field(default_factory=dict)


def view(path: Path) -> str:
    """Return the page of a run's folder, a ``results.json``, or a trace of the engine.

    Raises:
        InvalidArgument: It is neither.
    """
    return page(content_of(path))


def content_of(path: Path) -> Content:
    """Return what a page shows of a run or a trace.

    Raises:
        InvalidArgument: It is neither.
    """
    if path.is_dir() or _begins_with(path, b"{"):
        return results_content(load_results(path))
    return trace_content(path)


def page(content: Content) -> str:
    """Return the page that shows ``content``."""
    template = resources.files("eaglegbv").joinpath("assets", "view", "page.html")
    # No "<" leaves the data, so that nothing in it can end the script it stands in.
    data = json.dumps(content, ensure_ascii=False).replace("<", "\\u003c")
    before, after = template.read_text(encoding="utf-8").split("@@DATA@@")
    title = html.escape(str(content["title"]))
    return before.replace("@@TITLE@@", title) + data + after


def results_content(results: Results) -> Content:
    """Return what a page shows of a run: facts, figures by setting, and the conversations."""
    return {
        "kind": "results",
        "title": f"{results.settings.suite}: {results.settings.model}",
        "facts": list(facts(results).items()),
        "definitions": {name: figure.definition for name, figure in FIGURES.items()},
        "settings": [
            {"name": summary.setting, **msgspec.to_builtins(summary)}
            for summary in summarise(results)
        ],
        "conversations": [_conversation(record) for record in results.records],
    }


def trace_content(path: Path) -> Content:
    """Return what a page shows of a trace: its steps, each with the phases inside it.

    Raises:
        InvalidArgument: The file is no trace of the engine's steps.
    """
    events = _events(path)
    boxes = sorted((e for e in events if e.ph == "X"), key=lambda event: event.ts)
    steps = [event for event in boxes if event.name == "step"]
    if not steps:
        raise InvalidArgument("trace", str(path), "a trace with at least one step")
    phases: list[dict[str, float]] = [{} for _ in steps]
    current = -1
    for event in sorted(boxes, key=lambda event: (event.ts, event.name != "step")):
        if event.name == "step":
            current += 1
        elif current >= 0:
            known = phases[current]
            known[event.name] = known.get(event.name, 0.0) + event.dur / 1000
    return {
        "kind": "trace",
        "title": f"Trace: {path.name}",
        "facts": [("Steps", str(len(steps))), ("Committed tokens", str(_total(steps)))],
        "steps": [
            {
                "start": step.ts / 1000,
                "milliseconds": step.dur / 1000,
                "phases": by_phase,
                "args": step.args,
            }
            for step, by_phase in zip(steps, phases, strict=True)
        ],
    }


def _conversation(record: Record) -> Mapping[str, object]:
    return {
        "question": record.question_id,
        "category": record.category,
        "setting": record.setting,
        "repeat": record.repeat,
        "error": record.error,
        "turns": [
            {
                "text": turn.text,
                "tokens": turn.completion_tokens,
                "finish": turn.finish_reason,
                "block_efficiency": turn.metrics.block_efficiency,
            }
            for turn in record.turns
        ],
    }


def _events(path: Path) -> list[_Event]:
    try:
        raw = path.read_bytes().strip()
        # A run that was killed left its list of events open.
        closed = raw if raw.endswith(b"]") else raw.rpartition(b"\n")[0].rstrip(b",") + b"]"
        return msgspec.json.decode(closed, type=list[_Event])
    except (OSError, msgspec.DecodeError) as error:
        expected = f"a results.json, its folder, or a Chrome trace ({error})"
        raise InvalidArgument("path", str(path), expected) from error


def _begins_with(path: Path, sign: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip().startswith(sign)
    except OSError as error:
        expected = f"a results.json, its folder, or a Chrome trace ({error})"
        raise InvalidArgument("path", str(path), expected) from error


def _total(steps: list[_Event]) -> int:
    counts = (step.args.get("committed", 0) for step in steps)
    return sum(count for count in counts if isinstance(count, int))
