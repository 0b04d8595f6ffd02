import logging
import platform
import time
from pathlib import Path

import pytest
import torch
from support.pretend_device import STAGED, PretendDevice, marked

from eaglegbv import devices
from eaglegbv.devices import (
    cpu_dtype,
    dtype_name,
    end_idle_workers,
    fetch,
    named_device,
    place_of,
    processor_name,
    send,
    upload,
)
from eaglegbv.errors import InvalidArgument


# --- devices and types by their names, of those that are there
@pytest.mark.parametrize("name", ["warp", "cuda", "cuda:1", "meta", ""])
def test_a_device_that_is_not_there_is_named_with_those_that_are(monkeypatch, name):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    with pytest.raises(InvalidArgument, match=f"device='{name}': expected cpu, as PyTorch finds"):
        named_device(name)
    assert named_device("cpu") == torch.device("cpu")


def test_devices_are_counted(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: cuda)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert named_device("cuda:1").index == 1
    with pytest.raises(InvalidArgument, match="'cuda:2': expected cpu or cuda:0 or cuda:1"):
        named_device("cuda:2")


@pytest.mark.parametrize("named", ["arm", ""])
def test_without_a_name_the_architecture_stands_for_it(named, tmp_path, monkeypatch):
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(devices, "CPU_INFO", info)
    monkeypatch.setattr(platform, "processor", lambda: named)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    for _ in range(2):
        assert processor_name() == (named or "aarch64")
        info.write_text("processor\t: 0\n")


# --- copies to a device are waited for by nobody, however large
@pytest.mark.parametrize("count", [1, STAGED, STAGED + 1, 4 * STAGED])
def test_nobody_waits_for_a_copy_to_a_device(count):
    numbers = torch.arange(count, dtype=torch.int64) % 100
    with PretendDevice() as device:
        sent = send(numbers.to(torch.uint8), "cuda")
        assert marked(sent)
        assert not device.blocking
        numbers.to("cuda", non_blocking=True)
    assert device.blocking == (["pageable"] if 8 * count > STAGED else [])


def test_numbers_come_back_by_one_wait(monkeypatch):
    waits: list[torch.device] = []
    monkeypatch.setattr("eaglegbv.devices._wait_for", waits.append)
    with PretendDevice() as device:
        there = upload([1, 2, 3], dtype=torch.int64, device="cuda"), send(torch.ones(2), "cuda")
        first, second = fetch(*there)
    assert device.reads == ["fetch", "fetch"]
    assert len(waits) == 1
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [1.0, 1.0])
    assert not device.blocking


# --- the dtype that is fastest where it computes
TIMES = {
    "faster": {"bfloat16": 0.5e-3, "float32": 2e-3},
    "slower": {"bfloat16": 5e-3, "float32": 2e-3},
}


@pytest.mark.parametrize(
    ("has_bfloat16", "times", "chosen", "reason"),
    [
        (False, "faster", torch.float32, "PyTorch has no fast products in bfloat16 on this CPU"),
        (True, "faster", torch.bfloat16, "a product takes 0.5 ms in bfloat16 and 2 ms in float32"),
        (True, "slower", torch.float32, "a product takes 5 ms in bfloat16 and 2 ms in float32"),
    ],
)
def test_a_cpu_computes_in_bfloat16_only_where_products_are_faster(
    has_bfloat16, times, chosen, reason
):
    choice = cpu_dtype(has_bfloat16=has_bfloat16, seconds=lambda: TIMES[times])
    assert choice == (chosen, reason)


AUTO_DTYPE = devices._auto_dtype  # tests of other things replace it


@pytest.mark.parametrize(
    ("times", "chosen"), [("faster", torch.bfloat16), ("slower", torch.float32)]
)
def test_the_dtype_is_chosen_and_told_once(times, chosen, monkeypatch, caplog):
    timed: list[str] = []
    AUTO_DTYPE.cache_clear()
    monkeypatch.setattr(devices, "_auto_dtype", AUTO_DTYPE)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(
        devices, "_seconds_of_products", lambda: timed.append(times) or TIMES[times]
    )
    with caplog.at_level(logging.INFO, logger="eaglegbv.devices"):
        for _ in range(2):
            assert place_of("cpu", "auto") == (torch.device("cpu"), chosen)
    assert len(timed) == len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"computing in {dtype_name(chosen)}: a product takes")
    assert place_of("cpu", "float16") == (torch.device("cpu"), torch.float16)


def test_products_in_both_dtypes_are_timed():
    times = devices._seconds_of_products()
    assert set(times) == {"bfloat16", "float32"}
    assert all(0 < seconds < 60 for seconds in times.values())


def test_no_other_dtype_has_a_name():
    with pytest.raises(InvalidArgument, match="dtype='half': expected one of auto, float32"):
        place_of("cpu", "half")


# --- workers of a thread that waits for another
THREADS = Path("/proc/self/task")


@pytest.fixture
def two_torch_threads():
    number = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    end_idle_workers()
    torch.set_num_threads(number)


def _threads():
    return len(list(THREADS.iterdir()))


def _wait_for_threads(fewer_than):
    deadline = time.monotonic() + 10
    while _threads() >= fewer_than:  # they end by themselves
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(not THREADS.is_dir(), reason="threads are counted on Linux")
def test_a_thread_ends_the_workers_that_wait_for_it(two_torch_threads):
    matrix = torch.ones(512, 512)  # made by two workers
    computing = _threads()
    end_idle_workers()
    _wait_for_threads(fewer_than=computing)
    product = matrix @ matrix
    assert _threads() == computing
    end_idle_workers()
    _wait_for_threads(fewer_than=computing)
    assert torch.equal(matrix @ matrix, product)  # others do it
