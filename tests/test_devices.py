"""Devices and types by their names, of those that are there."""

import platform
from pathlib import Path

import pytest
import torch

from eaglegbv import devices
from eaglegbv.devices import named_device, processor_name
from eaglegbv.errors import InvalidArgument


@pytest.mark.parametrize("name", ["warp", "cuda", "cuda:1", "meta", ""])
def test_a_device_that_is_not_there_is_named_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    with pytest.raises(InvalidArgument, match=f"device='{name}': expected cpu, as PyTorch finds"):
        named_device(name)
    assert named_device("cpu") == torch.device("cpu")


def test_devices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: cuda)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert named_device("cuda:1").index == 1
    with pytest.raises(InvalidArgument, match="'cuda:2': expected cpu or cuda:0 to cuda:1"):
        named_device("cuda:2")


def test_the_first_processor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: A 64: fast\n\nmodel name\t: B\n")
    monkeypatch.setattr(devices, "CPU_INFO", info)
    assert processor_name() == "A 64: fast"


@pytest.mark.parametrize("named", ["arm", ""])
def test_without_a_name_the_architecture_stands_for_it(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(devices, "CPU_INFO", info)
    monkeypatch.setattr(platform, "processor", lambda: named)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    for _ in range(2):
        assert processor_name() == (named or "aarch64")
        info.write_text("processor\t: 0\n")
