"""Slots have one owner each, and pools are as large as told, or as memory allows."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.tiny_models import LAYERS, tiny_model

from eaglegbv import LLM, EngineConfig, Plan
from eaglegbv.attention import kv_cache
from eaglegbv.attention.kv_cache import KVPool, PoolSize, SlotAllocator, free_memory, slot_bytes
from eaglegbv.cuda_graphs import GraphMode
from eaglegbv.drafters.eagle import EagleDrafter
from eaglegbv.errors import InvalidArgument, OutOfSlots
from eaglegbv.models.hf import HFTarget

SLOTS = 24
MEGABYTE = 1_000_000
STATM = Path("/proc/self/statm")


class AllocatorMachine(RuleBasedStateMachine):
    """Owners come, give back parts of their slots, keep some or take them back, and go."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(SLOTS)
        self.allocator.add_keeper(self.blank)
        self.owned: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []

    def blank(self, count: int) -> None:
        while count > 0 and self.kept:
            slots = self.kept.pop(0)
            self.allocator.blank(slots)
            count -= len(slots)

    @rule(count=st.integers(0, SLOTS))
    def allocate(self, count: int) -> None:
        free = self.allocator.num_free
        if count > free:
            with pytest.raises(OutOfSlots):
                self.allocator.allocate(count)
            assert self.allocator.num_free == free
            return
        slots = self.allocator.allocate(count)
        assert slots.dtype == torch.int64
        assert slots.tolist() == sorted(slots.tolist())
        self.owned.append(slots)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release_some(self, data: st.DataObject) -> None:
        owner = data.draw(st.integers(0, len(self.owned) - 1))
        slots = self.owned[owner]
        keep = torch.tensor(
            data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots))),
            dtype=torch.bool,
        )
        self.allocator.release(slots[~keep])
        self.owned[owner] = slots[keep]
        if len(slots[~keep]):
            with pytest.raises(InvalidArgument, match="released once"):
                self.allocator.release(slots[~keep])

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        slots = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        free = self.allocator.num_free
        self.allocator.keep(slots)
        self.kept.append(slots)
        assert self.allocator.num_free == free + len(slots)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        slots = self.kept.pop(data.draw(st.integers(0, len(self.kept) - 1)))
        self.allocator.take_back(slots)
        self.owned.append(slots)

    @invariant()
    def every_slot_once(self) -> None:
        assert self.allocator.num_kept == sum(len(slots) for slots in self.kept)
        self.allocator.check(self.owned)
        assert self.allocator.num_free == SLOTS - sum(len(slots) for slots in self.owned)

    @precondition(lambda self: any(len(slots) for slots in self.owned))
    @rule()
    def the_check_sees_errors(self) -> None:
        owner = next(i for i, slots in enumerate(self.owned) if len(slots))
        with pytest.raises(InvalidArgument, match="one owner each"):
            self.allocator.check([*self.owned, self.owned[owner][:1]])
        with pytest.raises(InvalidArgument, match="leak"):
            self.allocator.check([s for i, s in enumerate(self.owned) if i != owner])


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def test_kept_slots_are_handed_out_last():
    allocator = SlotAllocator(8)
    kept = allocator.allocate(4)
    asked: list[int] = []

    def blank(count: int) -> None:
        asked.append(count)
        allocator.blank(kept)

    allocator.add_keeper(blank)
    allocator.keep(kept)
    assert (allocator.num_free, allocator.num_kept) == (8, 4)
    assert allocator.allocate(4).tolist() == [4, 5, 6, 7]
    assert asked == []
    assert allocator.allocate(1).tolist() == [0]
    assert asked == [1]
    assert (allocator.num_free, allocator.num_kept) == (3, 0)


@pytest.mark.parametrize("change", ["keep", "take_back", "blank"])
def test_slots_change_only_from_the_state_they_are_in(change):
    allocator = SlotAllocator(8)
    kept = allocator.allocate(4)
    allocator.keep(kept)
    taken = allocator.allocate(2)
    wrong = [kept, torch.tensor([7])] if change == "keep" else [taken, torch.tensor([7])]
    for slots in [*wrong, torch.tensor([8]), torch.tensor([-1])]:
        with pytest.raises(InvalidArgument, match="slots="):
            getattr(allocator, change)(slots)
    with pytest.raises(InvalidArgument, match="taken"):
        allocator.release(kept)
    with pytest.raises(InvalidArgument, match=r"owned=7: expected slots that are taken"):
        allocator.check([taken, torch.tensor([7])])


def test_rows_are_written_to_the_slots_of_one_layer():
    pool = KVPool(3, 10, 2, 8, torch.float32)
    k, v = torch.randn(2, 2, 2, 8).unbind(0)
    keys, values = pool.write(1, torch.tensor([7, 2]), k, v)
    assert keys.data_ptr() == pool.keys[1].data_ptr()
    assert values.data_ptr() == pool.values[1].data_ptr()
    for part, rows in ((pool.keys, k), (pool.values, v)):
        expected = torch.zeros(3, 10, 2, 8)
        expected[1, 7], expected[1, 2] = rows
        assert torch.equal(part, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_on_a_cpu_is_of_zeros_from_a_cache_line_on(dtype):
    pool = KVPool(2, 5, 3, 8, dtype)
    for tensor in (pool.keys, pool.values):
        assert not tensor.any()
        assert tensor.data_ptr() % 64 == 0
        assert tensor.is_contiguous()
        tensor.fill_(1)


@pytest.mark.skipif(not STATM.is_file(), reason="Linux says what memory a process has touched")
def test_memory_is_touched_as_slots_come_into_use():
    before = resident()
    pool = KVPool(4, 20_000, 8, 64, torch.float32)
    assert pool.keys.nbytes > 150 * MEGABYTE
    assert resident() - before < 20 * MEGABYTE
    pool.keys.fill_(1)
    assert resident() - before > 100 * MEGABYTE


def resident() -> int:
    """Bytes of memory that this process has touched."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


CPU = torch.device("cpu")


def slots_of(size: PoolSize, *, max_context: int = 100) -> int:
    return size.slots_of(1000, max_context=max_context, least=32, device=CPU)


def test_a_number_is_a_number_and_bytes_are_those_of_target_and_drafter_together():
    assert slots_of(PoolSize(slots=77)) == 77
    assert slots_of(PoolSize(bytes=100_000)) == 100
    assert slots_of(PoolSize(bytes=100_000, beside=250)) == 80
    with pytest.raises(InvalidArgument, match="max_slots=31: expected at least 32 slots"):
        slots_of(PoolSize(slots=31))
    expected = "kv_bytes=39999: expected at least 40000 bytes: 32 slots of 1250 bytes"
    with pytest.raises(InvalidArgument, match=expected):
        slots_of(PoolSize(bytes=39_999, beside=250))


def test_otherwise_a_part_of_free_memory_and_no_more_than_is_of_use(monkeypatch):
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: 4_000_000)
    assert slots_of(PoolSize(beside=250)) == 4_000_000 // 4 // 1250
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: 10**12)
    assert slots_of(PoolSize(longest_sequences=3), max_context=500) == 3 * 500 + 4096


def test_free_memory_is_what_linux_and_the_container_leave(monkeypatch, tmp_path):
    assert 2**20 < free_memory(CPU) < 2**50
    files = {"_MEMINFO": "MemTotal: 9 kB\nMemAvailable:    2000 kB\n", "_LIMIT": "max\n"}
    for name, text in {**files, "_USED": "600000\n"}.items():
        path = tmp_path / name
        path.write_text(text)
        monkeypatch.setattr(kv_cache, name, path)
    assert free_memory(CPU) == 2_048_000
    (tmp_path / "_LIMIT").write_text("1000000\n")
    assert free_memory(CPU) == 400_000


def test_a_slot_for_padding_is_among_the_bytes_given():
    bytes_given = PoolSize(bytes=1_000_000)
    padded = HFTarget(tiny_model("llama"), max_slots=bytes_given, graphs=GraphMode.EAGER)
    slots = 1_000_000 // slot_bytes(LAYERS, 2, 8, torch.float32)
    assert padded.max_slots + 1 == padded.pool.num_slots == slots
    counted = HFTarget(tiny_model("llama"), max_slots=100, graphs=GraphMode.EAGER)
    assert (counted.max_slots, counted.pool.num_slots) == (100, 101)


def test_the_pools_of_a_pair_are_sized_together(saved_pair):
    llm = LLM(*saved_pair, plan=Plan(), engine=EngineConfig(kv_bytes=3_000_000))
    target, drafter = llm._engine._target, llm._engine._drafting.drafter
    assert isinstance(target, HFTarget)
    assert isinstance(drafter, EagleDrafter)
    pools = [target.pool, drafter._forward.attention.pool]
    assert pools[0].num_slots == pools[1].num_slots
    each = sum(2 * pool.keys[:, 0].nbytes for pool in pools)
    assert 3_000_000 - each < pools[0].num_slots * each <= 3_000_000
