"""Paged attention by FlashInfer's kernels, for GPUs.

A batch is planned once per kind of layer, with lengths that are known on the host, so that nothing
waits for the device. All work runs by the kernels of prefill, which is what FlashInfer decodes by
where tensor cores pay: in causal order without a mask (prompts, single tokens, the rows a drafter
catches up on), or under a packed mask of one bit per (query, key).

What is recorded (:class:`StaticTreeAttention`, :class:`FlashInferBranches`) is planned into fixed
memory before every replay, always under masks. The page size is 1, so slots are pages.

The kernels read ``mask_indptr`` in bytes. ``plan(packed_custom_mask=...)`` of 0.6.18 and 0.7.2
leaves it in bits, which is wrong for every request but the first, so it is overwritten afterwards.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eaglegbv.attention.base import (
    AttentionCall,
    BranchAttention,
    BranchShape,
    PackedBatch,
    PagedAttention,
    Segment,
    joined,
    offsets_of,
)
from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.attention.torch import TorchPagedAttention
from eaglegbv.config import MAX_DEPTH
from eaglegbv.cuda_graphs import MAX_ROWS, Bucket, NotRecordable
from eaglegbv.devices import runs_kernels, send, upload
from eaglegbv.errors import InvalidArgument
from eaglegbv.utils import power_of_two

HEAD_DIMS = frozenset({64, 128, 256})  # head sizes with which the kernels are tested upstream
DTYPES = frozenset({torch.float16, torch.bfloat16})
_BACKEND = "fa2"
"""A backend whose kernels read masks. If it may choose, FlashInfer 0.7 sometimes decodes with
cuDNN, which has neither these plans nor this memory.
"""

_PLAN_BYTES = 1 << 18
"""Memory for a plan of fixed sizes, on the device and on the host each: about twelve bytes for a
tile of query rows. FlashInfer's own choice for any plan is 8 MiB, and there may be a hundred plans.
"""

_MOST_ROW_KEYS = 1 << 22  # most keys of all requests of a draft together: 16 MiB of slots

_log = logging.getLogger(__name__)


def paged_attention(pool: KVPool) -> PagedAttention:
    """Return the attention for a pool: FlashInfer on a GPU, PyTorch elsewhere.

    Where FlashInfer is not installed or does not support the pool, PyTorch is used on a GPU too. A
    warning says why, and its calls are counted as fall-backs by the argument that did not fit.
    """
    if not pool.keys.is_cuda:
        return TorchPagedAttention(pool)
    try:
        return FlashInferPagedAttention(pool)
    except InvalidArgument as error:
        _log.warning("PyTorch's attention on a GPU, which is slower: %s", error)
        return TorchPagedAttention(pool, instead=error.argument)


class LayerKind(NamedTuple):
    """Layers that share a plan."""

    window: int | None  # sliding window, or None
    scale: float  # factor on the scores
    softcap: float | None  # cap of the scores, or None
    heads: int  # query heads


class FlashInferPagedAttention(PagedAttention):
    """Attention by FlashInfer over a pool on a GPU."""

    recordable: ClassVar[bool] = True

    def __init__(self, pool: KVPool, kernels: "FlashInferKernels | None" = None) -> None:
        """Attend over ``pool``, in half precision; ``kernels`` are FlashInfer's by default.

        Raises:
            InvalidArgument: FlashInfer is not installed, or does not support the pool.
        """
        check_pool(pool)
        self.pool = pool
        self.fallbacks: Counter[str] = Counter()
        self._wrappers = Wrappers(pool, FlashInferKernels() if kernels is None else kernels)
        self._torch = TorchPagedAttention(pool)
        self._branches: dict[BranchShape, FlashInferBranches] = {}
        self._batch: PackedBatch | None = None
        self._planned: dict[LayerKind, PlannedWrapper] = {}

    def static(self, bucket: Bucket, *, max_context: int) -> "StaticTreeAttention":
        """See :meth:`PagedAttention.static`."""
        return StaticTreeAttention(self._wrappers, bucket, max_context=max_context)

    def branches(self, shape: BranchShape) -> "FlashInferBranches":
        """See :meth:`PagedAttention.branches`.

        Recordings of one shape share the result: it is planned anew before each replay.
        """
        if shape not in self._branches:
            self._branches[shape] = FlashInferBranches(self._wrappers, shape)
        return self._branches[shape]

    def attend(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch
    ) -> Tensor:
        """See :meth:`PagedAttention.attend`."""
        if call.sinks is not None:
            if not self.fallbacks["sinks"]:
                _log.warning("FlashInfer's kernels lack sinks: PyTorch's attention takes them")
            self.fallbacks["sinks"] += 1
            return self._torch.attend(call, q, k, v, batch)
        keys, values = self.pool.write(call.layer, batch.slots, k, v)
        window = batch.effective_window(call.window)
        kind = LayerKind(window, call.scale, call.softcap, q.shape[1])
        if batch is not self._batch:
            self._batch, self._planned = batch, {}
        if kind not in self._planned:
            masked = window is not None or any(s.visible is not None for s in batch.segments)
            self._planned[kind] = self._wrappers.plain(kind, masked=masked)
            self._planned[kind].plan(batch, kind, masked=masked)
        return self._planned[kind].attend(q, keys, values)


class StaticTreeAttention(PagedAttention):
    """Masked attention of batches of fixed sizes, planned into fixed memory, to be recorded.

    Every kind of layer has a separate wrapper, because a wrapper that was once planned with a mask
    always reads one. A window is part of the mask, whether sequences have reached it or not.
    """

    recordable: ClassVar[bool] = True

    def __init__(self, wrappers: "Wrappers", bucket: Bucket, *, max_context: int) -> None:
        """Start without wrappers: the first forward shows what kinds of layers there are."""
        self.pool = wrappers.pool
        self._wrappers = wrappers
        self._bucket = bucket
        self._max_context = max_context
        self._batch: PackedBatch | None = None
        self._kinds: dict[LayerKind, PlannedWrapper] = {}
        longest = wrappers.longest(max_context)
        self._keys = longest + bucket.rows
        self._key_slots = wrappers.tree_keys(bucket.requests * longest + bucket.rows)

    def plan(self, batch: PackedBatch) -> None:
        """See :meth:`PagedAttention.plan`."""
        self._batch = batch
        for kind, planned in self._kinds.items():
            planned.plan(batch, kind, masked=True)

    def branches(self, shape: BranchShape) -> BranchAttention:
        """See :meth:`PagedAttention.branches`."""
        return FlashInferBranches(self._wrappers, shape)

    def attend(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch
    ) -> Tensor:
        """See :meth:`PagedAttention.attend`; NotRecordable if the layer has sinks."""
        if call.sinks is not None:
            raise NotRecordable("sinks")
        keys, values = self.pool.write(call.layer, batch.slots, k, v)
        window = call.window
        if window is not None and window >= self._max_context:
            window = None
        kind = LayerKind(window, call.scale, call.softcap, q.shape[1])
        if kind not in self._kinds:
            assert self._batch is not None  # a recording begins with a plan
            requests, rows = self._bucket.requests + 1, self._bucket.rows
            buffers = TreeBuffers.of(requests, rows, self._keys, self._key_slots)
            self._kinds[kind] = self._wrappers.static(buffers, rows, kind.heads)
            self._kinds[kind].plan(self._batch, kind, masked=True)
        return self._kinds[kind].attend(q, keys, values)


class FlashInferBranches(BranchAttention):
    """Drafted rows as masked queries of their requests, with one wrapper planned for all levels.

    The keys of all levels are listed from the start, with those of later levels hidden. Which of
    them a row sees may become known while the recording runs; then their bits are set in the mask.

        bits of a row | context: 1 ... 1 | level 0: 0 0 1 0 | level 1: 0 1 0 0 | level 2: 0 0 0 0 |
    """

    def __init__(self, wrappers: "Wrappers", shape: BranchShape) -> None:
        """Make the wrapper; wrappers of all shapes share the list of keys."""
        super().__init__(wrappers.pool, shape)
        rows, drafted = shape.requests * shape.branches, shape.levels * shape.branches
        keys = wrappers.longest(shape.max_context) + drafted
        slots = wrappers.row_keys(shape.max_context)
        self.most_keys = len(slots)
        self._buffers = TreeBuffers.of(shape.requests, rows, keys, slots)
        self._planned = wrappers.static(self._buffers, rows, shape.heads)
        self._kind = LayerKind(None, shape.scale, None, shape.heads)
        self._queries = torch.arange(shape.requests + 1, dtype=torch.int32) * shape.branches
        device = self.pool.keys.device
        with torch.inference_mode(mode=False):
            self._branches = torch.arange(shape.branches, device=device)
            # The position in the mask at which the bits of a row's drafted keys begin.
            self._firsts = torch.zeros_like(self._branches).repeat(shape.requests, 1)
            self._levels = torch.arange(shape.levels, device=device) * shape.branches
            # A copy of the mask as planned, so that each replay of a recording starts from it.
            self._planned_mask = torch.zeros_like(self._buffers.mask)
        self._branch_bits: tuple[Tensor, Tensor]

    def plan(self, contexts: Sequence[Tensor], slots: Tensor) -> None:
        """See :meth:`BranchAttention.plan`."""
        self._load(slots)
        branches, drafted, device = self.shape.branches, slots[0].numel(), self.slots.device
        lengths = np.array([len(context) + drafted for context in contexts])
        masks = [_mask_of_context(length, drafted, branches) for length in lengths]
        octets = np.array(offsets_of(map(len, masks)), dtype=np.int32)
        ends = 8 * octets[:-1, np.newaxis] + lengths[:, np.newaxis] * np.arange(1, branches + 1)
        self._firsts.copy_(send(torch.from_numpy(ends - drafted), device))
        keys = [part for parts in zip(contexts, slots.flatten(1), strict=True) for part in parts]
        bits = send(torch.from_numpy(np.concatenate(masks)), device)
        self._planned_mask[: len(bits)].copy_(bits)
        self._planned.plan_queries(
            self._queries,
            torch.tensor(offsets_of(lengths.tolist()), dtype=torch.int32),
            torch.cat(keys),
            self._kind,
            PackedMasks(bits, torch.from_numpy(octets)),
        )

    def attend(self, level: int, q: Tensor, k: Tensor, v: Tensor, chains: Tensor | None) -> Tensor:
        """See :meth:`BranchAttention.attend`."""
        if level == 0:  # hidden values count 0 times: none may be NaN
            self.pool.layer(0)[1].index_fill_(0, self.slots.flatten(), 0)
            seen = self._levels.view(-1, 1, 1) + self._firsts + self._branches
            self._branch_bits = _octets_and_bits(seen)
            self._buffers.mask.copy_(self._planned_mask)
        keys, values = self.pool.write(0, self.slots[:, level].flatten(), k, v)
        mask = self._buffers.mask
        if chains is None:  # each sees its own branch at this level; it already sees the earlier
            octets, bits = (part[level] for part in self._branch_bits)
        else:  # each sees the keys of its own path only
            first = self._firsts.unsqueeze(2) + self._levels[: chains.shape[2]]
            octets, bits = _octets_and_bits(first + chains)
            mask.copy_(self._planned_mask)
        mask.index_add_(0, octets.flatten(), bits.flatten())
        return self._planned.attend(q, keys, values)


def _octets_and_bits(places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mask bytes that hold these bits, int64, and the bits' values there, uint8."""
    return places >> 3, torch.bitwise_left_shift(1, places & 7).to(torch.uint8)


def _mask_of_context(length: int, drafted: int, branches: int) -> NDArray[np.uint8]:
    seen = np.ones((branches, length), dtype=bool)
    seen[:, length - drafted :] = False
    return np.packbits(seen, bitorder="little")


# Masks of one bit per (query, key), as FlashInfer's kernels read them (``variants.cuh``).
#
# A request's bits lie row by row over *all* of its keys, query q and key k at bit ``q * keys + k``,
# little-endian. Rows are not aligned, but each request begins on a byte. A window is applied in the
# mask, because the kernel's own window counts packed indices, not positions.


@dataclass(frozen=True, slots=True)
class PackedMasks:
    """Consecutive masks of several requests."""

    bits: Tensor  # [bytes] uint8
    byte_offsets: Tensor  # [requests + 1] int32, on the host

    @classmethod
    def of(
        cls, segments: Sequence[Segment], window: int | None, device: torch.device | str = "cpu"
    ) -> Self:
        """Pack what each new token sees, for ``device``, without reading from there."""
        if runs_kernels(torch.device(device)):
            return cls(*_packed_by_kernel(segments, window, torch.device(device)))
        packed = []
        for segment in segments:
            # A prompt's mask is large, and quickly made where it is needed; masks of trees are
            # small and many.
            mask = segment.key_mask(window, device if segment.visible is None else None)
            if mask is None:
                shape = (segment.num_new, segment.num_keys)
                mask = torch.ones(shape, dtype=torch.bool, device=segment.token_ids.device)
            packed.append(pack_bits(mask.flatten()))
        offsets = offsets_of(map(len, packed))
        return cls(joined(packed, device), torch.tensor(offsets, dtype=torch.int32))


def pack_bits(bits: Tensor) -> Tensor:
    """Pack ``[n]`` bool into ``[ceil(n / 8)]`` uint8, with the first bit lowest."""
    padding = -bits.shape[0] % 8
    octets = torch.nn.functional.pad(bits, (0, padding)).view(-1, 8).to(torch.uint8)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (octets * weights).sum(dim=1, dtype=torch.uint8)


_OCTETS = 128  # bytes of a mask that a program packs


def _packed_by_kernel(
    segments: Sequence[Segment], window: int | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the bits and the offsets of :class:`PackedMasks`, by one kernel for all requests."""
    from eaglegbv.layer_kernels import pack_masks

    listed: list[Tensor] = []
    facts: list[tuple[int, ...]] = []
    octets = entries = rows = pending = 0
    sizes = [-(-segment.num_new * segment.num_keys // 8) for segment in segments]
    for segment, size in zip(segments, sizes, strict=True):
        q, m = segment.num_new, segment.num_pending
        causal = segment.visible is None or m == 1
        first = -1 if causal else entries
        facts.append((q, segment.num_context, m, octets, first, rows, pending))
        if segment.visible is not None and not causal:
            listed.append(segment.visible.reshape(-1))
            entries += q * m
        octets, rows, pending = octets + size, rows + q, pending + m
    table = upload(facts, dtype=torch.int64, device=device)
    bits = torch.empty(octets, dtype=torch.uint8, device=device)
    visible = joined(listed, device).view(torch.uint8) if listed else bits
    positions = tree_positions = table
    if window is not None:
        positions = joined([segment.positions for segment in segments], device)
        tree_positions = joined([segment.tree_positions for segment in segments], device)
    pack_masks[(-(-max(sizes) // _OCTETS), len(segments))](
        table,
        visible,
        positions,
        tree_positions,
        bits,
        0 if window is None else window,
        WINDOW=window is not None,
        BLOCK=_OCTETS,
    )
    return bits, torch.tensor(offsets_of(sizes), dtype=torch.int32)


class PlannedWrapper:
    """A wrapper over a pool, and what it takes to plan and run it."""

    def __init__(self, wrapper: Any, pool: KVPool) -> None:  # noqa: ANN401  FlashInfer has no types
        self._wrapper = wrapper
        self._pool = pool
        # A plan is copied from host memory that the next plan overwrites, so that one waits.
        self._copied = torch.cuda.Event() if pool.keys.is_cuda else None

    def plan(self, batch: PackedBatch, kind: LayerKind, *, masked: bool) -> None:
        """Plan a batch under its masks, or in causal order without a window."""
        masks = None
        if masked:
            masks = PackedMasks.of(batch.segments, kind.window, self._pool.keys.device)
        offsets = (batch.offsets, offsets_of(s.num_keys for s in batch.segments))
        queries, keys = (torch.tensor(firsts, dtype=torch.int32) for firsts in offsets)
        slots = torch.cat([segment.key_slots() for segment in batch.segments])
        self.plan_queries(queries, keys, slots, kind, masks)

    def plan_queries(
        self,
        queries: Tensor,
        offsets: Tensor,
        slots: Tensor,
        kind: LayerKind,
        masks: PackedMasks | None,
    ) -> None:
        """Plan queries under masks or in causal order.

        Args:
            queries: ``[requests + 1]`` int32 on the host, first query of each request.
            offsets: ``[requests + 1]`` int32 on the host, first key of each request.
            slots: ``[keys]`` on the host, slots of all keys.
            kind: The layers.
            masks: What each query sees, on the pool's device; None for causal order.
        """
        keys = self._pool.keys
        if self._copied is not None:
            self._copied.synchronize()
        self._wrapper.plan(
            queries,
            offsets,
            send(slots.to(torch.int32), keys.device),
            torch.ones(len(offsets) - 1, dtype=torch.int32),  # lengths of last pages
            kind.heads,
            *keys.shape[2:],
            1,
            packed_custom_mask=None if masks is None else masks.bits,
            causal=masks is None,
            sm_scale=kind.scale,
            logits_soft_cap=kind.softcap,
            window_left=-1,
            q_data_type=keys.dtype,
            kv_data_type=keys.dtype,
        )
        if masks is not None:
            self._mend_offsets(masks)
        if self._copied is not None:
            self._copied.record()

    def _mend_offsets(self, masks: PackedMasks) -> None:
        """Overwrite the mask offsets that FlashInfer's plan left in bits with those in bytes."""
        planned = self._wrapper._mask_indptr_buf
        assert planned is not None  # the plan had masks
        planned.copy_(masks.byte_offsets, non_blocking=True)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend as planned from ``q`` ``[rows, heads, head_dim]``; return the same shape."""
        # The kernels read and write contiguous rows, but some models pass strided heads. Without
        # ``out``, a wrapper would also zero fresh memory in every layer.
        q = q.contiguous()
        pages = keys.unsqueeze(1), values.unsqueeze(1)
        out: Tensor = self._wrapper.run(q, pages, out=torch.empty_like(q))
        return out


@dataclass(frozen=True, slots=True)
class TreeBuffers:
    """Buffers into which a recorded wrapper is planned, always the same memory."""

    query_offsets: Tensor  # [requests + 1] int32
    key_offsets: Tensor  # [requests + 1] int32
    key_slots: Tensor  # [most keys] int32, shared by all kinds of layers
    last_pages: Tensor  # [requests] int32
    mask: Tensor  # [most bytes] uint8
    mask_offsets: Tensor  # [requests + 1] int32, in bytes

    @classmethod
    def of(cls, requests: int, rows: int, keys: int, key_slots: Tensor) -> Self:
        """Make room for ``requests`` with ``rows`` rows together and at most ``keys`` keys each."""

        def numbers(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=key_slots.device)

        with torch.inference_mode(mode=False):  # later plans write to them, in any mode
            # Each row has a bit for each key of its request, and each request begins on a byte.
            mask = numbers(rows * keys // 8 + requests + 1, torch.uint8)
            offsets = (numbers(requests + 1), numbers(requests + 1))
            return cls(*offsets, key_slots, numbers(requests), mask, numbers(requests + 1))


class FlashInferKernels:
    """Factory of FlashInfer's wrappers."""

    def __init__(self) -> None:
        """Import FlashInfer.

        Raises:
            InvalidArgument: FlashInfer is not installed.
        """
        try:
            import flashinfer
        except ImportError as error:
            expected = "FlashInfer to be installed: pip install -e '.[gpu]'"
            raise InvalidArgument("attention", "flashinfer", expected) from error
        self._flashinfer = flashinfer

    def processors(self, device: torch.device) -> int:
        """Return the number of multiprocessors that share the work."""
        return torch.cuda.get_device_properties(device).multi_processor_count

    def prefill(self, workspace: Tensor, buffers: TreeBuffers | None = None) -> Any:  # noqa: ANN401
        """Return a new wrapper for requests of several queries.

        ``workspace`` is for partial results; ``buffers`` for plans of fixed sizes, under masks.
        """
        new = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
        if buffers is None:
            return new(workspace, "NHD", backend=_BACKEND)
        wrapper = new(
            workspace,
            "NHD",
            backend=_BACKEND,
            use_cuda_graph=True,
            qo_indptr_buf=buffers.query_offsets,
            paged_kv_indptr_buf=buffers.key_offsets,
            paged_kv_indices_buf=buffers.key_slots,
            paged_kv_last_page_len_buf=buffers.last_pages,
            custom_mask_buf=buffers.mask,
            mask_indptr_buf=buffers.mask_offsets,
        )
        wrapper.reset_workspace_buffer(workspace, workspace.new_empty(_PLAN_BYTES))
        return wrapper


def check_pool(pool: KVPool) -> None:
    """Check that FlashInfer supports a pool.

    Raises:
        InvalidArgument: The kernels do not support its head size or dtype.
    """
    head_dim, dtype = pool.keys.shape[3], pool.keys.dtype
    if head_dim not in HEAD_DIMS:
        raise InvalidArgument("head_dim", head_dim, f"one of {sorted(HEAD_DIMS)} for FlashInfer")
    if dtype not in DTYPES:
        raise InvalidArgument("dtype", str(dtype), "float16 or bfloat16 for FlashInfer")


class Wrappers:
    """Makes and keeps the wrappers over a pool.

    They share one piece of memory for partial results, since they run one after another. When more
    is needed than before, earlier wrappers keep the memory they got.
    """

    def __init__(self, pool: KVPool, kernels: FlashInferKernels) -> None:
        self.pool = pool
        self._kernels = kernels
        self._workspace = pool.keys.new_empty(0, dtype=torch.uint8)
        self._plain: dict[tuple[LayerKind, bool], PlannedWrapper] = {}
        self._row_keys: Tensor | None = None
        self._tree_keys = self._room_for_keys(0)

    def plain(self, kind: LayerKind, *, masked: bool) -> PlannedWrapper:
        """Return the wrapper for a kind of layer with or without masks, to be planned."""
        if (kind, masked) not in self._plain:
            room = self._room(kind.heads)
            with torch.inference_mode(mode=False):  # what it makes, later plans write to
                planned = PlannedWrapper(self._kernels.prefill(room), self.pool)
            self._plain[kind, masked] = planned
        return self._plain[kind, masked]

    def static(self, buffers: TreeBuffers, rows: int, heads: int) -> PlannedWrapper:
        """Return a new wrapper for ``rows`` rows that is planned into ``buffers``."""
        room = self._room(heads, rows=rows, requests=len(buffers.last_pages))
        with torch.inference_mode(mode=False):
            return PlannedWrapper(self._kernels.prefill(room, buffers), self.pool)

    def longest(self, max_context: int) -> int:
        """Return the most keys that a sequence of ``max_context`` positions has."""
        return min(max_context, self.pool.num_slots)

    def row_keys(self, max_context: int) -> Tensor:
        """Return room for the keys of all requests of a draft, which all drafts share, int32."""
        if self._row_keys is None:
            most = MAX_ROWS * (self.longest(max_context) + MAX_DEPTH)
            self._row_keys = self._room_for_keys(min(most, _MOST_ROW_KEYS))
        return self._row_keys

    def tree_keys(self, count: int) -> Tensor:
        """Return room for ``count`` keys of a batch of trees or more, which all sizes share, int32.

        Each batch is replayed before another one is planned. When more is needed than before,
        earlier sizes keep the room they got.
        """
        if count > len(self._tree_keys):
            self._tree_keys = self._room_for_keys(power_of_two(count))
        return self._tree_keys

    def _room_for_keys(self, count: int) -> Tensor:
        with torch.inference_mode(mode=False):
            return torch.zeros(count, dtype=torch.int32, device=self.pool.keys.device)

    def _room(self, heads: int, *, rows: int = 0, requests: int = 0) -> Tensor:
        """Return ``[bytes]`` uint8 for partial results; see :func:`workspace_bytes`."""
        device = self.pool.keys.device
        needed = workspace_bytes(
            heads,
            *self.pool.keys.shape[2:],
            processors=self._kernels.processors(device),
            rows=rows,
            requests=requests,
        )
        if needed > len(self._workspace):
            # With powers of two, the earlier pieces together are no larger than this one.
            size = power_of_two(needed)
            with torch.inference_mode(mode=False):
                self._workspace = torch.empty(size, dtype=torch.uint8, device=device)
        return self._workspace


_WORKSPACE_BYTES = 128 << 20  # least memory for partial results that wrappers get
_WORKSPACE_SLACK = 8 << 20
"""Memory beyond what wrappers were found to need, because they align parts of it."""

_WAVES = 2  # blocks that a multiprocessor runs at once, as FlashInfer counts them
_TILE, _MIDDLE_TILE, _SMALL_TILE = 128, 64, 16
"""Most query rows of a block; the others if no request has more (``utils.cuh``)."""

_LARGE_HEAD = 256  # head size from which blocks have at most the middle tile


def workspace_bytes(
    heads: int, kv_heads: int, head_dim: int, *, processors: int, rows: int = 0, requests: int = 0
) -> int:
    """Return the most bytes a wrapper needs for partial results (``scheduler.cuh`` of 0.6.18).

    Keys are split among blocks. Each block handles a tile of query rows, where the query heads of
    a key head count as rows. There are as many blocks as run at once on the ``processors``, or as
    a recorded batch of ``rows`` and ``requests`` may have: every request may begin a tile. A block
    keeps a vector, and the sum of its weights, for every query head.
    """
    group = heads // kv_heads
    tile = _TILE
    if rows:  # FlashInfer derives the longest request as if every other had one row
        longest = (rows - requests + 1) * group
        if longest <= _SMALL_TILE:
            tile = _SMALL_TILE
        elif longest <= _MIDDLE_TILE or head_dim >= _LARGE_HEAD:
            tile = _MIDDLE_TILE
    at_once = _WAVES * processors // kv_heads * tile
    vectors = heads * max(at_once, rows * group + requests * tile)
    return max(_WORKSPACE_BYTES, vectors * (head_dim + 1) * 4 + _WORKSPACE_SLACK)
