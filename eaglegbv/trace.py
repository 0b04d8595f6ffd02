"""A timeline of an engine's steps as a Chrome trace: open it in Perfetto or ``chrome://tracing``.

Every step is a box of track "steps" with the phases below it; batch, waiting requests, KV slots in
use and tokens per request and forward are counters above. The arguments of a step's box say what
was drafted, accepted and committed, by which plans, and why these were chosen.
"""

import json
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from eaglegbv.errors import InvalidArgument
from eaglegbv.metrics import StepRecord

Event: TypeAlias = dict[str, object]

_STEPS, _PHASES = 1, 2


class Tracer:
    """Writes a trace while the engine runs; a context manager.

    The file is complete after :meth:`close`, and can be opened even if that never came.
    """

    def __init__(self, path: str | Path) -> None:
        """Start a file, over an existing one.

        Raises:
            InvalidArgument: It cannot be written.
        """
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  closed by close
        except OSError as error:
            raise InvalidArgument("trace", str(path), f"a file to write ({error})") from error
        self._origin: float | None = None
        self._file.write("[\n")
        self._file.write(_line({"name": "process_name", "ph": "M", "args": {"name": "eaglegbv"}}))
        for thread, name in ((_STEPS, "steps"), (_PHASES, "phases")):
            event = {"name": "thread_name", "ph": "M", "tid": thread, "args": {"name": name}}
            self._file.write(",\n" + _line(event))

    def on_step(self, record: StepRecord) -> None:
        """Write a step."""
        if self._origin is None:
            self._origin = record.started
        start = record.started - self._origin
        for event in _events(record, start):
            self._file.write(",\n" + _line(event))

    def close(self) -> None:
        """Complete the file; a second time does nothing."""
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _events(record: StepRecord, start: float) -> list[Event]:
    decoding = sum(record.plans.values())
    step = _box("step", _STEPS, start, record.seconds)
    step["args"] = {
        "number": record.number,
        "requests": record.requests,
        "prefilling": record.prefilling,
        "drafted nodes": record.nodes,
        "accepted": record.accepted,
        "committed": record.committed,
        "plans": dict(record.plans),
        "reasons": dict(record.reasons),
        "kv slots": record.kv_used,
    }
    counters: dict[str, dict[str, float]] = {
        "requests": {"running": record.requests, "waiting": record.waiting},
        "kv slots": {"used": record.kv_used, "free": record.kv_slots - record.kv_used},
    }
    if decoding:
        counters["tokens per request"] = {"committed": record.committed / decoding}
    return [
        step,
        *(_box(span.phase, _PHASES, start + span.start, span.seconds) for span in record.spans),
        *(
            {"name": name, "ph": "C", "ts": _micros(start), "args": values}
            for name, values in counters.items()
        ),
    ]


def _box(name: str, thread: int, start: float, seconds: float) -> Event:
    times = {"ts": _micros(start), "dur": _micros(seconds)}
    return {"name": name, "ph": "X", "tid": thread, **times}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _line(event: Event) -> str:
    return json.dumps({"pid": 1, **event})
