"""The engine under load: crowds, pre-emption, cancellation, shared texts; nothing leaks or differs.

Where target and drafter are tables nothing is rounded, so that every answer must be what the same
seed gives alone, token for token.
"""

import logging
from itertools import chain, repeat
from operator import attrgetter
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
from support.exact_engine import PLANS, VOCAB, ExactEngine, Spec, exact_engine

from eaglegbv.errors import EngineBusy, InvalidArgument, OutOfSlots, StepFailed
from eaglegbv.metrics import (
    FAILED_OBSERVERS,
    FAILED_STEPS,
    KV_USED,
    PREEMPTIONS,
    RUNNING,
    WAITING,
    StepRecord,
)
from eaglegbv.request import FinishReason, Request
from eaglegbv.sampling import SamplingParams

REQUESTS, KINDS = 1_000, 80


def random_specs(rng: np.random.Generator, count: int) -> list[Spec]:
    """Prompts of random length, many of which begin alike, with random settings."""
    stems = [tuple(rng.integers(VOCAB, size=60).tolist()) for _ in range(3)]

    def prompt() -> tuple[int, ...]:
        stem = stems[rng.integers(3)][: rng.integers(0, 60)] if rng.random() < 0.6 else ()
        return (*stem, *rng.integers(VOCAB, size=rng.integers(1, 20)).tolist())

    def params() -> SamplingParams:
        return SamplingParams(
            temperature=float(rng.choice([0.0, 0.5, 1.0, 1.4])),
            top_p=float(rng.choice([1.0, 0.9])),
            max_tokens=int(rng.integers(1, 16)),
            repetition_penalty=float(rng.choice([1.0, 1.0, 1.2])),
            seed=int(rng.integers(2**40)),
        )

    return [Spec(prompt(), params(), PLANS[rng.integers(len(PLANS))]) for _ in range(count)]


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_crowds_cancelled_and_preempted_at_random_answer_as_if_alone():
    rng = np.random.default_rng(0)
    exact = exact_engine(slots=640, max_batch=24, prefill_tokens=96)
    specs = random_specs(rng, KINDS)
    queue = [specs[i] for i in rng.integers(KINDS, size=REQUESTS)]
    served: list[tuple[Request, Spec]] = []
    alive: list[Request] = []
    while queue or exact.engine.has_work:
        for _ in range(min(len(queue), int(rng.integers(0, 12)))):
            spec = queue.pop()
            alive.append(exact.add(spec, priority=int(rng.integers(2))))
            served.append((alive[-1], spec))
        exact.engine.step()
        alive = [request for request in alive if not request.finished]
        running = [request for request in alive if request.context]
        if running and rng.random() < 0.1:
            exact.engine._scheduler.preempt(running[rng.integers(len(running))])
        if alive and rng.random() < 0.08:
            exact.engine.cancel(alive[rng.integers(len(alive))])
        exact.engine.check()
    assert exact.target.allocator.num_free == exact.target.allocator.num_slots
    reasons = [request.finish_reason for request, _ in served]
    assert set(reasons) == {FinishReason.LENGTH, FinishReason.CANCELLED}
    assert reasons.count(FinishReason.LENGTH) > 0.8 * REQUESTS
    # All that is to be tested did happen.
    assert exact.engine.metrics.value(PREEMPTIONS) > 50
    assert exact.engine._cache.shared > 2_500
    assert exact.engine._cache.forgotten > 50
    assert sum(r.metrics.preemptions > 1 for r, _ in served) > 5
    for request, spec in served:
        alone = exact.alone(spec)
        if request.finish_reason is FinishReason.LENGTH:
            assert request.token_ids == alone, spec
        assert request.token_ids == alone[: len(request.token_ids)], spec


def mixed(exact: ExactEngine) -> list[tuple[Request, Spec]]:
    """Requests that decode, with target layers or without, and one that has yet to prefill."""
    specs = [
        Spec((1, 2, 3), SamplingParams(max_tokens=20, seed=seed), plan)
        for seed, plan in enumerate([PLANS[0], PLANS[4], PLANS[7], PLANS[8]])
    ]
    requests = [exact.add(spec) for spec in specs]
    for _ in range(3):
        exact.engine.step()
    late = Spec((4, 5) * 9, SamplingParams(max_tokens=6, seed=9), PLANS[3])
    return [*zip(requests, specs, strict=True), (exact.add(late), late)]


FAULTS = {  # where, and after how many calls; those before and later work
    "target forward": ("target", "forward", 0),
    "draft of the second group": ("engine._drafting.drafter", "draft", 1),
    "forward inside a draft": ("draft_model", "forward", 2),
    "replay of an earlier step": ("engine._drafting.drafter", "advance", 0),
    "second verdict": ("engine._verification", "_verify", 1),
    "features of the second commit": ("engine._drafting.drafter", "observe", 1),
    "second commit": ("engine", "_extend", 1),
    "slots of the third commit": ("engine._kv", "commit", 2),
    "drafter over a prompt": ("engine._drafting.drafter", "catch_up", 0),
}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [*((fault, RuntimeError) for fault in FAULTS), ("second commit", KeyboardInterrupt)],
)
def test_a_step_that_breaks_off_gives_everything_back(fault, kind, monkeypatch):
    exact = exact_engine(slots=400)
    requests = mixed(exact)
    waiting = Spec((6,), SamplingParams(max_tokens=9, seed=3), PLANS[4])
    monkeypatch.setattr(exact.engine._scheduler, "max_batch", len(requests))
    requests.append((exact.add(waiting), waiting))
    owner, name, calls = FAULTS[fault]
    place = attrgetter(owner)(exact)
    effects = chain(repeat(DEFAULT, calls), [kind("planted")], repeat(DEFAULT))
    monkeypatch.setattr(place, name, Mock(wraps=getattr(place, name), side_effect=effects))
    if kind is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt, match="planted"):
            exact.engine.step()
        reported = None
    else:
        reported = {commit.request.number for commit in exact.engine.step()}
    monkeypatch.undo()
    exact.engine.check()
    failed = [r for r, _ in requests if r.finish_reason is FinishReason.ERROR]
    assert failed
    for request in failed:
        assert isinstance(request.error, StepFailed)
        assert f"{kind.__name__}: planted" in str(request.error)
        assert isinstance(request.error.__cause__, kind)
        assert request.context == len(request.borrowed) == 0
        assert request.target_layers == ()
        assert reported is None or request.number in reported
    # Who waited, and who was served before the fault, goes on as if alone; so does who comes next.
    requests.append((exact.add(waiting), waiting))
    exact.run()
    for request, spec in requests:
        alone = exact.alone(spec)
        assert request.token_ids == alone[: len(request.token_ids)]
        assert request in failed or request.token_ids == alone
    assert requests[-2][0] not in failed
    assert exact.target.allocator.num_free == exact.target.allocator.num_slots


def test_a_pool_that_others_hold_is_a_clear_error_and_the_engine_goes_on():
    exact = exact_engine(slots=64)
    spec = Spec((1, 2, 3), SamplingParams(max_tokens=20, seed=1), PLANS[4])
    held = exact.target.allocator.allocate(60)
    request = exact.add(spec)
    [commit] = exact.engine.step()
    assert commit.request is request
    assert isinstance(request.error, OutOfSlots)
    assert "4 free of 64" in str(request.error)
    exact.target.allocator.release(held)
    again = exact.add(spec)
    exact.run()
    assert again.token_ids == exact.alone(spec)


def test_the_check_notices_a_leak():
    exact = exact_engine(slots=64)
    exact.add(Spec((1, 2, 3), SamplingParams(max_tokens=20, seed=1), PLANS[0]))
    exact.engine.step()
    exact.target.allocator.allocate(1)
    with pytest.raises(InvalidArgument, match=r"an owner of every taken slot \(leak\)"):
        exact.engine.check()


# Observers, counters and gauges: they see every step, and harm none.

SPEC = Spec((3, 1, 4, 1, 5), SamplingParams(max_tokens=12, seed=1), PLANS[4])


@pytest.fixture
def exact() -> ExactEngine:
    return exact_engine(slots=512, prefix_cache=False)


def watcher(effect: object = None) -> Mock:
    """An observer that raises ``effect``, or calls it, at every step."""
    return Mock(on_step=Mock(side_effect=effect))


def test_an_observer_that_fails_is_told_no_more_and_harms_nobody(exact, caplog):
    bad, good = watcher(RuntimeError("disk full")), watcher()
    for observer in (bad, good):
        exact.engine.observe(observer)
    with caplog.at_level(logging.ERROR):
        requests = [exact.add(SPEC), exact.add(SPEC)]
        exact.run()
    assert [request.token_ids for request in requests] == 2 * [exact.alone(SPEC)]
    assert all(request.error is None for request in requests)
    assert bad.on_step.call_count == 1 < good.on_step.call_count
    assert "disk full" in caplog.text
    assert exact.engine.metrics.value(FAILED_OBSERVERS) == 1
    assert exact.engine.metrics.value(FAILED_STEPS) == 0


@pytest.mark.parametrize("fails", [False, True])
def test_trees_are_recorded_as_long_as_somebody_who_asked_is_told(exact, fails):
    """Not when the last has left, be it because it failed."""
    recorded: list[int] = []
    exact.engine.observe(watcher(lambda record: recorded.append(len(record.trees))))
    watchers = [watcher(RuntimeError if fails else None) for _ in range(2)]
    for own in watchers:
        exact.engine.observe(own, trees=True)
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


def test_a_step_within_a_step_is_refused(exact):
    def step(_: StepRecord) -> None:
        with pytest.raises(EngineBusy, match="expected one after another"):
            exact.engine.step()

    stepping = watcher(step)
    exact.engine.observe(stepping)
    request = exact.add(SPEC)
    exact.run()
    assert stepping.on_step.call_count > 1  # it raised nothing else
    assert request.token_ids == exact.alone(SPEC)


def test_gauges_show_the_moment(exact):
    metrics = exact.engine.metrics
    requests = [exact.add(SPEC) for _ in range(2)]
    assert (metrics.value(RUNNING), metrics.value(WAITING)) == (0, 2)
    exact.engine.step()
    assert (metrics.value(RUNNING), metrics.value(WAITING)) == (2, 0)
    assert metrics.value(KV_USED) == sum(request.context for request in requests) > 0
    for request in requests:
        exact.engine.cancel(request)
    assert (metrics.value(RUNNING), metrics.value(KV_USED)) == (0, 0)


def test_a_refused_request_changes_no_others_numbers(exact):
    spec = Spec(SPEC.prompt, SamplingParams(max_tokens=12), SPEC.plan)
    with pytest.raises(InvalidArgument, match="prompt=99"):
        exact.engine.add((99,), spec.params, spec.plan)
    request = exact.add(spec)
    exact.run()
    assert request.token_ids == exact.alone(spec)
