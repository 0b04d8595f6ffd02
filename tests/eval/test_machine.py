"""Bandwidth and arithmetic are measured."""

import torch

from eaglegbv.eval.machine import measure_machine

CPU = torch.device("cpu")


def test_a_machine_is_measured() -> None:
    machine = measure_machine(torch.float32, CPU, megabytes=1)
    assert machine.bandwidth > 1e6
    assert machine.flops > 1e6
