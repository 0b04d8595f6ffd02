import platform

import pytest
import torch
from support.pretend_device import STAGED, PretendDevice, marked

from eaglegbv import devices
from eaglegbv.devices import fetch, named_device, processor_name, send, upload
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
