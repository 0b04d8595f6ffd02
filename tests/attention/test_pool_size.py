"""Pools are as large as told, or as memory allows."""

from pathlib import Path

import pytest
import torch
from support.saved_pair import CONTEXT, save_pair
from support.tiny_models import LAYERS, tiny_model

from eaglegbv import LLM, EngineConfig, InvalidArgument
from eaglegbv.attention import kv_cache as pool_size
from eaglegbv.attention.kv_cache import KVPool, PoolSize, free_memory, slot_bytes
from eaglegbv.cuda_graphs import GraphMode
from eaglegbv.drafters.eagle import EagleDrafter
from eaglegbv.models.hf import HFTarget

CPU = torch.device("cpu")


def slots_of(size: PoolSize, *, max_context: int = 100) -> int:
    return size.slots_of(1000, max_context=max_context, least=32, device=CPU)


def test_a_number_is_a_number() -> None:
    assert slots_of(PoolSize(slots=77)) == 77
    with pytest.raises(InvalidArgument, match="max_slots=31: expected at least 32 slots"):
        slots_of(PoolSize(slots=31))


def test_bytes_are_those_of_target_and_drafter_together() -> None:
    assert slots_of(PoolSize(bytes=100_000)) == 100
    assert slots_of(PoolSize(bytes=100_000, beside=250)) == 80
    expected = "kv_bytes=39999: expected at least 40000 bytes: 32 slots of 1250 bytes"
    with pytest.raises(InvalidArgument, match=expected):
        slots_of(PoolSize(bytes=39_999, beside=250))
    with pytest.raises(InvalidArgument, match="kv_bytes=1: expected None where kv_slots is given"):
        PoolSize(slots=1, bytes=1)


def test_otherwise_a_part_of_free_memory_and_no_more_than_is_of_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_size, "free_memory", lambda device: 4_000_000)
    assert slots_of(PoolSize(beside=250)) == 4_000_000 // 4 // 1250
    monkeypatch.setattr(pool_size, "free_memory", lambda device: 10**12)
    assert slots_of(PoolSize(longest_texts=3), max_context=500) == 3 * 500 + 4096


def test_free_memory_is_what_linux_and_the_container_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert 2**20 < free_memory(CPU) < 2**50
    files = {"_MEMINFO": "MemTotal: 9 kB\nMemAvailable:    2000 kB\n", "_LIMIT": "max\n"}
    for name, text in {**files, "_USED": "600000\n"}.items():
        path = tmp_path / name
        path.write_text(text)
        monkeypatch.setattr(pool_size, name, path)
    assert free_memory(CPU) == 2_048_000
    (tmp_path / "_LIMIT").write_text("1000000\n")
    assert free_memory(CPU) == 400_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slots_bytes_are_those_of_its_tensors(dtype: torch.dtype) -> None:
    pool = KVPool(3, 10, 2, 8, dtype)
    held = pool.keys.nbytes + pool.values.nbytes
    assert 10 * slot_bytes(3, 2, 8, dtype) == 10 * pool.bytes_per_slot == held


def test_a_target_takes_the_bytes_it_is_given() -> None:
    target = HFTarget(tiny_model("llama"), max_slots=PoolSize(bytes=1_000_000, beside=64))
    each = slot_bytes(LAYERS, 2, 8, torch.float32)
    assert target.max_slots == target.pool.num_slots == 1_000_000 // (each + 64)


def test_a_slot_for_padding_is_among_the_bytes_given() -> None:
    bytes_given = PoolSize(bytes=1_000_000)
    padded = HFTarget(tiny_model("llama"), max_slots=bytes_given, graphs=GraphMode.EAGER)
    slots = 1_000_000 // slot_bytes(LAYERS, 2, 8, torch.float32)
    assert padded.max_slots + 1 == padded.pool.num_slots == slots
    counted = HFTarget(tiny_model("llama"), max_slots=100, graphs=GraphMode.EAGER)
    assert (counted.max_slots, counted.pool.num_slots) == (100, 101)


def test_the_pools_of_a_pair_are_sized_together(tmp_path: Path) -> None:
    pair = save_pair(tmp_path)
    llm = LLM(*pair, engine=EngineConfig(kv_bytes=3_000_000))
    target, drafter = llm._engine._target, llm._engine._drafting.drafter
    assert isinstance(target, HFTarget)
    assert isinstance(drafter, EagleDrafter)
    pools = [target.pool, drafter._forward.attention.pool]
    assert pools[0].num_slots == pools[1].num_slots
    each = sum(pool.bytes_per_slot for pool in pools)
    assert 3_000_000 - each < pools[0].num_slots * each <= 3_000_000
    default = LLM(*pair, engine=EngineConfig(max_batch=2))
    assert default._engine._target.max_slots == 2 * CONTEXT + 4096
