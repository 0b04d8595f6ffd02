"""Every pool has an attention that serves it."""

import pytest
import torch
from support.pretend_device import PretendDevice
from support.ragged_batches import pools

from eaglegbv.attention.base import Segment, pack
from eaglegbv.attention.flashinfer import paged_attention
from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.attention.torch import TorchPagedAttention


def test_a_pool_of_a_gpu_that_flashinfer_cannot_serve_falls_back_and_is_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", None)
    with PretendDevice():
        narrow = KVPool(1, 16, 1, 80, torch.bfloat16, "cuda")
        fitting = KVPool(1, 16, 1, 64, torch.bfloat16, "cuda")
        found = [paged_attention(pool) for pool in (narrow, fitting)]
    assert all(isinstance(attention, TorchPagedAttention) for attention in found)
    assert "head_dim=80" in caplog.records[0].getMessage()
    assert "pip install 'eaglegbv[gpu]'" in caplog.records[1].getMessage()
    segment = Segment.causal(torch.zeros(2, dtype=torch.int64), torch.arange(0), torch.arange(2))
    q = torch.zeros((2, 1, 64), dtype=torch.bfloat16)
    for _ in range(3):
        found[1].attend(0, q, q, q, pack([segment]), scale=1.0)
    assert [attention.fallbacks for attention in found] == [{}, {"attention": 3}]


def test_a_pool_on_the_cpu_has_pytorchs_attention() -> None:
    assert isinstance(paged_attention(pools()[0]), TorchPagedAttention)
