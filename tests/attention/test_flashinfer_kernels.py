"""What FlashInfer's kernels do not serve, and FlashInfer missing, are clear errors."""

import pytest
import torch

from eaglegbv.attention.flashinfer import FlashInferKernels, check_pool
from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.errors import InvalidArgument


def test_pools_that_no_kernel_serves_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"head_dim=80: expected one of \[64, 128, 256\]"):
        check_pool(KVPool(1, 16, 1, 80, torch.bfloat16))
    with pytest.raises(InvalidArgument, match=r"dtype='torch.float32'"):
        check_pool(KVPool(1, 16, 1, 64, torch.float32))


def test_flashinfer_missing_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", None)
    with pytest.raises(InvalidArgument, match=r"attention='flashinfer'.*eaglegbv\[gpu\]"):
        FlashInferKernels()
