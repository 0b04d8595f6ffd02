"""Copies to a device are waited for by nobody, however large."""

import pytest
import torch
from support.pretend_device import STAGED, PretendDevice, marked

from eaglegbv.devices import fetch, send, upload


@pytest.mark.parametrize("count", [1, STAGED, STAGED + 1, 4 * STAGED])
def test_nobody_waits_for_a_copy_to_a_device(count: int) -> None:
    numbers = torch.arange(count, dtype=torch.int64) % 100
    with PretendDevice() as device:
        sent = send(numbers.to(torch.uint8), "cuda")
        assert marked(sent)
        assert not device.blocking
        numbers.to("cuda", non_blocking=True)
    assert device.blocking == (["pageable"] if 8 * count > STAGED else [])


def test_numbers_come_back_by_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr("eaglegbv.devices._wait_for", waits.append)
    with PretendDevice() as device:
        there = upload([1, 2, 3], dtype=torch.int64, device="cuda"), send(torch.ones(2), "cuda")
        first, second = fetch(*there)
    assert device.reads == ["fetch", "fetch"]
    assert len(waits) == 1
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [1.0, 1.0])
    assert not device.blocking


def test_what_stays_on_the_host_is_the_same_tensor() -> None:
    numbers = torch.zeros(STAGED)
    assert send(numbers, "cpu") is numbers
