"""FlashInfer's kernels agree with PyTorch's attention; on a CPU, stand-ins read their plans."""

import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from gpu.cuda.flashinfer_on_host import HostKernels
from gpu.ptx.lanes import MemoryFault
from support.flashinfer_stand import StandKernels
from support.pretend_device import PretendDevice
from support.ragged_batches import (
    BATCHES,
    LAYERS,
    SCALE,
    SHUFFLED,
    SIZES,
    SLOTS,
    Sizes,
    leaves,
    new_rows,
    padded,
    pools,
)

from eaglegbv.attention.base import AttentionCall, BranchShape, Segment, pack
from eaglegbv.attention.flashinfer import (
    FlashInferKernels,
    FlashInferPagedAttention,
    PackedMasks,
    PlannedWrapper,
    StaticTreeAttention,
    check_pool,
    paged_attention,
    workspace_bytes,
)
from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.attention.torch import TorchPagedAttention
from eaglegbv.cuda_graphs import Bucket
from eaglegbv.errors import InvalidArgument

CALL = AttentionCall(0, SCALE)


@dataclass(frozen=True)
class Place:
    """Where kernels run, on a GPU or interpreted on the host, and what makes their wrappers."""

    device: str
    kernels: FlashInferKernels


HOST = pytest.param("host", marks=pytest.mark.on_host)


@pytest.fixture(params=[pytest.param("gpu", marks=pytest.mark.gpu), HOST])
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "host":
        request.getfixturevalue("on_host")
        return Place("cpu", HostKernels())
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("flashinfer")
    return Place("cuda", FlashInferKernels())


def branch_shape(
    requests: int, branches: int, levels: int, sizes: Sizes = SIZES, *, max_context: int = SLOTS
) -> BranchShape:
    return BranchShape(
        requests=requests,
        branches=branches,
        levels=levels,
        max_context=max_context,
        heads=sizes.heads,
        scale=SCALE,
    )


def check_kernels(place: Place, name, sizes=SIZES, *, tolerance=0.03, **scores: Any) -> None:
    """Check that FlashInfer attends as PyTorch does, over a named batch, in every layer."""
    ours, reference = pools(place.device, sizes=sizes)
    attention = FlashInferPagedAttention(ours, place.kernels)
    expected_by = TorchPagedAttention(reference)
    batch = pack(BATCHES[name], place.device)
    for layer in range(LAYERS):
        q, k, v = new_rows(batch.rows, place.device, sizes=sizes)
        found, expected = (
            a.attend(AttentionCall(layer, SCALE, **scores), q, k, v, batch)
            for a in (attention, expected_by)
        )
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(ours.keys, reference.keys)
    assert torch.equal(ours.values, reference.values)
    assert not attention.fallbacks


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", BATCHES)
def test_plans_mean_what_pytorchs_attention_does(name, softcap, window):
    place = Place("cpu", StandKernels())
    check_kernels(place, name, tolerance=0.02, softcap=softcap, window=window)
    # Planned once for both layers.
    assert [stand.plans for stand in place.kernels.made] == [1]


def test_heads_may_come_in_another_order_in_memory():
    """As from models that turn queries by joining halves; kernels look at no strides of them."""
    ours, reference = pools()
    batch = pack(BATCHES["ragged trees"])
    q, k, v = new_rows(batch.rows)
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    found = FlashInferPagedAttention(ours, StandKernels()).attend(CALL, turned, k, v, batch)
    expected = TorchPagedAttention(reference).attend(CALL, q, k, v, batch)
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


def test_wrappers_are_planned_again_for_a_new_batch_and_kept_apart_by_window():
    kernels = StandKernels()
    attention = FlashInferPagedAttention(pools()[0], kernels)
    for _ in range(2):
        batch = pack(BATCHES["ragged trees"])
        q, k, v = new_rows(batch.rows)
        for layer in range(LAYERS):
            for window in (None, 4, 1000):
                attention.attend(AttentionCall(layer, SCALE, window), q, k, v, batch)
    # A window no text reaches is none.
    assert [stand.plans for stand in kernels.made] == [2, 2]


def test_sinks_are_counted_and_served_by_pytorch(caplog):
    ours, reference = pools()
    attention = FlashInferPagedAttention(ours, StandKernels())
    batch = pack(BATCHES["ragged trees"])
    q, k, v = new_rows(batch.rows)
    sinks = torch.linspace(-1, 1, SIZES.heads)
    for _ in range(2):
        found = attention.attend(CALL._replace(sinks=sinks), q, k, v, batch)
    expected = TorchPagedAttention(reference).attend(CALL._replace(sinks=sinks), q, k, v, batch)
    assert torch.equal(found, expected)
    assert attention.fallbacks == {"sinks": 2}
    assert len([r for r in caplog.records if "sinks" in r.getMessage()]) == 1


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", BATCHES)
def test_kernels_agree_with_pytorchs_attention(name, softcap, window, place):
    check_kernels(place, name, softcap=softcap, window=window)


@pytest.mark.parametrize("name", ["ragged trees", "prompts", "plain decoding"])
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(2, 2, 128),
        Sizes(8, 2, 64),  # decoded by the kernels of prompts
        Sizes(16, 1, 128),
        Sizes(4, 2, 256),
        Sizes(4, 2, 64, torch.float16),
    ],
    ids=str,
)
def test_kernels_of_other_sizes_agree(name, sizes, place):
    check_kernels(place, name, sizes)


@pytest.mark.parametrize("place", [HOST], indirect=True)
@pytest.mark.parametrize("name", ["long texts", "plain decoding of long texts"])
def test_long_texts_are_split_among_blocks(name, place, on_host):
    check_kernels(place, name)
    assert any("MergeStates" in kernel for kernel in on_host.launched)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_kernels_of_fixed_sizes_agree(name, window, place):
    """Planned anew for other texts of as many rows."""
    ours, reference = pools(place.device)
    segments, bucket = padded(BATCHES[name])
    static = FlashInferPagedAttention(ours, place.kernels).static(bucket, max_context=SLOTS)
    expected_by = TorchPagedAttention(reference)
    turned = [*segments[-2::-1], segments[-1]]
    for layer, own in enumerate((segments, turned)):
        batch = pack(own, place.device)
        q, k, v = new_rows(batch.rows, place.device)
        static.plan(batch)
        found, expected = (
            a.attend(AttentionCall(layer, SCALE, window), q, k, v, batch)
            for a in (static, expected_by)
        )
        # Rows that pad share a slot with others here.
        torch.testing.assert_close(found[:-1], expected[:-1], atol=0.03, rtol=0.03)


def test_batches_of_all_sizes_share_their_lists_of_keys():
    """A list for each size would take 33 MB at 64 requests of 131,000 tokens."""
    attention = FlashInferPagedAttention(pools()[0], StandKernels())
    lists = [
        attention.static(Bucket(requests, rows), max_context=SLOTS)._key_slots
        for requests in (64, 1, 4, 16, 64)
        for rows in (80, 256)
    ]
    # The largest number of rows needs more than was there at first; all later ones use that.
    assert len({keys.data_ptr() for keys in lists[1:]}) == 1
    assert len(lists[1]) >= 64 * SLOTS + 256
    drafts = [attention.branches(branch_shape(rows, 2, 4))._buffers for rows in (64, 1, 8)]
    assert len({buffers.key_slots.data_ptr() for buffers in drafts}) == 1


@pytest.mark.parametrize("sizes", [SIZES, Sizes(8, 2, 64)], ids=str)
def test_kernels_of_drafted_rows_agree(sizes, place):
    """Level by level, for texts of two steps; rows of a request go on from each other's parents."""
    shape = branch_shape(2, 3, 3, sizes)
    ours, reference = pools(place.device, sizes=sizes)
    both = (
        FlashInferPagedAttention(ours, place.kernels).branches(shape),
        TorchPagedAttention(reference).branches(shape),
    )
    for lengths, parents in (((5, 300), [[0, 0, 2], [0, 2, 1]]), ((40, 8), None)):
        slots = SHUFFLED[800:818].view(2, 3, 3)
        for left in (ours.keys, ours.values):  # by an earlier text, of slots to come
            left[0, SHUFFLED[806:]] = torch.nan
        for branches in both:
            branches.plan([SHUFFLED[: lengths[0]], SHUFFLED[400 : 400 + lengths[1]]], slots)
        chains = None
        for level in range(3):
            if parents is not None:
                own = torch.arange(3).expand(2, 3).unsqueeze(2)
                above = [] if chains is None else [chains.cpu()[[[0], [1]], parents]]
                chains = torch.cat([*above, own], dim=2).to(place.device)
            q, k, v = new_rows(6, place.device, sizes=sizes)
            found, expected = (
                branches.attend(level, q.roll(level, 0), k, v, chains) for branches in both
            )
            torch.testing.assert_close(found, expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("place", [HOST], indirect=True)
def test_masks_are_read_from_elsewhere_unless_their_offsets_are_mended(place, on_host, monkeypatch):
    """Elsewhere there may be no tensor, or one that says something else."""
    monkeypatch.setattr(PlannedWrapper, "_mend_offsets", lambda self, masks: None)
    with pytest.raises((RuntimeError, AssertionError)):
        check_kernels(place, "long texts")
    assert all(isinstance(fault, MemoryFault) for fault in on_host.faults)
    on_host.faults.clear()


@pytest.mark.on_host
@pytest.mark.parametrize("name", BATCHES)
def test_flashinfers_plans_wait_for_nothing(name, on_host, monkeypatch):
    """No number is read from the device, and no copy to it is waited for."""
    monkeypatch.setattr(on_host, "on_launch", lambda launched: None)
    monkeypatch.setattr(torch.cuda, "Event", Mock)  # has always happened
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
                used.attend(CALL, *new, batch)
        shape = branch_shape(2, 3, 2)
        branches = attention.branches(shape)
        for length in (3, 300):
            branches.plan([torch.arange(length)] * 2, torch.arange(12).view(2, 2, 3))
            for level in range(shape.levels):
                new = [part.to("cuda", non_blocking=True) for part in new_rows(6)]
                branches.attend(level, *new, None)
        assert (device.reads, device.blocking) == ([], [])
    assert on_host.launched


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
            used.attend(CALL, *new_rows(batch.rows, sizes=sizes), batch)
    for requests, branches in DRAFTS:
        shape = branch_shape(requests, branches, 2, sizes, max_context=4096)
        slots = torch.zeros((requests, shape.levels, branches), dtype=torch.int64)
        texts = [torch.arange(4000 // requests)] * requests
        attention.branches(shape).plan(texts, slots)


@pytest.mark.on_host
@pytest.mark.parametrize(
    "sizes", [Sizes(32, 8, 128), Sizes(64, 8, 128), Sizes(32, 2, 128), Sizes(8, 8, 128)], ids=str
)
def test_wrappers_have_the_room_that_flashinfer_plans_with(sizes, on_host, monkeypatch):
    """For an H100's multiprocessors; FlashInfer's plan refuses to go beyond what it was given."""
    monkeypatch.setattr(on_host, "on_launch", lambda launched: None)
    pool = KVPool(1, 4096, sizes.kv_heads, sizes.head_dim, sizes.dtype)
    plan_everything(FlashInferPagedAttention(pool, HostKernels()), sizes)
    assert on_host.launched
    less = {"workspace_bytes": lambda *given, **named: 1 << 20, "_PLAN_BYTES": 1 << 10}
    for name, little in less.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"eaglegbv.attention.flashinfer.{name}", little)
            with pytest.raises(RuntimeError, match="overflow"):
                plan_everything(FlashInferPagedAttention(pool, HostKernels()), sizes)


def test_pools_that_no_kernel_serves_are_refused_by_name():
    with pytest.raises(InvalidArgument, match=r"head_dim=80: expected one of \[64, 128, 256\]"):
        check_pool(KVPool(1, 16, 1, 80, torch.bfloat16))
    with pytest.raises(InvalidArgument, match=r"dtype='torch.float32'"):
        check_pool(KVPool(1, 16, 1, 64, torch.float32))


def test_a_pool_that_flashinfer_cannot_serve_falls_back_and_is_counted(caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with PretendDevice():
        narrow = KVPool(1, 16, 1, 80, torch.bfloat16, "cuda")
        fitting = KVPool(1, 16, 1, 64, torch.bfloat16, "cuda")
        found = [paged_attention(pool) for pool in (narrow, fitting)]
    assert all(isinstance(attention, TorchPagedAttention) for attention in found)
    assert "head_dim=80" in caplog.records[0].getMessage()
    assert "attention='flashinfer'" in caplog.records[1].getMessage()
    assert "pip install -e '.[gpu]'" in caplog.records[1].getMessage()
    segment = Segment.causal(torch.zeros(2, dtype=torch.int64), torch.arange(0), torch.arange(2))
    q = torch.zeros((2, 1, 64), dtype=torch.bfloat16)
    for _ in range(3):
        found[1].attend(CALL, q, q, q, pack([segment]))
    assert [attention.fallbacks for attention in found] == [{}, {"attention": 3}]


def test_wrappers_are_given_as_much_as_their_plans_may_take():
    """Sizes by FlashInfer's own plan, for the 132 multiprocessors of an H100."""
    few = workspace_bytes(32, 8, 128, processors=132, rows=64, requests=17)
    assert few == 128 << 20
    # 16 query heads a key head; many requests that are recorded together.
    assert workspace_bytes(32, 2, 128, processors=132) >= 266 << 20
    assert workspace_bytes(32, 2, 128, processors=132, rows=8, requests=2) >= 266 << 20
    assert workspace_bytes(32, 8, 128, processors=132, rows=160, requests=129) >= 268 << 20
    assert workspace_bytes(64, 8, 128, processors=132, rows=80, requests=65) >= 278 << 20


# --- masks lie where the kernels read them
@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize("name", BATCHES)
def test_every_bit_of_a_packed_mask_lies_where_the_kernel_reads_it(name, window):
    segments = BATCHES[name]
    masks = PackedMasks.of(segments, window)
    assert masks.bits.dtype == torch.uint8
    assert masks.byte_offsets.dtype == torch.int32
    assert len(masks.bits) == masks.byte_offsets[-1]
    for segment, first in zip(segments, masks.byte_offsets.tolist(), strict=False):
        dense = segment.key_mask(window)
        for q in range(segment.num_new):
            for k in range(segment.num_keys):
                bit = q * segment.num_keys + k
                found = int(masks.bits[first + bit // 8]) >> bit % 8 & 1
                assert found == (1 if dense is None else int(dense[q, k]))


@pytest.mark.parametrize("window", [None, 4])
def test_masks_of_prompts_are_made_where_they_are_read(window):
    expected = PackedMasks.of(BATCHES["trees and a prompt"], window).bits
    with PretendDevice() as device:
        # The bits of a prompt alone: nothing of its size is copied there.
        found = PackedMasks.of(BATCHES["trees and a prompt"], window, "cuda")
        assert found.bits.device.type == "cuda"
        assert not device.reads
        assert not device.blocking
        assert torch.equal(found.bits.cpu(), expected)


@pytest.mark.parametrize("window", [None, 3, 7])
@pytest.mark.parametrize("name", BATCHES)
def test_one_kernel_packs_the_masks_of_all_requests(name, window, monkeypatch):
    """Interpreted on a CPU; trees, prompts and single tokens, with and without padding."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for segments in (BATCHES[name], padded(BATCHES[name])[0]):
        monkeypatch.setattr("eaglegbv.attention.flashinfer.runs_kernels", lambda _: False)
        expected = PackedMasks.of(segments, window)
        monkeypatch.setattr("eaglegbv.attention.flashinfer.runs_kernels", lambda _: True)
        found = PackedMasks.of(segments, window, device)
        assert torch.equal(found.bits.cpu(), expected.bits)
        assert torch.equal(found.byte_offsets, expected.byte_offsets)
