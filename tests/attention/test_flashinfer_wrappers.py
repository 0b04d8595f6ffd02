"""Wrappers have the room that FlashInfer's own plans take."""

import pytest
import torch
from support.cuda.flashinfer_on_host import HostKernels
from support.cuda.runtime import HostRuntime
from support.ragged_batches import SCALE, Sizes, leaves, new_rows

from eaglegbv.attention.base import BranchShape, pack
from eaglegbv.attention.flashinfer import FlashInferPagedAttention
from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.cuda_graphs import Bucket

DRAFTS = [(1, 4), (1, 64), (4, 16), (64, 4), (128, 2), (256, 1)]
BUCKETS = [Bucket(1, 8), Bucket(1, 64), Bucket(4, 256), Bucket(16, 80), Bucket(128, 160)]


def plan_everything(attention: FlashInferPagedAttention, sizes: Sizes) -> None:
    """Plan long and short batches, recorded and not, and the rows of drafts."""
    for bucket in BUCKETS:
        text = torch.arange(4000 // bucket.requests)
        pads = leaves(text[:0], bucket.rows - bucket.requests)
        batch = pack([*[leaves(text, 1)] * bucket.requests, pads])
        static = attention.static(bucket, max_context=4096)
        static.plan(batch)
        for used in (attention, static):
            used.attend(0, *new_rows(batch.rows, sizes=sizes), batch, scale=SCALE)
    for requests, branches in DRAFTS:
        shape = BranchShape(
            requests=requests,
            branches=branches,
            levels=2,
            max_context=4096,
            heads=sizes.heads,
            scale=SCALE,
        )
        slots = torch.zeros((requests, shape.levels, branches), dtype=torch.int64)
        texts = [torch.arange(4000 // requests)] * requests
        attention.branches(shape).plan(texts, slots)


@pytest.mark.on_host
@pytest.mark.parametrize(
    "sizes", [Sizes(32, 8, 128), Sizes(64, 8, 128), Sizes(32, 2, 128), Sizes(8, 8, 128)], ids=str
)
def test_wrappers_have_the_room_that_flashinfer_plans_with(
    sizes: Sizes, on_host: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an H100's multiprocessors; FlashInfer's plan refuses to go beyond what it was given."""
    monkeypatch.setattr(on_host, "on_launch", lambda launched: None)
    pool = KVPool(1, 4096, sizes.kv_heads, sizes.head_dim, sizes.dtype)
    plan_everything(FlashInferPagedAttention(pool, HostKernels()), sizes)
    assert on_host.launched
    less = {
        "workspace.workspace_bytes": lambda *given, **named: 1 << 20,
        "flashinfer_kernels._PLAN_BYTES": 1 << 10,
    }
    for name, little in less.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"eaglegbv.attention.{name}", little)
            with pytest.raises(RuntimeError, match="overflow"):
                plan_everything(FlashInferPagedAttention(pool, HostKernels()), sizes)
