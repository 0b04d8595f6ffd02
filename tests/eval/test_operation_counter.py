"""Tensor operations are counted as they are dispatched."""

import torch

from eaglegbv.eval.step_bench import OperationCounter


def test_operations_are_counted() -> None:
    with OperationCounter() as counter:
        torch.ones(3).add(1).mul(2)
    assert counter.count == 3
