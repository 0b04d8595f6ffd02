"""Texts that begin alike share slots; every block has its users, and idle ones are free memory."""

import pytest
from support.requests import make_request

from eaglegbv.attention.kv_cache import SlotAllocator
from eaglegbv.errors import InvalidArgument
from eaglegbv.request import Request
from eaglegbv.scheduler.kv_slots import KVSlots
from eaglegbv.scheduler.prefix_cache import BLOCK, PrefixCache, idle_slots

TEXT = tuple(range(100))


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
    assert shop.allocator.num_free == 128
    assert shop.allocator.num_kept == 64
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
    assert shop.allocator.num_free == 128
    assert shop.allocator.num_kept == 0


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
