"""Who runs: by precedence, never more than fits, and the first in precedence always gets on."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eaglegbv.attention.kv_cache import SlotAllocator
from eaglegbv.config import PLAIN
from eaglegbv.errors import InvalidArgument
from eaglegbv.metrics import Phase
from eaglegbv.request import Request
from eaglegbv.rng import RequestRng
from eaglegbv.sampling import SamplingParams
from eaglegbv.scheduler.kv_slots import KVSlots
from eaglegbv.scheduler.prefix_cache import PrefixCache
from eaglegbv.scheduler.scheduler import GROWTH, PrefillChunk, Scheduler, StepBatch


class Pool:
    """A scheduler over a pool, and a stand-in for the engine: every text token is 0."""

    def __init__(
        self, *, max_batch: int, slots: int, prefill_tokens: int = 1000, share: bool = False
    ) -> None:
        self.allocator = SlotAllocator(slots)
        self.cache = PrefixCache(self.allocator, enabled=share)
        self.kv = KVSlots(self.allocator, self.cache)
        self.scheduler = Scheduler(
            max_batch=max_batch,
            prefill_tokens=prefill_tokens,
            cache=self.cache,
            vacate=self.vacate,
        )

    def add(self, *requests: Request) -> None:
        for r in requests:
            self.scheduler.add(r)

    def vacate(self, r: Request) -> None:
        self.cache.store(r, r.context, followed=False)
        self.kv.free(r)

    def remove(self, r: Request) -> None:
        self.scheduler.remove(r)
        self.vacate(r)

    def step(self, *, new: int = 1) -> StepBatch:
        """Let everybody in the batch get on, decoding requests by ``new`` tokens."""
        batch = self.scheduler.next_batch()
        for r in batch.decoding:
            self.kv.allocate(r, min(r.step_slots, self.allocator.num_slots - r.context))
        for chunk in batch.reading:
            self.kv.allocate(chunk.request, chunk.count)
        for chunk in batch.reading:
            first = chunk.brings_first_token
            self.kv.commit(chunk.request, list(range(chunk.count)))
            chunk.request.token_ids += [0] * first
        for r in batch.decoding:
            count = min(new, len(r.borrowed), r.max_tokens - len(r.token_ids))
            self.kv.commit(r, list(range(count)))
            r.token_ids += [0] * count
        for r in batch.requests:
            if len(r.token_ids) == r.max_tokens:
                self.remove(r)
        self.kv.check(self.scheduler.running)
        return batch


def request(number, *, prompt=4, max_tokens=5, step_slots=1, priority=0):
    """A request that needs ``prompt`` + ``max_tokens`` + 1: 10 by default."""
    return Request(
        number=number,
        prompt_ids=(0,) * prompt,
        params=SamplingParams(max_tokens=max_tokens),
        plan=PLAIN,
        stream=RequestRng(number),
        max_tokens=max_tokens,
        step_slots=step_slots,
        priority=priority,
    )


def numbers(batch):
    return sorted(r.number for r in batch.requests)


def decoding(batch):
    return [r.number for r in batch.decoding]


def reading(batch):
    return [(chunk.request.number, chunk.count) for chunk in batch.reading]


def test_a_new_scheduler_has_no_work():
    scheduler = Pool(max_batch=4, slots=100).scheduler
    assert not scheduler.has_work
    assert scheduler.first is None
    assert scheduler.next_batch().empty


def test_requests_run_in_order_of_arrival_up_to_the_largest_batch():
    pool = Pool(max_batch=2, slots=1000)
    requests = [request(i) for i in range(4)]
    pool.add(*requests)
    assert reading(pool.step()) == [(0, 4), (1, 4)]
    assert decoding(pool.step()) == [0, 1]
    assert pool.scheduler.num_waiting == 2
    pool.remove(requests[0])
    batch = pool.step()
    assert (decoding(batch), reading(batch)) == ([1], [(2, 4)])
    pool.remove(requests[1])
    pool.remove(requests[2])
    assert numbers(pool.step()) == [3]
    pool.remove(requests[3])
    assert not pool.scheduler.has_work
    assert pool.allocator.num_free == 1000


def test_a_request_is_admitted_when_everybody_can_grow():
    # 10 slots each: the third is one short.
    pool = Pool(max_batch=9, slots=29)
    requests = [request(i) for i in range(3)]
    pool.add(*requests)
    assert numbers(pool.step()) == [0, 1]
    pool.remove(requests[1])
    assert numbers(pool.step()) == [0, 2]


def test_exactly_as_many_slots_as_needed_are_enough():
    pool = Pool(max_batch=9, slots=30)
    pool.add(*(request(i) for i in range(3)))
    assert numbers(pool.step()) == [0, 1, 2]


def test_answers_longer_than_the_growth_do_not_claim_their_slots_at_once():
    each = 4 + 1 + GROWTH
    pool = Pool(max_batch=9, slots=3 * each)
    pool.add(*(request(i, max_tokens=2 * GROWTH) for i in range(4)))
    assert numbers(pool.step()) == [0, 1, 2]


def test_a_large_request_is_not_overtaken():
    pool = Pool(max_batch=9, slots=30)
    first, large, small = request(0), request(1, prompt=20), request(2)
    pool.add(first, large, small)
    assert numbers(pool.step()) == [0]
    pool.remove(first)
    assert numbers(pool.step()) == [1]
    pool.remove(large)
    assert numbers(pool.step()) == [2]


def test_a_waiting_request_may_be_removed():
    pool = Pool(max_batch=1, slots=1000)
    requests = [request(i) for i in range(3)]
    pool.add(*requests)
    pool.step()
    pool.remove(requests[1])
    pool.remove(requests[0])
    assert numbers(pool.step()) == [2]


def test_a_long_prompt_is_read_in_parts_beside_those_that_decode():
    pool = Pool(max_batch=9, slots=1000, prefill_tokens=10)
    pool.add(request(0, max_tokens=90))
    pool.step()
    pool.add(request(1, prompt=25, max_tokens=90), request(2, prompt=7, max_tokens=90))
    batches = [pool.step() for _ in range(5)]
    # In order of arrival, ten tokens a step; who decodes does so in every step.
    expected = [[(1, 10)], [(1, 10)], [(1, 5), (2, 5)], [(2, 2)], []]
    assert [reading(batch) for batch in batches] == expected
    assert [decoding(batch) for batch in batches] == [[0], [0], [0], [0, 1], [0, 1, 2]]


def test_the_last_part_of_a_new_prompt_alone_brings_a_token():
    pool = Pool(max_batch=9, slots=1000, prefill_tokens=10)
    r = request(0, prompt=12)
    pool.add(r)
    assert not pool.step().reading[0].brings_first_token
    batch = pool.scheduler.next_batch()
    assert batch.reading[0].brings_first_token
    assert pool.step().decoding == []
    pool.step()
    pool.scheduler.preempt(r)
    assert r.length_to_read == 13
    batches = [pool.scheduler.next_batch(), pool.step()]
    assert not any(p.brings_first_token for batch in batches for p in batch.reading)


def test_when_slots_run_short_the_last_comer_is_preempted_and_goes_on_in_its_old_place():
    pool = Pool(max_batch=9, slots=2 * (4 + 1 + GROWTH))
    first, second, third = (request(i, max_tokens=60) for i in range(3))
    pool.add(first, second, third)
    while not second.metrics.preemptions:
        assert 2 not in numbers(pool.step())
    assert second.context == 0
    generated = len(second.token_ids)
    assert 0 < generated < 60
    assert pool.scheduler.first is first
    while not second.context:
        assert numbers(pool.step()) in ([0], [1])
    # It is back before the third, which came later; it reads its text again.
    assert second.context == 4 + generated - 1
    assert third.context == 0
    while pool.scheduler.has_work:
        pool.step()
    assert [len(r.token_ids) for r in (first, second, third)] == [60] * 3
    assert first.metrics.preemptions == 0
    assert pool.allocator.num_free == pool.allocator.num_slots


def test_a_tree_that_does_not_fit_waits_and_keeps_its_text():
    pool = Pool(max_batch=9, slots=2 * (4 + 5 + GROWTH))
    first, second = (request(i, max_tokens=60, step_slots=5) for i in range(2))
    pool.add(first, second)
    while numbers(pool.step()) == [0, 1]:
        pass
    # Of 82 slots their texts held 37 + 37, and only one tree of 5 fitted what was left.
    assert (first.context, second.context) == (38, 37)
    assert second.metrics.preemptions == 0
    while not second.metrics.preemptions:
        assert numbers(pool.step()) == [0]
    # First's own tree would not have fitted any more.
    assert first.context - 1 + 37 + 5 == 82 + 1


def test_better_priorities_come_first_and_preempt_worse_ones():
    pool = Pool(max_batch=2, slots=1000)
    low, lower = request(0, priority=5), request(1, priority=9)
    pool.add(low, lower)
    assert numbers(pool.step()) == [0, 1]
    urgent, equal = request(2, priority=1), request(3, priority=5)
    pool.add(equal, urgent)
    # The worst gives way, and no request of the same priority.
    assert numbers(pool.step()) == [0, 2]
    assert lower.metrics.preemptions == 1
    assert low.metrics.preemptions == 0
    pool.remove(urgent)
    assert numbers(pool.step()) == [0, 3]
    pool.remove(low)
    assert numbers(pool.step()) == [1, 3]


def test_nobody_is_preempted_in_vain():
    pool = Pool(max_batch=9, slots=60)
    pool.add(request(0, max_tokens=20, priority=1), request(1, max_tokens=20, priority=7))
    assert numbers(pool.step()) == [0, 1]
    # Even alone beside request 0 it would not fit.
    pool.add(request(2, prompt=30, max_tokens=10, priority=3))
    assert numbers(pool.step()) == [0, 1]
    assert pool.scheduler.preemptions == 0


def test_only_running_requests_can_be_preempted():
    pool = Pool(max_batch=9, slots=60)
    r = request(0)
    pool.add(r)
    with pytest.raises(InvalidArgument, match="request=0: expected one that runs"):
        pool.scheduler.preempt(r)


def test_a_request_that_can_never_fit_is_refused():
    pool = Pool(max_batch=9, slots=30)
    pool.add(request(0, prompt=10, max_tokens=19, step_slots=7))
    with pytest.raises(InvalidArgument) as caught:
        pool.add(request(1, prompt=10, max_tokens=20, step_slots=7))
    assert str(caught.value) == (
        "prompt='10 tokens + 20 to generate': expected at most 29 tokens, which the KV pool holds: "
        "a smaller max_tokens, or more kv_slots"
    )
    assert numbers(pool.step()) == [0]


def test_texts_in_the_cache_need_no_room_of_their_own():
    """Two requests share three blocks of 16: the second needs but what is left of its text."""
    pool = Pool(max_batch=9, slots=2 * (50 + 5 + 1) - 3 * 16, share=True)
    first, second = request(0, prompt=50), request(1, prompt=50)
    pool.add(first)
    pool.step()
    pool.cache.store(first, first.context, followed=False)
    pool.add(second)
    assert reading(pool.step()) == [(1, 2)]
    assert second.shared == 48
    assert second.metrics.cached_tokens == 48
    assert second.slots[:48].tolist() == first.slots[:48].tolist()


SECONDS = {
    Phase.DRAFT: 0.1,
    Phase.FORWARD: 1.0,
    Phase.VERIFY: 0.2,
    Phase.COMMIT: 0.4,
    Phase.PREFILL: 0.3,
}


def test_a_mixed_forward_is_prefill_for_those_who_read_and_forward_for_those_who_decode():
    first, second = request(0), request(1)
    chunks = [PrefillChunk(request(2), 60), PrefillChunk(request(3), 20)]
    # 80 rows are read, 20 are those of two trees.
    StepBatch([first, second], chunks).share_seconds(SECONDS, 100)
    for r in (first, second):
        assert r.metrics.seconds == pytest.approx(
            {Phase.DRAFT: 0.05, Phase.FORWARD: 0.1, Phase.VERIFY: 0.05, Phase.COMMIT: 0.1}
        )
    # The forward's 0.8, half of what is common, and the drafter's part, by tokens.
    for chunk, share in zip(chunks, (0.75, 0.25), strict=True):
        metrics = chunk.request.metrics
        assert metrics.seconds == pytest.approx({Phase.PREFILL: (0.8 + 0.3 + 0.3) * share})
        assert metrics.decode_seconds == 0


@pytest.mark.parametrize("count", [1, 2])
def test_time_without_prompts_is_shared_equally_and_time_of_prompts_alone_by_tokens(count):
    decoding = [request(n) for n in range(count)]
    seconds = {phase: s for phase, s in SECONDS.items() if phase is not Phase.PREFILL}
    StepBatch(decoding, []).share_seconds(seconds, 26)
    for r in decoding:
        assert r.metrics.seconds == pytest.approx({p: s / count for p, s in seconds.items()})
    chunks = [PrefillChunk(request(n), 10 + 20 * n) for n in range(count)]
    rows = sum(chunk.count for chunk in chunks)
    StepBatch([], chunks).share_seconds({Phase.PREFILL: 1.0, Phase.VERIFY: 0.2}, rows)
    for chunk in chunks:
        expected = {Phase.PREFILL: 1.2 * chunk.count / rows}
        assert chunk.request.metrics.seconds == pytest.approx(expected)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of any size and priority come, run, are pre-empted and go; nobody starves."""

    MAX_BATCH, SLOTS, PREFILL = 3, 96, 24

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(
            max_batch=self.MAX_BATCH, slots=self.SLOTS, prefill_tokens=self.PREFILL, share=True
        )
        self.alive: list[Request] = []
        self.added = 0

    @rule(
        prompt=st.integers(1, 70),
        max_tokens=st.integers(1, 60),
        step_slots=st.integers(1, 9),
        priority=st.integers(0, 2),
    )
    def add(self, prompt: int, max_tokens: int, step_slots: int, priority: int) -> None:
        r = request(
            self.added,
            prompt=prompt,
            max_tokens=max_tokens,
            step_slots=step_slots,
            priority=priority,
        )
        self.added += 1
        if prompt + max_tokens + 1 > self.SLOTS:
            with pytest.raises(InvalidArgument):
                self.pool.add(r)
            return
        self.pool.add(r)
        self.alive.append(r)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.pool.remove(self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1))))

    @precondition(lambda self: self.pool.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.pool.scheduler.preempt(data.draw(st.sampled_from(self.pool.scheduler.running)))

    @rule(new=st.integers(1, 5), times=st.integers(1, 4))
    def step(self, new: int, times: int) -> None:
        for _ in range(times):
            # The first in precedence gets on in every step.
            first = min(self.alive, key=lambda r: (r.priority, r.number), default=None)
            batch = self.pool.step(new=new)
            self.alive = [r for r in self.alive if len(r.token_ids) < r.max_tokens]
            assert first is None or first in batch.requests
            running = self.pool.scheduler.running
            keys = [(r.priority, r.number) for r in running]
            assert keys == sorted(keys)
            assert sum(chunk.count for chunk in batch.reading) <= self.PREFILL

    @invariant()
    def what_is_held_is_in_order(self) -> None:
        scheduler = self.pool.scheduler
        assert len(scheduler.running) <= self.MAX_BATCH
        self.pool.kv.check(scheduler.running)
        assert scheduler.has_work == bool(self.alive)
        assert len(scheduler.running) + scheduler.num_waiting == len(self.alive)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
