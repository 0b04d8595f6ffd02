import asyncio
import logging
import time
from dataclasses import replace

import pytest
from support.tree_traces import step

from eaglegbv import metrics as measures
from eaglegbv import server_metrics
from eaglegbv.errors import InvalidArgument
from eaglegbv.metrics import FORWARDS, KV_USED, EngineMetrics, Phase, RequestMetrics, Span
from eaglegbv.openai_api import sglang_record, vllm_record


# --- counts of a request and the figures made of them, by hand
def test_counts_of_forwards_that_offer_trees_of_different_depth():
    metrics = RequestMetrics()
    assert metrics.acceptance_length == metrics.block_efficiency == metrics.decode_seconds == 0
    metrics.count_forward(offered=2, accepted=1, committed=2, nodes=5, plan="none")
    metrics.count_forward(offered=4, accepted=4, committed=5, nodes=9, plan="none")
    metrics.count_forward(offered=3, accepted=0, committed=1, nodes=6, plan="none")
    metrics.count_forward(offered=0, accepted=0, committed=1, nodes=0, plan="none")
    assert metrics == RequestMetrics(
        target_forwards=4, committed_tokens=9, accepted_tokens=5, drafted_nodes=20,
        offered_by_depth=[3, 3, 2, 1], accepted_by_depth=[2, 1, 1, 1], plans={"none": 4},
        accepted_by_step=[1, 4, 0], drafted_by_step=[5, 9, 6],
    )  # fmt: skip
    assert metrics.acceptance_by_depth == [2 / 3, 1 / 3, 1 / 2, 1.0]
    assert metrics.acceptance_length == 5 / 4
    assert metrics.block_efficiency == 9 / 4
    # Nothing was cut: every forward committed what it accepted and one token more.
    assert metrics.block_efficiency == metrics.acceptance_length + 1


def test_seconds_add_up_by_phase_and_prefill_is_not_decoding():
    metrics = RequestMetrics()
    for phase, seconds in [(Phase.PREFILL, 8.0), (Phase.DRAFT, 1.0), (Phase.FORWARD, 2.0)]:
        metrics.add_seconds(phase, seconds)
        metrics.add_seconds(phase, seconds / 2)
    assert metrics.seconds == {Phase.PREFILL: 12.0, Phase.DRAFT: 1.5, Phase.FORWARD: 3.0}
    assert metrics.decode_seconds == 4.5


# --- phases are timed one by one, by a clock that is set by hand
def test_a_stopwatch_adds_up_what_each_phase_takes_and_one_that_fails(monkeypatch):
    ticks = iter([0.0, 0.0, 1.0, 10.0, 12.5, 20.0, 24.0, 30.0, 32.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    watch = measures.Stopwatch()
    for phase in (Phase.DRAFT, Phase.VERIFY, Phase.DRAFT):
        with watch.phase(phase):
            pass
    with pytest.raises(KeyError), watch.phase(Phase.COMMIT):
        raise KeyError
    assert watch.seconds == {Phase.DRAFT: 5.0, Phase.VERIFY: 2.5, Phase.COMMIT: 2.0}


# --- counters and gauges of an engine, and how Prometheus reads them
def record(plans):
    spans = (Span(Phase.DRAFT, 0.0, 0.125), Span(Phase.FORWARD, 0.125, 0.25))
    return replace(step(0, committed=7), seconds=0.5, spans=spans, plans=plans)


def test_counters_add_up_over_steps_and_gauges_show_the_latest():
    metrics = EngineMetrics()
    assert metrics.value("eaglegbv_steps_total") == 0
    metrics.on_step(record({"otbv 3x4": 2, "none": 1}))
    metrics.on_step(record({"none": 3}))
    metrics.set(KV_USED, 40)
    metrics.set(KV_USED, 10)
    assert metrics.value(measures.COMMITTED) == 14
    assert metrics.value(FORWARDS, "none") == 4
    assert metrics.value(FORWARDS, "otbv 3x4") == 2
    assert metrics.value(measures.PHASE_SECONDS, "forward") == 0.5
    assert metrics.value(KV_USED) == 10
    assert metrics.value(FORWARDS, "unheard of") == 0
    # By name too.
    assert metrics.value("eaglegbv_steps_total") == 2
    assert metrics.value("eaglegbv_phase_seconds_total", "forward") == 0.5
    with pytest.raises(InvalidArgument, match="metric='steps': expected one of eaglegbv_acc"):
        metrics.value("steps")


def test_records_of_speculation_are_those_that_load_generators_read():
    metrics = RequestMetrics()
    for accepted, nodes in ((1, 5), (4, 12), (0, 12), (4, 12)):
        metrics.count_forward(
            offered=4, accepted=accepted, committed=accepted + 1, nodes=nodes, plan="otbv 3x4"
        )
    metrics.count_forward(offered=0, accepted=0, committed=1, nodes=0, plan="none")
    record = vllm_record(metrics, steps=True)
    assert record["mean_acceptance_length"] == 1 + 9 / 4
    assert record["draft_acceptance_rate"] == 9 / 41
    assert record["acceptance_histogram"] == [1, 1, 0, 0, 2]
    assert len(record["acceptance_histogram"]) == record["num_spec_tokens"] + 1
    assert record["num_spec_steps"] == sum(record["acceptance_histogram"]) == 4
    assert (record["per_step_accepted"], record["per_step_drafted"]) == (
        [1, 4, 0, 4],
        [5, 12, 12, 12],
    )
    assert "per_step_accepted" not in vllm_record(metrics, steps=False)
    other = sglang_record(metrics)
    assert other["spec_accept_length"] == record["mean_acceptance_length"]
    assert other["spec_verify_ct"] == 4
    assert vllm_record(RequestMetrics(), steps=False)["mean_acceptance_length"] == 1


def test_exposition_is_prometheus_text():
    metrics = EngineMetrics()
    metrics.on_step(record({'a "quoted\\ plan': 1}))
    metrics.set(KV_USED, 40)
    lines = metrics.exposition().splitlines()
    at = lines.index("# TYPE eaglegbv_request_forwards_total counter")
    assert lines[at - 1].startswith("# HELP eaglegbv_request_forwards_total ")
    assert lines[at + 1] == r'eaglegbv_request_forwards_total{plan="a \"quoted\\ plan"} 1'
    assert "# TYPE eaglegbv_kv_slots_used gauge" in lines
    assert "eaglegbv_kv_slots_used 40" in lines
    assert 'eaglegbv_phase_seconds_total{phase="draft"} 0.125' in lines


def test_a_line_tells_operators_what_is_done_while_there_is_work(monkeypatch, caplog):
    monkeypatch.setattr(server_metrics, "LOG_SECONDS", 0.05)
    engine = EngineMetrics()
    served = server_metrics.ServerMetrics("tiny", engine)
    lines = []

    async def watch() -> None:
        reporting = asyncio.create_task(served.report())
        for busy in (False, True, False):
            if busy:
                counts = {measures.STEPS: 3, measures.COMMITTED: 10}
                for metric, count in counts.items():
                    engine.add(metric, count)
                engine.add(FORWARDS, 3, "none")
                engine.add(FORWARDS, 1, "gbv 2x4")
                for metric, value in (
                    (measures.RUNNING, 4),
                    (measures.WAITING, 2),
                    (KV_USED, 30),
                    (measures.KV_SLOTS, 120),
                ):
                    engine.set(metric, value)
            await asyncio.sleep(0.12)
            lines.append(list(caplog.messages))
        reporting.cancel()

    with caplog.at_level(logging.INFO):
        asyncio.run(watch())
    assert lines[0] == []
    assert lines[1] == lines[2]  # nothing is told where nothing was done
    assert lines[1] == [
        "running 4, waiting 2, KV 25.0%, 200.0 tokens/s, 2.50 tokens a verification"
    ]
