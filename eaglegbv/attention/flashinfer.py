"""Fixed memory into which FlashInfer's wrappers for fixed sizes are planned."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eaglegbv.attention.base import (
    BranchAttention,
    BranchShape,
    PackedBatch,
    PagedAttention,
    StaticAttention,
    offsets_of,
)
from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.attention.masks import PackedMasks
from eaglegbv.attention.torch import TorchPagedAttention
from eaglegbv.config import MAX_DEPTH
from eaglegbv.cuda_graphs import MAX_ROWS, Bucket, NotRecordable
from eaglegbv.devices import send
from eaglegbv.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class TreeBuffers:
    """Buffers into which a recorded wrapper is planned, always the same memory.

    Attributes:
        query_offsets: ``[requests + 1]`` int32.
        key_offsets: ``[requests + 1]`` int32.
        key_slots: ``[most keys]`` int32, shared by all kinds of layers.
        last_pages: ``[requests]`` int32.
        mask: ``[most bytes]`` uint8.
        mask_offsets: ``[requests + 1]`` int32, in bytes.
    """

    query_offsets: Tensor
    key_offsets: Tensor
    key_slots: Tensor
    last_pages: Tensor
    mask: Tensor
    mask_offsets: Tensor

    @classmethod
    def of(cls, requests: int, rows: int, keys: int, key_slots: Tensor) -> Self:
        """Make room for ``requests`` with ``rows`` rows together and at most ``keys`` keys each."""
        device = key_slots.device

        def numbers(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        # Each row has a bit for each key of its request, and each request begins on a byte.
        mask = numbers(rows * keys // 8 + requests + 1, torch.uint8)
        offsets = (numbers(requests + 1), numbers(requests + 1))
        return cls(*offsets, key_slots, numbers(requests), mask, numbers(requests + 1))


# Interface to FlashInfer's kernels: wrappers, their factory, and the pools they support.


HEAD_DIMS = frozenset({64, 128, 256})
"""Head sizes with which the kernels are tested upstream."""

DTYPES = frozenset({torch.float16, torch.bfloat16})

_BACKEND = "fa2"
"""A backend whose kernels read masks. If it may choose, FlashInfer 0.7 sometimes decodes with
cuDNN, which has neither these plans nor this memory.
"""

_PLAN_BYTES = 1 << 18
"""Memory for a plan of fixed sizes, on the device and on the host each: about twelve bytes for a
tile of query rows. FlashInfer's own choice for any plan is 8 MiB, and there may be a hundred plans.
"""


class Wrapper(Protocol):
    """The part of FlashInfer's batch wrappers that is used."""

    _mask_indptr_buf: Tensor | None

    def plan(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401  FlashInfer's own types
        """Prepare a batch."""

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        """Compute attention as planned."""

    def reset_workspace_buffer(self, partial_results: Tensor, plans: Tensor) -> None:
        """Use other memory from now on."""


class Kernels(Protocol):
    """Factory of wrappers: FlashInfer's, or a test's."""

    def processors(self, device: torch.device) -> int:
        """Return the number of multiprocessors that share the work."""

    def prefill(self, workspace: Tensor) -> Wrapper:
        """Return a new wrapper for requests of several queries."""

    def decode(self, workspace: Tensor, *, tensor_cores: bool) -> Wrapper:
        """Return a new wrapper for requests of one query each."""

    def static_prefill(self, workspace: Tensor, buffers: TreeBuffers) -> Wrapper:
        """Return a new wrapper for masked requests of fixed sizes, planned into ``buffers``."""


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
            expected = "FlashInfer to be installed: pip install 'eaglegbv[gpu]'"
            raise InvalidArgument("attention", "flashinfer", expected) from error
        self._flashinfer = flashinfer

    def processors(self, device: torch.device) -> int:
        """See :meth:`Kernels.processors`."""
        return torch.cuda.get_device_properties(device).multi_processor_count

    def prefill(self, workspace: Tensor) -> Wrapper:
        """See :meth:`Kernels.prefill`."""
        wrapper: Wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend=_BACKEND
        )
        return wrapper

    def decode(self, workspace: Tensor, *, tensor_cores: bool) -> Wrapper:
        """See :meth:`Kernels.decode`."""
        wrapper: Wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=tensor_cores, backend=_BACKEND
        )
        return wrapper

    def static_prefill(self, workspace: Tensor, buffers: TreeBuffers) -> Wrapper:
        """See :meth:`Kernels.static_prefill`."""
        wrapper: Wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=buffers.query_offsets,
            paged_kv_indptr_buf=buffers.key_offsets,
            paged_kv_indices_buf=buffers.key_slots,
            paged_kv_last_page_len_buf=buffers.last_pages,
            custom_mask_buf=buffers.mask,
            mask_indptr_buf=buffers.mask_offsets,
            backend=_BACKEND,
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


# Memory for the partial results of FlashInfer's wrappers.


_WORKSPACE_BYTES = 128 << 20
"""Least memory for partial results that wrappers get."""

_WORKSPACE_SLACK = 8 << 20
"""Memory beyond what wrappers were found to need, because they align parts of it."""

_WAVES = 2
"""Blocks that a multiprocessor runs at once, as FlashInfer counts them."""

_TILE = 128
"""Most query rows of a block."""

_MIDDLE_TILE, _SMALL_TILE = 64, 16
"""Query rows of a block if no request has more; with large heads, at most the first of these."""

_LARGE_HEAD = 256
"""Head size from which blocks have fewer rows."""


class Workspace:
    """One piece of memory for all wrappers over a pool, since they run one after another.

    When more is needed than before, earlier wrappers keep the memory they got.
    """

    def __init__(self, pool: KVPool, kernels: Kernels) -> None:
        """Start without memory.

        Args:
            pool: The pool; its key heads, head size and device count.
            kernels: Knows how many multiprocessors share the work.
        """
        self._pool = pool
        self._kernels = kernels
        self._memory = pool.keys.new_empty(0, dtype=torch.uint8)

    def room(self, heads: int, *, rows: int = 0, requests: int = 0) -> Tensor:
        """Return ``[bytes]`` uint8 for a new wrapper.

        Args:
            heads: Query heads.
            rows: Packed rows of a recorded batch; 0 for one that is not recorded.
            requests: Number of requests of that batch.
        """
        device = self._pool.keys.device
        kv_heads, head_dim = self._pool.keys.shape[2:]
        needed = workspace_bytes(
            heads,
            kv_heads,
            head_dim,
            processors=self._kernels.processors(device),
            rows=rows,
            requests=requests,
        )
        if needed > len(self._memory):
            # With powers of two, the earlier pieces together are no larger than this one.
            size = 1 << (needed - 1).bit_length()
            with torch.inference_mode(mode=False):
                self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        return self._memory


def workspace_bytes(
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    processors: int,
    rows: int = 0,
    requests: int = 0,
) -> int:
    """Return the most bytes a wrapper needs for partial results (``scheduler.cuh`` of 0.6.18).

    Keys are split among blocks. Each block handles a tile of query rows, where the query heads of
    a key head count as rows. There are as many blocks as run at once, or as a recorded batch may
    have: every request may begin a tile. A block keeps a vector, and the sum of its weights, for
    every query head.

    Args:
        heads: Query heads.
        kv_heads: Key heads.
        head_dim: Size of a head.
        processors: Multiprocessors of the device.
        rows: Packed rows of a recorded batch; 0 for one that is not recorded.
        requests: Number of requests of that batch.
    """
    group = heads // kv_heads
    tile = _tile((rows - requests + 1) * group, head_dim) if rows else _TILE
    at_once = _WAVES * processors // kv_heads * tile
    recorded = rows * group + requests * tile
    return max(
        _WORKSPACE_BYTES, heads * max(at_once, recorded) * (head_dim + 1) * 4 + _WORKSPACE_SLACK
    )


def _tile(longest: int, head_dim: int) -> int:
    """Return the query rows of a block if no request has more than ``longest`` (``utils.cuh``).

    For a recorded batch, FlashInfer derives ``longest`` from its rows, as if every other request
    had one row.
    """
    if longest <= _SMALL_TILE:
        return _SMALL_TILE
    return _MIDDLE_TILE if longest <= _MIDDLE_TILE or head_dim >= _LARGE_HEAD else _TILE


# FlashInfer's wrappers over a pool, each made on first use.


_TENSOR_CORE_GROUP = 4
"""Fewest query heads per key head for which decoding uses tensor cores. FlashInfer advises them for
large groups.
"""

_MOST_ROW_KEYS = 1 << 22
"""Most keys of all requests of a draft together: 16 MiB of slots."""


@dataclass(frozen=True, slots=True)
class PlannedWrapper:
    """A wrapper, and the moment when its plan has reached the device.

    A plan is copied from host memory that the next plan overwrites.

    Attributes:
        wrapper: FlashInfer's wrapper.
        copied: Event recorded after the copy; None on a CPU.
    """

    wrapper: Wrapper
    copied: torch.cuda.Event | None

    def mark(self) -> None:
        """Record that the copy was issued."""
        if self.copied is not None:
            self.copied.record()

    def wait(self) -> None:
        """Wait until the previous plan has been copied."""
        if self.copied is not None:
            self.copied.synchronize()

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from ``[rows, heads, head_dim]`` to a layer of the pool, as planned.

        Args:
            q: ``[rows, heads, head_dim]``, in any order in memory.
            keys: ``[slots, kv_heads, head_dim]``.
            values: ``[slots, kv_heads, head_dim]``.

        Returns:
            ``[rows, heads, head_dim]``.
        """
        # The kernels read and write contiguous rows, but some models pass strided heads. Without
        # ``out``, a wrapper would also zero fresh memory in every layer.
        q = q.contiguous()
        pages = keys.unsqueeze(1), values.unsqueeze(1)
        return self.wrapper.run(q, pages, out=torch.empty_like(q))


class FlashInferWrappers:
    """Makes and keeps the wrappers over a pool, which share their memory for partial results."""

    def __init__(self, pool: KVPool, kernels: Kernels) -> None:
        """Start without wrappers.

        Args:
            pool: Keys and values.
            kernels: Factory of wrappers.
        """
        self._pool = pool
        self._kernels = kernels
        self._workspace = Workspace(pool, kernels)
        self._plain: dict[tuple[str, LayerKind], PlannedWrapper] = {}
        self._row_keys: Tensor | None = None

    def plain(self, work: Literal["decode", "causal", "tree"], kind: "LayerKind") -> PlannedWrapper:
        """Return the wrapper for a shape of work and a kind of layer, ready to be planned."""
        planned = self._plain.get((work, kind))
        if planned is None:
            room = self._workspace.room(kind.heads)
            with torch.inference_mode(mode=False):  # what it makes, later plans write to
                if work == "decode":
                    cores = self._by_tensor_cores(kind.heads)
                    wrapper = self._kernels.decode(room, tensor_cores=cores)
                else:
                    wrapper = self._kernels.prefill(room)
            planned = self._plain[work, kind] = self._planned_by(wrapper)
        planned.wait()
        return planned

    def static(self, buffers: TreeBuffers, rows: int, heads: int) -> PlannedWrapper:
        """Return a new wrapper for ``rows`` rows that is planned into ``buffers``."""
        requests = len(buffers.last_pages)
        room = self._workspace.room(heads, rows=rows, requests=requests)
        return self._planned_by(self._kernels.static_prefill(room, buffers))

    def branches(self, shape: BranchShape) -> tuple[TreeBuffers, PlannedWrapper]:
        """Return a new wrapper of drafted rows, and the buffers it is planned into.

        Wrappers of all shapes share the list of keys, which is written anew before each replay.
        """
        rows, longest = shape.requests * shape.branches, self._longest(shape.max_context)
        with torch.inference_mode(mode=False):
            if self._row_keys is None:
                self._row_keys = torch.zeros(
                    self.most_row_keys(shape.max_context),
                    dtype=torch.int32,
                    device=self._pool.keys.device,
                )
            keys = longest + shape.levels * shape.branches
            buffers = TreeBuffers.of(shape.requests, rows, keys, self._row_keys)
            return buffers, self.static(buffers, rows, shape.heads)

    def most_row_keys(self, max_context: int) -> int:
        """Return how many keys all requests of a draft may have together."""
        return min(MAX_ROWS * (self._longest(max_context) + MAX_DEPTH), _MOST_ROW_KEYS)

    def _longest(self, max_context: int) -> int:
        return min(max_context, self._pool.num_slots)

    def _by_tensor_cores(self, heads: int) -> bool:
        """Return whether enough query heads share a key head for tensor cores to pay."""
        return heads // self._pool.keys.shape[2] >= _TENSOR_CORE_GROUP

    def _planned_by(self, wrapper: Wrapper) -> PlannedWrapper:
        return PlannedWrapper(wrapper, torch.cuda.Event() if self._pool.keys.is_cuda else None)


# Plans of FlashInfer's wrappers. The page size is 1, so slots are pages.
#
# Lengths are known on the host, so no plan waits for the device.
#
# The kernels read ``mask_indptr`` in bytes. ``plan(packed_custom_mask=...)`` of 0.6.18 and 0.7.2
# leaves it in bits, which is wrong for every request but the first, so it is overwritten afterwards.


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that share a plan.

    Attributes:
        window: Sliding window, or None.
        scale: Factor on the scores.
        softcap: Cap of the scores, or None.
        heads: Query heads.
    """

    window: int | None
    scale: float
    softcap: float | None
    heads: int


class FlashInferPlans:
    """Plans batches over a pool for given wrappers."""

    def __init__(self, pool: KVPool) -> None:
        """Plan for ``pool``."""
        self._pool = pool

    def plan_decode(self, wrapper: Wrapper, batch: PackedBatch, kind: LayerKind) -> None:
        """Plan a batch with one new token per request, which sees all its keys."""
        wrapper.plan(*self._pages(batch), kind.heads, *self._sizes, **self._settings(kind))

    def plan_causal(self, wrapper: Wrapper, batch: PackedBatch, kind: LayerKind) -> None:
        """Plan a batch in causal order, without a window."""
        self._plan_prefill(wrapper, batch, kind, None)

    def plan_tree(self, wrapper: Wrapper, batch: PackedBatch, kind: LayerKind) -> None:
        """Plan a batch under its masks."""
        masks = PackedMasks.of(batch.segments, kind.window, self._pool.keys.device)
        self._plan_prefill(wrapper, batch, kind, masks)

    def plan_rows(
        self,
        wrapper: Wrapper,
        pages: tuple[Tensor, Tensor],
        masks: PackedMasks,
        shape: BranchShape,
    ) -> None:
        """Plan drafted rows under masks.

        Args:
            wrapper: The wrapper to plan.
            pages: Offsets and slots of the requests' keys, both int32 on the host.
            masks: Masks of the requests, on the pool's device.
            shape: Sizes of the rows.
        """
        kind = LayerKind(None, shape.scale, None, shape.heads)
        queries = torch.arange(shape.requests + 1, dtype=torch.int32) * shape.branches
        self._plan_queries(wrapper, queries, self._sent(*pages), kind, masks)

    def _plan_prefill(
        self, wrapper: Wrapper, batch: PackedBatch, kind: LayerKind, masks: PackedMasks | None
    ) -> None:
        queries = torch.tensor(batch.offsets, dtype=torch.int32)
        self._plan_queries(wrapper, queries, self._pages(batch), kind, masks)

    def _plan_queries(
        self,
        wrapper: Wrapper,
        queries: Tensor,
        pages: tuple[Tensor, Tensor, Tensor],
        kind: LayerKind,
        masks: PackedMasks | None,
    ) -> None:
        """Plan queries with given offsets (host) and pages, under masks or in causal order."""
        wrapper.plan(
            queries,
            *pages,
            kind.heads,
            *self._sizes,
            packed_custom_mask=None if masks is None else masks.bits,
            causal=masks is None,
            **self._settings(kind),
        )
        if masks is not None:
            self._mend_offsets(wrapper, masks)

    def _mend_offsets(self, wrapper: Wrapper, masks: PackedMasks) -> None:
        """Overwrite the mask offsets that FlashInfer's plan left in bits with those in bytes."""
        planned = wrapper._mask_indptr_buf
        assert planned is not None  # the plan had masks
        planned.copy_(masks.byte_offsets, non_blocking=True)

    def _pages(self, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return offsets (host), slots of all keys (device), and lengths of last pages (host)."""
        counts = (segment.num_keys for segment in batch.segments)
        offsets = torch.tensor(offsets_of(counts), dtype=torch.int32)
        slots = torch.cat([segment.key_slots() for segment in batch.segments]).to(torch.int32)
        return self._sent(offsets, slots)

    def _sent(self, offsets: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return offsets, the slots on the device, and lengths of last pages."""
        last_pages = torch.ones(len(offsets) - 1, dtype=torch.int32)
        return offsets, send(slots, self._pool.keys.device), last_pages

    def _settings(self, kind: LayerKind) -> dict[str, Any]:
        dtype = self._pool.keys.dtype
        return {
            "sm_scale": kind.scale,
            "logits_soft_cap": kind.softcap,
            "window_left": -1,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Key heads, head size, and page size."""
        return self._pool.keys.shape[2], self._pool.keys.shape[3], 1


# Attention of drafted rows by FlashInfer's kernels.


class FlashInferBranches(BranchAttention):
    """Drafted rows as masked queries of their requests, with one wrapper planned for all levels.

    The keys of all levels are listed from the start, with those of later levels hidden. Which of
    them a row sees may become known while the recording runs; then their bits are set in the mask.

        bits of a row | context: 1 ... 1 | level 0: 0 0 1 0 | level 1: 0 1 0 0 | level 2: 0 0 0 0 |
    """

    def __init__(self, pool: KVPool, wrappers: FlashInferWrappers, shape: BranchShape) -> None:
        """Make the wrapper.

        Args:
            pool: Keys and values.
            wrappers: Makes wrappers over the pool.
            shape: The rows.
        """
        super().__init__(pool, shape)
        self.most_keys = wrappers.most_row_keys(shape.max_context)
        self._plans = FlashInferPlans(pool)
        self._buffers, self._planned = wrappers.branches(shape)
        device = pool.keys.device
        with torch.inference_mode(mode=False):
            # The position in the mask at which the bits of a row's drafted keys begin.
            self._firsts = torch.zeros(
                (shape.requests, shape.branches), dtype=torch.int64, device=device
            )
            self._branches = torch.arange(shape.branches, device=device)
            self._levels = torch.arange(shape.levels, device=device) * shape.branches
            # A copy of the mask as planned, so that each replay of a recording starts from it.
            self._planned_mask = torch.zeros_like(self._buffers.mask)
        self._own: tuple[Tensor, Tensor]

    def plan(self, contexts: Sequence[Tensor], slots: Tensor) -> None:
        """See :meth:`BranchAttention.plan`."""
        self._load(slots)
        branches, drafted, device = self.shape.branches, slots[0].numel(), self.slots.device
        lengths = np.array([len(context) + drafted for context in contexts])
        masks = [_mask_of_context(length, drafted, branches) for length in lengths]
        octets = _offsets(np.array([len(mask) for mask in masks]))
        ends = 8 * octets[:-1, np.newaxis] + lengths[:, np.newaxis] * np.arange(1, branches + 1)
        self._firsts.copy_(send(torch.from_numpy(ends - drafted), device))
        keys = [part for own in zip(contexts, slots.flatten(1), strict=True) for part in own]
        pages = torch.from_numpy(_offsets(lengths)), torch.cat(keys).to(torch.int32)
        bits = send(torch.from_numpy(np.concatenate(masks)), device)
        self._planned_mask[: len(bits)].copy_(bits)
        self._planned.wait()
        packed = PackedMasks(bits, torch.from_numpy(octets))
        self._plans.plan_rows(self._planned.wrapper, pages, packed, self.shape)
        self._planned.mark()

    def attend(self, level: int, q: Tensor, k: Tensor, v: Tensor, chains: Tensor | None) -> Tensor:
        """See :meth:`BranchAttention.attend`."""
        if level == 0:
            self._begin()
        keys, values = self.pool.write(0, self.slots[:, level].flatten(), k, v)
        if chains is None:
            self._show_own(level)
        else:
            self._show(chains)
        return self._planned.attend(q, keys, values)

    def _begin(self) -> None:
        """Prepare for the first level of a draft.

        Hidden values are multiplied by 0, so what an earlier text left there must not be infinite
        or NaN.
        """
        _, values = self.pool.layer(0)
        values.index_fill_(0, self.slots.flatten(), 0)
        levels = self._levels.view(-1, 1, 1)
        self._own = _octets_and_bits(levels + self._firsts + self._branches)
        self._buffers.mask.copy_(self._planned_mask)

    def _show_own(self, level: int) -> None:
        """Let every row see its own branch at this level; it already sees the earlier ones."""
        octets, bits = self._own
        self._buffers.mask.index_add_(0, octets[level].flatten(), bits[level].flatten())

    def _show(self, chains: Tensor) -> None:
        """Let every row see the keys of its own path only."""
        first = self._firsts.unsqueeze(2) + self._levels[: chains.shape[2]]
        octets, bits = _octets_and_bits(first + chains)
        mask = self._buffers.mask.copy_(self._planned_mask)
        mask.index_add_(0, octets.flatten(), bits.flatten())


def _octets_and_bits(places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mask bytes that hold these bits, int64, and the bits' values there, uint8."""
    return places >> 3, torch.bitwise_left_shift(1, places & 7).to(torch.uint8)


def _mask_of_context(length: int, drafted: int, branches: int) -> NDArray[np.uint8]:
    """Return the packed mask that shows ``branches`` all keys but the last ``drafted``."""
    seen = np.ones((branches, length), dtype=bool)
    seen[:, length - drafted :] = False
    return np.packbits(seen, bitorder="little")


def _offsets(sizes: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return where parts of ``sizes`` begin, and where the last ends."""
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)


# Attention of recorded forwards by FlashInfer's kernels, under masks.


class StaticTreeAttention(StaticAttention):
    """Masked attention of batches of fixed sizes, planned into fixed memory.

    Every kind of layer has a separate wrapper, because a wrapper that was once planned with a mask
    always reads one. A window is part of the mask, whether texts have reached it or not.
    """

    def __init__(
        self,
        pool: KVPool,
        wrappers: FlashInferWrappers,
        bucket: Bucket,
        *,
        max_context: int,
    ) -> None:
        """Start without wrappers: the first forward shows what kinds of layers there are.

        Args:
            pool: Keys and values.
            wrappers: Makes wrappers over the pool.
            bucket: Number of requests, including one for padding, and number of rows.
            max_context: Most positions of a text.
        """
        self.pool = pool
        self._wrappers = wrappers
        self._plans = FlashInferPlans(pool)
        self._bucket = bucket
        self._max_context = max_context
        self._batch: PackedBatch | None = None
        self._kinds: dict[LayerKind, PlannedWrapper] = {}
        longest = min(max_context, self.pool.num_slots)
        self._keys = longest + bucket.rows
        with torch.inference_mode(mode=False):
            self._key_slots = torch.zeros(
                bucket.requests * longest + bucket.rows,
                dtype=torch.int32,
                device=self.pool.keys.device,
            )

    def plan(self, batch: PackedBatch) -> None:
        """See :meth:`StaticAttention.plan`."""
        self._batch = batch
        for kind, planned in self._kinds.items():
            self._plan_kind(batch, kind, planned)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: PackedBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`PagedAttention.attend`.

        Raises:
            NotRecordable: The layer has sinks, which the kernels do not support.
        """
        if sinks is not None:
            raise NotRecordable("sinks")
        keys, values = self.pool.write(layer, batch.slots, k, v)
        if window is not None and window >= self._max_context:
            window = None
        planned = self._wrapper(LayerKind(window, scale, softcap, q.shape[1]))
        return planned.attend(q, keys, values)

    def _wrapper(self, kind: LayerKind) -> PlannedWrapper:
        planned = self._kinds.get(kind)
        if planned is None:
            assert self._batch is not None  # a recording begins with a plan
            with torch.inference_mode(mode=False):
                sizes = (self._bucket.requests + 1, self._bucket.rows, self._keys)
                buffers = TreeBuffers.of(*sizes, self._key_slots)
                planned = self._wrappers.static(buffers, self._bucket.rows, kind.heads)
            self._kinds[kind] = planned
            self._plan_kind(self._batch, kind, planned)
        return planned

    def _plan_kind(self, batch: PackedBatch, kind: LayerKind, planned: PlannedWrapper) -> None:
        planned.wait()
        self._plans.plan_tree(planned.wrapper, batch, kind)
        planned.mark()


# Paged attention by FlashInfer's kernels, for GPUs.
#
# A batch is planned once per kind of layer, with lengths that are known on the host, so that nothing
# waits for the device. There are three kernels, one for each shape of work:
#
# - decode: one new token per request, which sees all its keys;
# - causal prefill: prompts and the rows a drafter catches up on, without a mask;
# - tree prefill: anything else, under a packed mask of one bit per (query, key).


_log = logging.getLogger(__name__)


class FlashInferPagedAttention(PagedAttention):
    """Attention by FlashInfer over a pool on a GPU."""

    recordable: ClassVar[bool] = True

    def __init__(self, pool: KVPool, kernels: Kernels | None = None) -> None:
        """Attend over ``pool``.

        Args:
            pool: Keys and values, in half precision.
            kernels: Factory of wrappers; by default FlashInfer's.

        Raises:
            InvalidArgument: FlashInfer is not installed, or does not support the pool's head size
                or dtype.
        """
        check_pool(pool)
        self.pool = pool
        self._fallbacks: Counter[str] = Counter()
        self._wrappers = FlashInferWrappers(
            pool, FlashInferKernels() if kernels is None else kernels
        )
        self._plans = FlashInferPlans(pool)
        self._torch = TorchPagedAttention(pool)
        self._branches: dict[BranchShape, FlashInferBranches] = {}
        self._batch: PackedBatch | None = None
        self._planned: dict[LayerKind, PlannedWrapper] = {}

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: PackedBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`PagedAttention.attend`."""
        if sinks is not None:
            return self._fall_back("sinks").attend(
                layer, q, k, v, batch, scale=scale, window=window, softcap=softcap, sinks=sinks
            )
        keys, values = self.pool.write(layer, batch.slots, k, v)
        kind = LayerKind(batch.effective_window(window), scale, softcap, q.shape[1])
        planned = self._plan(batch, kind)
        return planned.attend(q, keys, values)

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """See :meth:`PagedAttention.fallbacks`."""
        return self._fallbacks

    def static(self, bucket: Bucket, *, max_context: int) -> StaticTreeAttention:
        """See :meth:`PagedAttention.static`."""
        return StaticTreeAttention(self.pool, self._wrappers, bucket, max_context=max_context)

    def branches(self, shape: BranchShape) -> FlashInferBranches:
        """See :meth:`PagedAttention.branches`.

        Recordings of one shape share the result: it is planned anew before each replay.
        """
        found = self._branches.get(shape)
        if found is None:
            found = self._branches[shape] = FlashInferBranches(self.pool, self._wrappers, shape)
        return found

    def _fall_back(self, reason: str) -> TorchPagedAttention:
        if not self._fallbacks[reason]:
            _log.warning(
                "FlashInfer's kernels lack %s: PyTorch's attention takes their calls", reason
            )
        self._fallbacks[reason] += 1
        return self._torch

    def _plan(self, batch: PackedBatch, kind: LayerKind) -> PlannedWrapper:
        if batch is not self._batch:
            self._batch, self._planned = batch, {}
        planned = self._planned.get(kind)
        if planned is None:
            planned = self._planned[kind] = self._plan_kind(batch, kind)
        return planned

    def _plan_kind(self, batch: PackedBatch, kind: LayerKind) -> PlannedWrapper:
        causal = kind.window is None and all(s.visible is None for s in batch.segments)
        if causal and batch.rows == len(batch.segments):
            planned = self._wrappers.plain("decode", kind)
            self._plans.plan_decode(planned.wrapper, batch, kind)
        elif causal:
            planned = self._wrappers.plain("causal", kind)
            self._plans.plan_causal(planned.wrapper, batch, kind)
        else:
            planned = self._wrappers.plain("tree", kind)
            self._plans.plan_tree(planned.wrapper, batch, kind)
        planned.mark()
        return planned


# Choice of the attention for a pool.


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
