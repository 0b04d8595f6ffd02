"""A trace is valid JSON that holds every step, its phases, and what it did."""

import json

import pytest

from eaglegbv.errors import InvalidArgument
from eaglegbv.metrics import Phase, Span, StepRecord
from eaglegbv.trace import Tracer

FIRST = StepRecord(
    number=0,
    started=100.0,
    seconds=0.010,
    spans=(Span(Phase.DRAFT, 0.0, 0.004), Span(Phase.FORWARD, 0.004, 0.005)),
    requests=2,
    prefilling=0,
    waiting=1,
    nodes=24,
    accepted=3,
    committed=5,
    plans={"otbv 3x4": 2},
    reasons={"best": 2},
    kv_used=30,
    kv_slots=64,
)
SECOND = StepRecord(
    number=1,
    started=100.020,
    seconds=0.003,
    spans=(Span(Phase.PREFILL, 0.0, 0.003),),
    requests=1,
    prefilling=1,
    waiting=0,
    nodes=0,
    accepted=0,
    committed=0,
    plans={},
    reasons={},
    kv_used=40,
    kv_slots=64,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"


def test_steps_and_phases_are_boxes_in_microseconds(path):
    with Tracer(path) as tracer:
        tracer.on_step(FIRST)
        tracer.on_step(SECOND)
    events = json.loads(path.read_text())
    boxes = {(e["name"], e["ts"]): e for e in events if e["ph"] == "X"}
    assert set(boxes) == {
        ("step", 0.0), ("draft", 0.0), ("forward", 4000.0), ("step", 20000.0), ("prefill", 20000.0)
    }  # fmt: skip
    assert boxes["forward", 4000.0]["dur"] == 5000.0
    arguments = boxes["step", 0.0]["args"]
    assert arguments["plans"] == {"otbv 3x4": 2}
    assert arguments["reasons"] == {"best": 2}
    assert (arguments["drafted nodes"], arguments["accepted"], arguments["committed"]) == (24, 3, 5)
    assert len({e["tid"] for e in boxes.values()}) == 2


def test_counters_show_batch_and_kv_slots(path):
    with Tracer(path) as tracer:
        tracer.on_step(FIRST)
        tracer.on_step(SECOND)
    counters = [e for e in json.loads(path.read_text()) if e["ph"] == "C"]
    assert [e["args"] for e in counters if e["name"] == "requests"] == [
        {"running": 2, "waiting": 1}, {"running": 1, "waiting": 0}
    ]  # fmt: skip
    assert [e["args"]["used"] for e in counters if e["name"] == "kv slots"] == [30, 40]
    # A step that only reads prompts has no tokens per forward.
    assert [e["args"] for e in counters if e["name"] == "tokens per request"] == [
        {"committed": 2.5}
    ]


def test_a_trace_cut_short_needs_only_its_bracket(path):
    tracer = Tracer(path)
    tracer.on_step(FIRST)
    tracer._file.flush()
    assert json.loads(path.read_text() + "]")
    tracer.close()
    tracer.close()
    assert json.loads(path.read_text())


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(InvalidArgument, match="trace="):
        Tracer(tmp_path / "missing" / "trace.json")
