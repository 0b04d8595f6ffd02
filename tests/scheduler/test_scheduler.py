"""Who runs: first come, first served, never more than fits."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eaglegbv.config import PLAIN, Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.params import SamplingParams
from eaglegbv.request import Request
from eaglegbv.scheduler.scheduler import Scheduler
from eaglegbv.uniforms import Stream


def request(number, *, prompt=4, max_tokens=5, plan=PLAIN):
    """A request of ``prompt`` + ``max_tokens`` + tree slots: 4 + 5 + 1 = 10 by default."""
    return Request(
        number=number,
        prompt_ids=tuple(range(prompt)),
        params=SamplingParams(max_tokens=max_tokens),
        plan=plan,
        stream=Stream(number),
        max_tokens=max_tokens,
        step_slots=plan.tree_nodes,
    )


def numbers(requests):
    return [r.number for r in requests]


def test_a_new_scheduler_has_no_work():
    scheduler = Scheduler(max_batch=4, slots=100)
    assert not scheduler.has_work
    assert scheduler.next_batch() == []


def test_requests_run_in_order_of_arrival_up_to_the_largest_batch():
    scheduler = Scheduler(max_batch=2, slots=1000)
    requests = [request(i) for i in range(4)]
    for r in requests:
        scheduler.add(r)
    assert numbers(scheduler.next_batch()) == [0, 1]
    assert numbers(scheduler.next_batch()) == [0, 1]
    scheduler.remove(requests[0])
    assert numbers(scheduler.next_batch()) == [1, 2]
    scheduler.remove(requests[1])
    scheduler.remove(requests[2])
    assert numbers(scheduler.next_batch()) == [3]
    scheduler.remove(requests[3])
    assert not scheduler.has_work


def test_a_request_needs_its_prompt_its_answer_and_its_tree():
    plan = Plan(paths=3, depth=4)
    assert request(0, prompt=7, max_tokens=11, plan=plan).slots_needed == 7 + 11 + 13
    assert request(0, prompt=7, max_tokens=11).slots_needed == 7 + 11 + 1


def test_slots_are_claimed_for_the_whole_life_of_a_request():
    scheduler = Scheduler(max_batch=9, slots=29)
    requests = [request(i) for i in range(3)]  # 10 slots each: the third is one short
    for r in requests:
        scheduler.add(r)
    assert numbers(scheduler.next_batch()) == [0, 1]
    scheduler.remove(requests[1])
    assert numbers(scheduler.next_batch()) == [0, 2]


def test_exactly_as_many_slots_as_needed_are_enough():
    scheduler = Scheduler(max_batch=9, slots=30)
    for i in range(3):
        scheduler.add(request(i))
    assert numbers(scheduler.next_batch()) == [0, 1, 2]


def test_a_large_request_is_not_overtaken():
    scheduler = Scheduler(max_batch=9, slots=30)
    first, large, small = request(0), request(1, prompt=20), request(2)
    for r in (first, large, small):
        scheduler.add(r)
    assert numbers(scheduler.next_batch()) == [0]
    assert scheduler.has_work
    scheduler.remove(first)
    assert numbers(scheduler.next_batch()) == [1]
    scheduler.remove(large)
    assert numbers(scheduler.next_batch()) == [2]


def test_a_waiting_request_may_be_removed():
    scheduler = Scheduler(max_batch=1, slots=1000)
    requests = [request(i) for i in range(3)]
    for r in requests:
        scheduler.add(r)
    scheduler.next_batch()
    scheduler.remove(requests[1])
    scheduler.remove(requests[0])
    assert numbers(scheduler.next_batch()) == [2]


def test_removing_a_request_twice_gives_its_claim_back_once():
    scheduler = Scheduler(max_batch=9, slots=20)
    requests = [request(i) for i in range(3)]
    for r in requests:
        scheduler.add(r)
    scheduler.next_batch()
    scheduler.remove(requests[0])
    scheduler.remove(requests[0])
    # One claim of ten is free: request 2 fits, and after it nothing does.
    scheduler.add(request(3))
    assert numbers(scheduler.next_batch()) == [1, 2]


def test_the_batch_handed_out_is_not_the_schedulers_own_list():
    scheduler = Scheduler(max_batch=9, slots=100)
    scheduler.add(request(0))
    scheduler.next_batch().clear()
    assert numbers(scheduler.next_batch()) == [0]


def test_a_request_that_can_never_fit_is_refused():
    scheduler = Scheduler(max_batch=9, slots=30)
    plan = Plan(paths=2, depth=3)
    scheduler.add(request(0, prompt=10, max_tokens=13, plan=plan))  # 10 + 13 + 7 = 30
    with pytest.raises(InvalidArgument) as caught:
        scheduler.add(request(1, prompt=10, max_tokens=14, plan=plan))
    assert str(caught.value) == (
        "prompt='10 tokens + 14 to generate': expected at most 23 tokens, which the KV pool holds"
    )
    assert numbers(scheduler.next_batch()) == [0]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of any size come, run and go; nobody is lost, overtaken or short of slots."""

    MAX_BATCH, SLOTS = 3, 40

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(max_batch=self.MAX_BATCH, slots=self.SLOTS)
        self.alive: list[Request] = []
        self.started: set[int] = set()
        self.added = 0

    @rule(prompt=st.integers(1, 30), max_tokens=st.integers(1, 20))
    def add(self, prompt: int, max_tokens: int) -> None:
        r = request(self.added, prompt=prompt, max_tokens=max_tokens)
        self.added += 1
        if prompt + max_tokens + 1 > self.SLOTS:
            with pytest.raises(InvalidArgument):
                self.scheduler.add(r)
            return
        self.scheduler.add(r)
        self.alive.append(r)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        r = self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1)))
        self.scheduler.remove(r)

    @rule()
    def step(self) -> None:
        batch = self.scheduler.next_batch()
        self.started |= set(numbers(batch))
        running = [r for r in self.alive if r.number in self.started]
        assert batch == running  # in order of arrival, and only who is alive
        waiting = [r for r in self.alive if r.number not in self.started]
        if waiting:
            assert not running or running[-1].number < waiting[0].number
            used = sum(r.slots_needed for r in running)
            # Whoever comes next could not be taken.
            full = len(running) == self.MAX_BATCH
            assert full or used + waiting[0].slots_needed > self.SLOTS

    @invariant()
    def what_runs_fits(self) -> None:
        running = self.scheduler.running
        assert len(running) <= self.MAX_BATCH
        assert sum(r.slots_needed for r in running) <= self.SLOTS
        assert self.scheduler.has_work == bool(self.alive)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
