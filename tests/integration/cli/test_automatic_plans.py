"""What measures automatic plans gets them, though a seed alone asks for a fixed one."""

from collections import Counter

import pytest
from support.http_server import serving

from eaglegbv import LLM
from eaglegbv.metrics import EngineMetrics, StepRecord
from eaglegbv.request import PlanReason
from eaglegbv.server import Server

QUICK = ("--questions-set", "builtin", "--tokens", "6", "--repeats", "1", "--prompts", "2")
PLAIN = "none"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, PlanReason]]:
    """How many steps followed a plan, and why; each step has one request."""
    counted: Counter[tuple[str, PlanReason]] = Counter()
    on_step = EngineMetrics.on_step

    def counting(metrics: EngineMetrics, record: StepRecord) -> None:
        counted.update(zip(record.plans, record.reasons, strict=False))
        on_step(metrics, record)

    monkeypatch.setattr(EngineMetrics, "on_step", counting)
    return counted


def check(ran: Counter[tuple[str, PlanReason]]) -> None:
    assert {plan for plan, reason in ran if reason is PlanReason.FIXED} <= {PLAIN}
    assert sum(count for (_, reason), count in ran.items() if reason is not PlanReason.FIXED) > 1


def test_bench_batch(cli, pair, ran):
    cli("bench", "batch", *pair, *QUICK, "--ways", "auto,none", "--batches", "1")
    check(ran)


def test_demo(cli, ran):
    cli("demo", "--model", "tiny", "--questions", "1", "--max-tokens", "6")
    check(ran)


def test_bench_endpoint(cli, ran):
    asked = ("--clients", "1", "--each", "2", "--max-tokens", "6")
    with LLM("tiny") as llm, serving(Server(llm, "tiny", None, limit=4).app()) as url:
        cli("bench", "endpoint", url, *asked)
        assert PlanReason.FIXED not in {reason for _, reason in ran}
        check(ran)
        ran.clear()
        cli("bench", "endpoint", url, *asked, "--seed", "1")
        assert {reason for _, reason in ran} == {PlanReason.FIXED}
