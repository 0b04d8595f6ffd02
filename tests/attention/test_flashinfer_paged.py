"""FlashInfer's layout of masks and pages without a GPU, and its kernels where there is one.

On a CPU a stand-in reads plans as FlashInfer's kernels do (bits at ``q * keys + k`` behind a byte
offset, little-endian; ``plan`` leaving bit offsets there), and attends by definition.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cuda.flashinfer_on_host import HostKernels
from support.cuda.runtime import HostRuntime
from support.pretend_device import PretendDevice
from support.ptx.lanes import MemoryFault
from torch import Tensor

from eaglegbv.attention.base import PackedBatch, Segment, pack
from eaglegbv.attention.branches import BranchShape
from eaglegbv.attention.flashinfer_paged import (
    FlashInferKernels,
    FlashInferPagedAttention,
    Kernels,
    PackedMasks,
    StaticTreeAttention,
    Wrapper,
    check_pool,
    pack_bits,
    paged_attention,
    workspace_bytes,
)
from eaglegbv.attention.kv_pool import KVPool
from eaglegbv.attention.torch_paged import TorchPagedAttention
from eaglegbv.errors import InvalidArgument
from eaglegbv.graphs import Bucket

SLOTS, LAYERS = 1024, 2
SCALE = 0.11
SHUFFLED = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(0))
PARENTS = [0, 0, 0, 1, 1, 2, 3]


@dataclass(frozen=True)
class Sizes:
    """What keys, values and queries are made of."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16


SIZES = Sizes(heads=4, kv_heads=2, head_dim=64)


def tree(first: int, context: int, nodes: int, *, old: int = 0) -> Segment:
    """A tree behind ``context`` tokens whose first ``old`` nodes are there already."""
    slots = SHUFFLED[first : first + context + nodes]
    visible = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        visible[node] |= visible[PARENTS[node]]
    positions = context + visible.sum(1) - 1
    return Segment(
        token_ids=torch.zeros(nodes - old, dtype=torch.int64),
        positions=positions[old:],
        context_slots=slots[:context],
        tree_slots=slots[context:],
        tree_positions=positions,
        visible=visible[old:],
    )


def text(first: int, context: int, count: int) -> Segment:
    slots = SHUFFLED[first : first + context + count]
    return Segment.causal(torch.zeros(count, dtype=torch.int64), slots[:context], slots[context:])


BATCHES = {
    "one tree": [tree(0, 5, 7)],
    "ragged trees": [tree(0, 5, 7), tree(20, 13, 3), tree(50, 1, 1), tree(60, 31, 5)],
    "trees and a prompt": [tree(0, 6, 4), text(40, 0, 9), text(80, 11, 3)],
    "a later level": [tree(0, 9, 7, old=3), tree(30, 2, 7, old=5)],
    "prompts": [text(0, 0, 9), text(30, 4, 6), text(60, 0, 1)],
    "plain decoding": [text(0, 8, 1), text(30, 3, 1), text(60, 17, 1)],
    "long texts": [tree(0, 400, 7), tree(410, 150, 3), text(570, 300, 1)],
    "plain decoding of long texts": [text(0, 400, 1), text(410, 150, 1), text(570, 300, 1)],
}


class Stand:
    """A wrapper that attends by definition from what it was planned with."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.plans = 0
        self._mask_indptr_buf: Tensor | None = None

    def plan(self, *arguments: Any, **named: Any) -> None:
        self.plans += 1
        if self.kind == "decode":
            indptr, indices, last, heads, kv_heads, dim, page = arguments
            queries = torch.arange(len(indptr), dtype=torch.int32)
            named = {"causal": True, "packed_custom_mask": None, **named}
        else:
            queries, indptr, indices, last, heads, kv_heads, dim, page = arguments
        for offsets in (queries, indptr, indices, last):
            assert offsets.dtype == torch.int32
        assert Sizes(heads, kv_heads, dim) == SIZES
        assert page == 1
        assert (last == 1).all()
        assert named["window_left"] == -1
        self.queries, self.indptr, self.indices, self.named = queries, indptr, indices, named
        sizes = (queries[1:] - queries[:-1]) * (indptr[1:] - indptr[:-1])
        # The fault of FlashInfer's plan: bits, where the kernel counts bytes.
        self._mask_indptr_buf = torch.cat((torch.zeros(1), sizes.cumsum(0))).to(torch.int32)

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        assert q.is_contiguous()  # kernels look at no strides of these
        assert out.is_contiguous()
        keys, values = (part.squeeze(1).float() for part in kv)
        for b in range(len(self.indptr) - 1):
            own = self.indices[self.indptr[b] : self.indptr[b + 1]].long()
            rows = range(int(self.queries[b]), int(self.queries[b + 1]))
            for i, row in enumerate(rows):
                seen = [k for k in range(len(own)) if self._sees(b, i, k, len(rows), len(own))]
                for head in range(SIZES.heads):
                    kv_head = head // (SIZES.heads // SIZES.kv_heads)
                    scores = keys[own[seen], kv_head] @ q[row, head].float()
                    scores = scores * self.named["sm_scale"]
                    if (cap := self.named["logits_soft_cap"]) is not None:
                        scores = cap * torch.tanh(scores / cap)
                    out[row, head] = scores.softmax(0) @ values[own[seen], kv_head]
        return out

    def _sees(self, b: int, query: int, key: int, queries: int, keys: int) -> bool:
        packed = self.named["packed_custom_mask"]
        if packed is None:
            assert self.named["causal"]
            return key <= keys - queries + query
        assert self._mask_indptr_buf is not None
        bit = query * keys + key
        octet = int(packed[int(self._mask_indptr_buf[b]) + bit // 8])
        return bool(octet >> bit % 8 & 1)


class StandKernels:
    def __init__(self) -> None:
        self.made: list[Stand] = []

    def processors(self, device: torch.device) -> int:
        return 1

    def prefill(self, workspace: Tensor) -> Stand:
        self.made.append(Stand("prefill"))
        return self.made[-1]

    def decode(self, workspace: Tensor, *, tensor_cores: bool) -> Stand:
        assert not tensor_cores  # two query heads a key head are too few for them
        self.made.append(Stand("decode"))
        return self.made[-1]


def pools(device: str = "cpu", *, sizes: Sizes = SIZES) -> list[KVPool]:
    """Two pools of the same random contents."""
    made = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(3)
        pool = KVPool(LAYERS, SLOTS, sizes.kv_heads, sizes.head_dim, sizes.dtype, device)
        pool.keys.copy_(torch.randn(pool.keys.shape, generator=generator))
        pool.values.copy_(torch.randn(pool.values.shape, generator=generator))
        made.append(pool)
    return made


def new_rows(
    rows: int, device: str = "cpu", *, sizes: Sizes = SIZES
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn((rows, heads, sizes.head_dim), generator=generator).to(device, sizes.dtype)
        for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    )
    return q, k, v


def moved(segments: list[Segment], device: str) -> list[Segment]:
    def move(part: Tensor | None) -> Any:
        return None if part is None else part.to(device)

    return [
        Segment(
            move(s.token_ids),
            move(s.positions),
            move(s.context_slots),
            move(s.tree_slots),
            move(s.tree_positions),
            move(s.visible),
        )
        for s in segments
    ]


def test_bits_are_packed_first_lowest() -> None:
    bits = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1], dtype=torch.bool)
    assert pack_bits(bits).tolist() == [1, 6]
    assert pack_bits(torch.ones(16, dtype=torch.bool)).tolist() == [255, 255]
    assert pack_bits(torch.zeros(0, dtype=torch.bool)).tolist() == []


@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize("name", BATCHES)
def test_every_bit_of_a_packed_mask_lies_where_the_kernel_reads_it(
    name: str, window: int | None
) -> None:
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
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", BATCHES)
def test_plans_mean_what_pytorchs_attention_does(
    name: str, softcap: float | None, window: int | None
) -> None:
    ours, reference = pools()
    kernels = StandKernels()
    attention = FlashInferPagedAttention(ours, kernels)
    expected_by = TorchPagedAttention(reference)
    batch = pack(BATCHES[name])
    for layer in range(LAYERS):
        q, k, v = new_rows(batch.rows)
        found, expected = (
            a.attend(layer, q, k, v, batch, scale=SCALE, window=window, softcap=softcap)
            for a in (attention, expected_by)
        )
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    assert torch.equal(ours.keys, reference.keys)
    assert torch.equal(ours.values, reference.values)
    # Planned once for both layers.
    assert [stand.plans for stand in kernels.made] == [1]
    assert not attention.fallbacks


def test_heads_may_come_in_another_order_in_memory() -> None:
    """As from models that turn queries by joining halves; kernels look at no strides of them."""
    ours, reference = pools()
    batch = pack(BATCHES["ragged trees"])
    q, k, v = new_rows(batch.rows)
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    found = FlashInferPagedAttention(ours, StandKernels()).attend(
        0, turned, k, v, batch, scale=SCALE
    )
    expected = TorchPagedAttention(reference).attend(0, q, k, v, batch, scale=SCALE)
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("window", [None, 4])
def test_masks_of_prompts_are_made_where_they_are_read(window: int | None) -> None:
    expected = PackedMasks.of(BATCHES["trees and a prompt"], window).bits
    with PretendDevice() as device:
        # The bits of a prompt alone: nothing of its size is copied there.
        found = PackedMasks.of(BATCHES["trees and a prompt"], window, "cuda")
        assert found.bits.device.type == "cuda"
        assert not device.reads
        assert not device.blocking
        assert torch.equal(found.bits.cpu(), expected)


def test_wrappers_are_given_as_much_as_their_plans_may_take() -> None:
    """Sizes by FlashInfer's own plan, for the 132 multiprocessors of an H100."""
    few = workspace_bytes(32, 8, 128, processors=132, rows=64, requests=17)
    assert few == 128 << 20
    # 16 query heads a key head; many requests that are recorded together.
    assert workspace_bytes(32, 2, 128, processors=132) >= 266 << 20
    assert workspace_bytes(32, 2, 128, processors=132, rows=8, requests=2) >= 266 << 20
    assert workspace_bytes(32, 8, 128, processors=132, rows=160, requests=129) >= 268 << 20
    assert workspace_bytes(64, 8, 128, processors=132, rows=80, requests=65) >= 278 << 20


def test_each_work_has_its_kernel() -> None:
    for name, kind, causal in [
        ("plain decoding", "decode", True),
        ("prompts", "prefill", True),
        ("ragged trees", "prefill", False),
        ("trees and a prompt", "prefill", False),
    ]:
        kernels = StandKernels()
        batch = pack(BATCHES[name])
        q, k, v = new_rows(batch.rows)
        attention = FlashInferPagedAttention(pools()[0], kernels)
        attention.attend(0, q, k, v, batch, scale=SCALE)
        [stand] = kernels.made
        assert (stand.kind, stand.named["causal"]) == (kind, causal), name


def test_wrappers_are_planned_again_for_a_new_batch_and_kept_apart_by_window() -> None:
    kernels = StandKernels()
    attention = FlashInferPagedAttention(pools()[0], kernels)
    for _ in range(2):
        batch = pack(BATCHES["ragged trees"])
        q, k, v = new_rows(batch.rows)
        for layer in range(LAYERS):
            for window in (None, 4, 1000):
                attention.attend(layer, q, k, v, batch, scale=SCALE, window=window)
    # A window no text reaches is none.
    assert [stand.plans for stand in kernels.made] == [2, 2]


def test_sinks_are_counted_and_served_by_pytorch(caplog: pytest.LogCaptureFixture) -> None:
    ours, reference = pools()
    attention = FlashInferPagedAttention(ours, StandKernels())
    batch = pack(BATCHES["ragged trees"])
    q, k, v = new_rows(batch.rows)
    sinks = torch.linspace(-1, 1, SIZES.heads)
    for _ in range(2):
        found = attention.attend(0, q, k, v, batch, scale=SCALE, sinks=sinks)
    expected = TorchPagedAttention(reference).attend(0, q, k, v, batch, scale=SCALE, sinks=sinks)
    assert torch.equal(found, expected)
    assert attention.fallbacks == {"sinks": 2}
    assert len([r for r in caplog.records if "sinks" in r.getMessage()]) == 1


def test_pools_that_no_kernel_serves_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"head_dim=80: expected one of \[64, 128, 256\]"):
        check_pool(KVPool(1, 16, 1, 80, torch.bfloat16))
    with pytest.raises(InvalidArgument, match=r"dtype='torch.float32'"):
        check_pool(KVPool(1, 16, 1, 64, torch.float32))


def test_flashinfer_missing_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", None)
    with pytest.raises(InvalidArgument, match=r"attention='flashinfer'.*eaglegbv\[gpu\]"):
        FlashInferKernels()


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


@dataclass(frozen=True)
class Place:
    """Where kernels run, and what makes their wrappers."""

    device: str
    kernels: Kernels


@pytest.fixture
def gpu() -> Place:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("flashinfer")
    return Place("cuda", FlashInferKernels())


@pytest.fixture
def host(on_host: HostRuntime) -> Place:
    return Place("cpu", HostKernels())


@pytest.fixture(
    params=[
        pytest.param("gpu", marks=pytest.mark.gpu),
        pytest.param("host", marks=pytest.mark.on_host),
    ]
)
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(request.param)
    return found


def check_kernels(
    place: Place,
    name: str,
    sizes: Sizes = SIZES,
    kind: type[FlashInferPagedAttention] = FlashInferPagedAttention,
    **scores: Any,
) -> None:
    ours, reference = pools(place.device, sizes=sizes)
    attention = kind(ours, place.kernels)
    expected_by = TorchPagedAttention(reference)
    batch = pack(moved(BATCHES[name], place.device))
    for layer in range(LAYERS):
        q, k, v = new_rows(batch.rows, place.device, sizes=sizes)
        found, expected = (
            a.attend(layer, q, k, v, batch, scale=SCALE, **scores) for a in (attention, expected_by)
        )
        torch.testing.assert_close(found, expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", BATCHES)
def test_kernels_agree_with_pytorchs_attention(
    name: str, softcap: float | None, window: int | None, place: Place
) -> None:
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
def test_kernels_of_other_sizes_agree(name: str, sizes: Sizes, place: Place) -> None:
    check_kernels(place, name, sizes)


def leaves(text: Tensor, count: int) -> Segment:
    """``count`` nodes behind a text, each of which sees itself alone."""
    nodes = torch.arange(count)
    return Segment(
        nodes, nodes + len(text), text, nodes, nodes + len(text), torch.eye(count, dtype=torch.bool)
    )


def padded(segments: list[Segment]) -> tuple[list[Segment], Bucket]:
    """Pad a batch as a bucket is, by a request of one row."""
    rows = sum(segment.num_new for segment in segments)
    return [*segments, leaves(torch.arange(0), 1)], Bucket(len(segments), rows + 1)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_kernels_of_fixed_sizes_agree(name: str, window: int | None, place: Place) -> None:
    """Planned anew for other texts of as many rows."""
    ours, reference = pools(place.device)
    on_host, bucket = padded(BATCHES[name])
    segments = moved(on_host, place.device)
    static = FlashInferPagedAttention(ours, place.kernels).static(bucket, max_context=SLOTS)
    expected_by = TorchPagedAttention(reference)
    turned = [*segments[-2::-1], segments[-1]]
    for layer, own in enumerate((segments, turned)):
        batch = pack(own)
        q, k, v = new_rows(batch.rows, place.device)
        static.plan(batch)
        found, expected = (
            a.attend(layer, q, k, v, batch, scale=SCALE, window=window)
            for a in (static, expected_by)
        )
        # Rows that pad share a slot with others here.
        torch.testing.assert_close(found[:-1], expected[:-1], atol=0.03, rtol=0.03)


@pytest.mark.parametrize("sizes", [SIZES, Sizes(8, 2, 64)], ids=str)
def test_kernels_of_drafted_rows_agree(sizes: Sizes, place: Place) -> None:
    """Level by level, for texts of two steps; rows of a request go on from each other's parents."""
    shape = BranchShape(
        requests=2, branches=3, levels=3, max_context=SLOTS, heads=sizes.heads, scale=SCALE
    )
    ours, reference = pools(place.device, sizes=sizes)
    both = (
        FlashInferPagedAttention(ours, place.kernels).branches(shape),
        TorchPagedAttention(reference).branches(shape),
    )
    for lengths in ((5, 300), (40, 8)):
        for branches in both:
            branches.plan([SHUFFLED[: lengths[0]], SHUFFLED[400 : 400 + lengths[1]]])
        tails = torch.zeros((6, 0), dtype=torch.int64)
        for level in range(3):
            parents = torch.tensor([0, 0, 2, 3, 5, 4]) if level else torch.arange(6)
            own = SHUFFLED[800 + 6 * level : 806 + 6 * level].unsqueeze(1)
            tails = torch.cat((tails[parents], own), dim=1)
            q, k, v = new_rows(6, place.device, sizes=sizes)
            found, expected = (
                branches.attend(q.roll(level, 0), k, v, tails.to(place.device)) for branches in both
            )
            torch.testing.assert_close(found, expected, atol=0.03, rtol=0.03)


class Unmended(FlashInferPagedAttention):
    """Leaves the offsets of masks as FlashInfer's plan does."""

    def plan_tree(self, wrapper: Wrapper, batch: PackedBatch, kind: Any) -> PackedMasks:
        masks = super().plan_tree(wrapper, batch, kind)
        assert wrapper._mask_indptr_buf is not None
        return PackedMasks(masks.bits, wrapper._mask_indptr_buf)


@pytest.mark.on_host
def test_masks_are_read_from_elsewhere_unless_their_offsets_are_mended(
    host: Place, on_host: HostRuntime
) -> None:
    """Elsewhere there may be no tensor, or one that says something else."""
    with pytest.raises((RuntimeError, AssertionError)):
        check_kernels(host, "long texts", kind=Unmended)
    assert all(isinstance(fault, MemoryFault) for fault in on_host.faults)
    on_host.faults.clear()


@pytest.mark.on_host
@pytest.mark.parametrize("name", ["long texts", "plain decoding of long texts"])
def test_long_texts_are_split_among_blocks(name: str, host: Place, on_host: HostRuntime) -> None:
    check_kernels(host, name)
    assert any("MergeStates" in kernel for kernel in on_host.launched)


BUCKETS = [Bucket(1, 8), Bucket(1, 64), Bucket(4, 256), Bucket(16, 80), Bucket(128, 160)]


def plan_everything(attention: FlashInferPagedAttention, sizes: Sizes) -> None:
    """Plan long and short batches, recorded and not, and the rows of drafts."""
    for bucket in BUCKETS:
        text = torch.arange(4000 // bucket.requests)
        pads = leaves(text[:0], bucket.rows - bucket.requests)
        batch = pack([*[leaves(text, 1)] * bucket.requests, pads])
        static = attention.static(bucket, max_context=4096)
        static.plan(batch)
        shape = BranchShape(
            requests=min(bucket.requests, 64),
            branches=4,
            levels=2,
            max_context=4096,
            heads=sizes.heads,
            scale=SCALE,
        )
        attention.branches(shape).plan([text] * shape.requests)
        for used in (attention, static):
            used.attend(0, *new_rows(batch.rows, sizes=sizes), batch, scale=SCALE)


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
    less = {"workspace_bytes": lambda *given, **named: 1 << 20, "_PLAN_BYTES": 1 << 10}
    for name, little in less.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"eaglegbv.attention.flashinfer_paged.{name}", little)
            with pytest.raises(RuntimeError, match="overflow"):
                plan_everything(FlashInferPagedAttention(pool, HostKernels()), sizes)


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
        assert (device.reads, device.blocking) == ([], [])
    assert on_host.launched
