"""Observers, counters and gauges: they see every step, and harm none."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from support.exact_engine import PLANS, ExactEngine, Spec, exact_engine

from eaglegbv.errors import EngineBusy, InvalidArgument
from eaglegbv.metrics import (
    FAILED_OBSERVERS,
    FAILED_STEPS,
    FINISHED,
    KV_USED,
    RUNNING,
    WAITING,
    StepRecord,
)
from eaglegbv.request import FinishReason
from eaglegbv.sampling import SamplingParams
from eaglegbv.trace import Tracer

SPEC = Spec((3, 1, 4, 1, 5), SamplingParams(max_tokens=12, seed=1), PLANS[4])


@pytest.fixture
def exact() -> ExactEngine:
    return exact_engine(slots=512, prefix_cache=False)


class Watcher:
    """Does something at every step."""

    def __init__(self, act: Callable[[StepRecord], object]) -> None:
        self.act = act
        self.seen = 0

    def on_step(self, record: StepRecord) -> None:
        self.seen += 1
        self.act(record)


def refuse(record: StepRecord) -> None:
    raise RuntimeError(f"step {record.number}: disk full")


def test_an_observer_that_fails_is_told_no_more_and_harms_nobody(
    exact: ExactEngine, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Watcher(refuse), Watcher(lambda record: None)
    for observer in (bad, good):
        exact.engine.observe(observer)
    with caplog.at_level(logging.ERROR):
        requests = [exact.add(SPEC), exact.add(SPEC)]
        exact.run()
    assert [request.token_ids for request in requests] == 2 * [exact.alone(SPEC)]
    assert all(request.error is None for request in requests)
    assert bad.seen == 1 < good.seen
    assert "step 0: disk full" in caplog.text
    assert exact.engine.metrics.value(FAILED_OBSERVERS) == 1
    assert exact.engine.metrics.value(FAILED_STEPS) == 0


def test_an_observer_may_leave(exact: ExactEngine) -> None:
    watcher = Watcher(lambda record: None)
    exact.engine.observe(watcher)
    exact.engine.unobserve(watcher)
    exact.engine.unobserve(watcher)
    exact.add(SPEC)
    exact.run()
    assert watcher.seen == 0


@pytest.mark.parametrize("fails", [False, True])
def test_trees_are_recorded_as_long_as_somebody_who_asked_is_told(
    exact: ExactEngine, fails: bool
) -> None:
    """Not when the last has left, be it because it failed."""
    recorded: list[int] = []
    exact.engine.observe(Watcher(lambda record: recorded.append(len(record.trees))))
    watchers = [Watcher(refuse if fails else lambda record: None) for _ in range(2)]
    for watcher in watchers:
        exact.engine.observe(watcher, trees=True)
    exact.add(SPEC)
    exact.run()
    if not fails:
        exact.engine.unobserve(watchers[0])
        assert recorded[-1] == 1
        exact.add(SPEC)
        exact.run()
        assert recorded[-1] == 1
        exact.engine.unobserve(watchers[1])
    seen = len(recorded)
    exact.add(SPEC)
    exact.run()
    assert any(recorded[:seen])
    assert len(recorded) > seen
    assert not any(recorded[seen:])


def test_an_engine_goes_on_when_its_trace_is_closed(exact: ExactEngine, tmp_path: Path) -> None:
    with Tracer(tmp_path / "steps.json") as tracer:
        exact.engine.observe(tracer)
        exact.add(SPEC)
        exact.run()
    written = (tmp_path / "steps.json").read_text()
    request = exact.add(SPEC)
    exact.run()
    assert request.token_ids == exact.alone(SPEC)
    assert (tmp_path / "steps.json").read_text() == written
    assert exact.engine.metrics.value(FAILED_OBSERVERS) == 0


def test_a_step_within_a_step_is_refused(exact: ExactEngine) -> None:
    errors: list[EngineBusy] = []

    def step(_: StepRecord) -> None:
        with pytest.raises(EngineBusy, match="expected one after another") as caught:
            exact.engine.step()
        errors.append(caught.value)

    exact.engine.observe(Watcher(step))
    request = exact.add(SPEC)
    exact.run()
    assert errors
    assert request.token_ids == exact.alone(SPEC)


def test_gauges_show_the_moment(exact: ExactEngine) -> None:
    metrics = exact.engine.metrics
    requests = [exact.add(SPEC) for _ in range(2)]
    assert (metrics.value(RUNNING), metrics.value(WAITING)) == (0, 2)
    exact.engine.step()
    assert (metrics.value(RUNNING), metrics.value(WAITING)) == (2, 0)
    assert metrics.value(KV_USED) == sum(request.context for request in requests) > 0
    for request in requests:
        exact.engine.cancel(request)
    assert (metrics.value(RUNNING), metrics.value(KV_USED)) == (0, 0)


def test_a_request_that_ends_twice_counts_once(exact: ExactEngine) -> None:
    request = exact.add(SPEC)
    exact.run()
    exact.engine.finish(request, FinishReason.STOP, keep=5)
    metrics = exact.engine.metrics
    assert metrics.value(FINISHED, FinishReason.STOP) == 1
    assert metrics.value(FINISHED, FinishReason.LENGTH) == 0
    assert request.metrics.committed_tokens == 4


def test_a_refused_request_changes_no_others_numbers(exact: ExactEngine) -> None:
    spec = Spec(SPEC.prompt, SamplingParams(max_tokens=12), SPEC.plan)
    texts = []
    for bad in ((), (99,)):
        fresh = exact_engine(slots=512, prefix_cache=False)
        for _ in bad:
            with pytest.raises(InvalidArgument, match="prompt=99"):
                fresh.engine.add(bad, spec.params, spec.plan)
        request = fresh.add(spec)
        fresh.run()
        texts.append(request.token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("priority", [None, "high", 1.5, True, 2**63])
def test_a_priority_is_an_integer(exact: ExactEngine, priority: object) -> None:
    with pytest.raises(InvalidArgument, match=r"priority=.*expected an integer in"):
        exact.engine.add(SPEC.prompt, SPEC.params, SPEC.plan, priority=priority)
    assert not exact.engine.has_work


def test_a_huge_top_k_is_all_tokens_among_others_too(exact: ExactEngine) -> None:
    params = [SamplingParams(max_tokens=8, seed=1, top_k=k) for k in (2**63, 5, None)]
    requests = [exact.add(Spec(SPEC.prompt, own, SPEC.plan)) for own in params]
    exact.run()
    assert all(request.error is None for request in requests)
    assert requests[0].token_ids == requests[2].token_ids
