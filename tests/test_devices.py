"""Devices and types by their names, of those that are there."""

import pytest
import torch

from eaglegbv.devices import named_device
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
