"""Counters and gauges of an engine, and how Prometheus reads them."""

import pytest

from eaglegbv.errors import InvalidArgument
from eaglegbv.metrics import (
    COMMITTED,
    FORWARDS,
    KV_USED,
    PHASE_SECONDS,
    EngineMetrics,
    Phase,
    Span,
    StepRecord,
)


def record(**changes):
    facts = {
        "number": 0,
        "started": 1.0,
        "seconds": 0.5,
        "spans": (Span(Phase.DRAFT, 0.0, 0.125), Span(Phase.FORWARD, 0.125, 0.25)),
        "requests": 3,
        "prefilling": 0,
        "waiting": 1,
        "nodes": 12,
        "accepted": 4,
        "committed": 7,
        "plans": {"otbv 3x4": 2, "none": 1},
        "reasons": {"best": 3},
        "kv_used": 40,
        "kv_slots": 64,
    }
    return StepRecord(**{**facts, **changes})


def test_counters_add_up_over_steps_and_gauges_show_the_latest():
    metrics = EngineMetrics()
    metrics.on_step(record())
    metrics.on_step(record(plans={"none": 3}))
    metrics.set(KV_USED, 40)
    metrics.set(KV_USED, 10)
    assert metrics.value(COMMITTED) == 14
    assert metrics.value(FORWARDS, "none") == 4
    assert metrics.value(FORWARDS, "otbv 3x4") == 2
    assert metrics.value(PHASE_SECONDS, "forward") == 0.5
    assert metrics.value(KV_USED) == 10
    assert metrics.value(FORWARDS, "unheard of") == 0


def test_values_are_found_by_name_too():
    metrics = EngineMetrics()
    assert metrics.value("eaglegbv_steps_total") == 0
    metrics.on_step(record())
    assert metrics.value("eaglegbv_steps_total") == 1
    assert metrics.value("eaglegbv_phase_seconds_total", "forward") == 0.25
    with pytest.raises(InvalidArgument, match="metric='steps': expected one of eaglegbv_acc"):
        metrics.value("steps")


def test_exposition_is_prometheus_text():
    metrics = EngineMetrics()
    metrics.on_step(record(plans={'a "quoted\\ plan': 1}))
    metrics.set(KV_USED, 40)
    lines = metrics.exposition().splitlines()
    at = lines.index("# TYPE eaglegbv_request_forwards_total counter")
    assert lines[at - 1].startswith("# HELP eaglegbv_request_forwards_total ")
    assert lines[at + 1] == r'eaglegbv_request_forwards_total{plan="a \"quoted\\ plan"} 1'
    assert "# TYPE eaglegbv_kv_slots_used gauge" in lines
    assert "eaglegbv_kv_slots_used 40" in lines
    assert 'eaglegbv_phase_seconds_total{phase="draft"} 0.125' in lines
