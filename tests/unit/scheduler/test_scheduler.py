"""Who runs, by precedence and as far as there is room; and what texts that begin alike share."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.requests import make_request

from eaglegbv.attention.kv_cache import SlotAllocator
from eaglegbv.errors import InvalidArgument
from eaglegbv.metrics import Phase
from eaglegbv.request import Request
from eaglegbv.scheduler.kv_slots import KVSlots
from eaglegbv.scheduler.prefix_cache import BLOCK, PrefixCache, idle_slots
from eaglegbv.scheduler.scheduler import GROWTH, PrefillChunk, Scheduler, StepBatch


class Shop:
    """A pool with a cache, and requests that read all they must at once."""

    def __init__(self, slots: int = 256, *, enabled: bool = True) -> None:
        self.allocator = SlotAllocator(slots)
        self.cache = PrefixCache(self.allocator, enabled=enabled)
        self.kv = KVSlots(self.allocator, self.cache)
        self.open: list[Request] = []

    def read(self, prompt: tuple[int, ...], **how: bool) -> Request:
        """Admit a request and read its prompt; a first token follows."""
        r = make_request(len(self.open), prompt, **how)
        self.open.append(r)
        self.admit(r)
        r.token_ids.append(7)
        return r

    def admit(self, r: Request) -> None:
        self.cache.lend(r, self.cache.match(r))
        self.kv.allocate(r, r.to_prefill)
        self.kv.commit(r, list(range(r.to_prefill)))
        self.check()

    def share(self, r: Request, positions: int | None = None) -> None:
        self.cache.store(r, r.context if positions is None else positions, followed=r.drafted)
        self.check()

    def close(self, r: Request) -> None:
        self.kv.free(r)
        self.check()

    def check(self) -> None:
        self.kv.check(self.open)


class Pool(Shop):
    """A scheduler over a pool, and a stand-in for the engine: every text token is 0."""

    def __init__(self, *, max_batch, slots, prefill_tokens=1000, share=False) -> None:
        super().__init__(slots, enabled=share)
        self.scheduler = Scheduler(
            max_batch=max_batch, prefill_tokens=prefill_tokens, cache=self.cache, vacate=self.vacate
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
        for chunk in batch.prefilling:
            self.kv.allocate(chunk.request, chunk.count)
        for chunk in batch.prefilling:
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


def request(number, *, prompt=4, max_tokens=5, **more):
    """A request that needs ``prompt`` + ``max_tokens`` + 1: 10 by default."""
    return make_request(number, (0,) * prompt, max_tokens=max_tokens, **more)


def numbers(batch):
    return sorted(r.number for r in batch.requests)


def decoding(batch):
    return [r.number for r in batch.decoding]


def reading(batch):
    return [(chunk.request.number, chunk.count) for chunk in batch.prefilling]


def test_a_request_is_admitted_when_everybody_can_grow():
    # 10 slots each: the third is one short.
    pool = Pool(max_batch=9, slots=29)
    requests = [request(i) for i in range(3)]
    pool.add(*requests)
    assert numbers(pool.step()) == [0, 1]
    pool.remove(requests[1])
    assert numbers(pool.step()) == [0, 2]


def test_a_large_request_is_not_overtaken():
    pool = Pool(max_batch=9, slots=30)
    first, large, small = request(0), request(1, prompt=20), request(2)
    pool.add(first, large, small)
    assert numbers(pool.step()) == [0]
    pool.remove(first)
    assert numbers(pool.step()) == [1]
    pool.remove(large)
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


def test_better_priorities_come_first_and_preempt_worse_ones():
    pool = Pool(max_batch=2, slots=1000)
    low, lower = request(0, priority=5), request(1, priority=9)
    pool.add(low, lower)
    with pytest.raises(InvalidArgument, match="request=0: expected one that runs"):
        pool.scheduler.preempt(low)
    assert numbers(pool.step()) == [0, 1]
    urgent, equal = request(2, priority=1), request(3, priority=5)
    pool.add(equal, urgent)
    # The worst gives way, and no request of the same priority.
    assert numbers(pool.step()) == [0, 2]
    assert (lower.metrics.preemptions, low.metrics.preemptions) == (1, 0)
    pool.remove(urgent)
    assert numbers(pool.step()) == [0, 3]
    pool.remove(low)
    assert numbers(pool.step()) == [1, 3]


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
    assert second.shared == second.metrics.cached_tokens == 48
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


# Texts that begin alike share slots; every block has its users, and idle ones are free memory.

TEXT = tuple(range(100))


def test_whole_blocks_are_shared_with_texts_that_go_on_alike_by_one_token():
    shop = Shop()
    first = shop.read(TEXT[:40])
    shop.share(first)
    assert first.shared == 32
    same = shop.read(TEXT[:33])
    assert same.shared == 32
    assert same.slots[:32].tolist() == first.slots[:32].tolist()
    # Token 32 differs: an EAGLE head's row 31 would too.
    other = shop.read((*TEXT[:32], 99))
    assert other.shared == 16
    # A token at least is left to read, and the key needs one.
    assert shop.read(TEXT[:32]).shared == 16
    assert shop.read(TEXT[1:40]).shared == 0


def test_of_two_that_read_the_same_text_at_once_one_takes_the_others_slots():
    shop = Shop()
    first, second = shop.read(TEXT[:40]), shop.read(TEXT[:40])
    assert second.shared == 0
    shop.share(first)
    free = shop.allocator.num_free
    shop.share(second)
    assert shop.allocator.num_free == free + 32
    assert second.slots[:32].tolist() == first.slots[:32].tolist()
    assert len(second.slots) == 40
    shop.close(first)
    # Still in use.
    assert shop.allocator.num_free == 256 - 40
    shop.close(second)
    assert shop.allocator.num_free == 256


def test_idle_blocks_are_free_and_forgotten_last_used_first_when_slots_run_out():
    shop = Shop(slots=128)
    old, new = shop.read(TEXT[:40]), shop.read(TEXT[50:90])
    for r in (old, new):
        shop.share(r)
        shop.close(r)
    assert (shop.allocator.num_free, shop.allocator.num_kept) == (128, 64)
    assert idle_slots(shop.cache.match(old)) == 32
    # 64 blank slots, then the older text's blocks.
    taken = shop.allocator.allocate(96)
    assert shop.cache.forgotten == 2
    old.token_ids, new.token_ids = [], []
    assert shop.cache.match(old) == []
    assert len(shop.cache.match(new)) == 2
    shop.allocator.allocate(32)
    assert shop.cache.match(new) == []
    assert shop.allocator.num_free == 0
    shop.allocator.release(taken)


def test_what_nobody_uses_can_be_forgotten_at_once():
    shop = Shop(slots=128)
    idle, used = shop.read(TEXT[:40]), shop.read(TEXT[50:90])
    for r in (idle, used):
        shop.share(r)
    shop.close(idle)
    shop.cache.clear()
    shop.check()
    assert shop.allocator.num_kept == 0
    assert shop.cache.match(idle) == []
    assert len(shop.cache.match(used)) == 2
    shop.close(used)
    shop.cache.clear()
    assert (shop.allocator.num_free, shop.allocator.num_kept) == (128, 0)


@pytest.mark.parametrize("fault", ["users", "shared", "slots", "idle"])
def test_the_check_sees_what_is_wrong(fault: str):
    shop = Shop()
    r, other = shop.read(TEXT[:40]), shop.read(TEXT[50:90])
    shop.share(r)
    shop.share(other)
    shop.close(other)
    block = shop.cache.match(r)[0]
    match fault:
        case "users":
            block.users += 1
        case "shared":
            r.shared -= BLOCK
        case "slots":
            block.slots = block.slots.flip(0)
        case "idle":
            shop.cache._idle.clear()
    with pytest.raises(InvalidArgument):
        shop.check()


def test_a_drafter_that_skips_begins_behind_what_it_finds_of_the_target_alone():
    shop = Shop(slots=2048)
    text = tuple(range(200))
    plain = shop.read(text)
    shop.share(plain)
    assert plain.skipped == 0
    late = shop.read(text, drafted=True, skips=True)
    assert (late.shared, late.skipped) == (192, 192)
    assert late.slots[:192].tolist() == plain.slots[:192].tolist()
    # One that must not skip reads everything.
    fixed = shop.read(text, drafted=True)
    assert (fixed.shared, fixed.skipped) == (0, 0)
    shop.share(fixed, 112)
    other = shop.read(text, drafted=True, skips=True)
    assert (other.shared, other.skipped) == (192, 192)
    # Little more to read of the target is less than all of the drafter's rows.
    shop.share(fixed, 128)
    followed = shop.read(text, drafted=True, skips=True)
    assert (followed.shared, followed.skipped) == (128, 0)
    assert followed.slots[:128].tolist() == fixed.slots[:128].tolist()


def test_what_was_skipped_is_found_behind_what_was_not():
    shop = Shop(slots=2048)
    text = tuple(range(200))
    first = shop.read(text, drafted=True, skips=True)
    shop.share(first, 64)
    first.skipped = 160
    shop.cache.store(first, 160, followed=False)
    shop.check()
    assert first.shared == 160
    # Nobody may rely on the drafter's rows behind what it skipped.
    shop.cache.store(first, 200, followed=True)
    assert first.shared == 160
    assert (shop.read(text, drafted=True).shared, shop.read(text).shared) == (64, 0)
    again = shop.read(text, drafted=True, skips=True)
    assert (again.shared, again.skipped) == (160, 160)
    shorter = shop.read(text[:70], drafted=True, skips=True)
    assert (shorter.shared, shorter.skipped) == (64, 0)
    for request in list(shop.open):
        shop.close(request)
    assert shop.read(text, drafted=True, skips=True).shared == 160


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
        sizes = {"prompt": prompt, "max_tokens": max_tokens, "step_slots": step_slots}
        r = request(self.added, priority=priority, **sizes)
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
            assert sum(chunk.count for chunk in batch.prefilling) <= self.PREFILL

    @invariant()
    def what_is_held_is_in_order(self) -> None:
        scheduler = self.pool.scheduler
        assert len(scheduler.running) <= self.MAX_BATCH
        self.pool.kv.check(scheduler.running)
        assert scheduler.has_work == bool(self.alive)
        assert len(scheduler.running) + scheduler.num_waiting == len(self.alive)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
