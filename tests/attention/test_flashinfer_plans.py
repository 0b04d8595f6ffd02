"""FlashInfer's own plans: what they wait for, and the fault in their masks."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.cuda.flashinfer_on_host import HostKernels
from support.cuda.runtime import HostRuntime
from support.flashinfer_place import Place, check_kernels
from support.pretend_device import PretendDevice
from support.ptx.lanes import MemoryFault
from support.ragged_batches import BATCHES, LAYERS, SCALE, SIZES, SLOTS, new_rows, padded

from eaglegbv.attention.base import BranchShape, pack
from eaglegbv.attention.flashinfer import (
    FlashInferPagedAttention,
    FlashInferPlans,
    StaticTreeAttention,
    Wrapper,
)
from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.attention.masks import PackedMasks


class Unmended(FlashInferPlans):
    """Leaves the offsets of masks as FlashInfer's plan does."""

    def _mend_offsets(self, wrapper: Wrapper, masks: PackedMasks) -> None:
        pass


@pytest.mark.on_host
def test_masks_are_read_from_elsewhere_unless_their_offsets_are_mended(
    host: Place, on_host: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere there may be no tensor, or one that says something else."""
    monkeypatch.setattr("eaglegbv.attention.flashinfer.FlashInferPlans", Unmended)
    with pytest.raises((RuntimeError, AssertionError)):
        check_kernels(host, "long texts")
    assert all(isinstance(fault, MemoryFault) for fault in on_host.faults)
    on_host.faults.clear()


class Moment:
    """A CUDA event that has always happened."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.mark.on_host
@pytest.mark.parametrize("name", BATCHES)
def test_flashinfers_plans_wait_for_nothing(
    name: str, on_host: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number is read from the device, and no copy to it is waited for."""
    monkeypatch.setattr(on_host, "on_launch", lambda launched: None)
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    segments = BATCHES[name]
    with_pads, bucket = padded(segments)
    with PretendDevice() as device:
        pool = KVPool(LAYERS, SLOTS, SIZES.kv_heads, SIZES.head_dim, SIZES.dtype, "cuda")
        attention = FlashInferPagedAttention(pool, HostKernels())
        static = attention.static(bucket, max_context=SLOTS)
        for _ in range(2):  # planned anew, and planned again
            for used, own in ((attention, segments), (static, with_pads)):
                batch = pack(own)
                batch = replace(batch, slots=batch.slots.to("cuda", non_blocking=True))
                new = [part.to("cuda", non_blocking=True) for part in new_rows(batch.rows)]
                if isinstance(used, StaticTreeAttention):
                    used.plan(batch)
                used.attend(0, *new, batch, scale=SCALE)
        shape = BranchShape(
            requests=2, branches=3, levels=2, max_context=SLOTS, heads=SIZES.heads, scale=SCALE
        )
        branches = attention.branches(shape)
        for length in (3, 300):
            branches.plan([torch.arange(length)] * 2, torch.arange(12).view(2, 2, 3))
            for level in range(shape.levels):
                new = [part.to("cuda", non_blocking=True) for part in new_rows(6)]
                branches.attend(level, *new, None)
        assert (device.reads, device.blocking) == ([], [])
    assert on_host.launched
