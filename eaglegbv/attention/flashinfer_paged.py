"""Paged attention by FlashInfer's kernels, for GPUs; page size 1, so that slots are pages.

A batch is planned once per kind of layer, with lengths that are known on the host, so that nothing
waits for the device. Three kernels, one for each shape of work:

- decode: one new token each that sees all its keys;
- causal prefill: prompts and the rows a drafter catches up on, no mask read;
- tree prefill: anything else, under a packed mask of one bit per (query, key).

FlashInfer's packed mask (``variants.cuh``): a request's bits lie row by row over *all* of its keys,
query q and key k at bit ``q * keys + k``, little-endian, rows not aligned, each request beginning
on a byte; ``mask_indptr`` counts bytes. ``plan(packed_custom_mask=...)`` of 0.6.18 and 0.7.2 leaves
``mask_indptr`` in bits, which is wrong for every request but the first, so it is written again here
after planning. Windows go into the mask: the kernel's own count packed indices, not positions.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from eaglegbv.attention.base import (
    PackedBatch,
    PagedAttention,
    Segment,
    StaticAttention,
    joined,
)
from eaglegbv.attention.branches import BranchAttention, BranchShape
from eaglegbv.attention.kv_pool import KVPool
from eaglegbv.attention.torch_paged import TorchPagedAttention
from eaglegbv.config import MAX_DEPTH
from eaglegbv.errors import InvalidArgument
from eaglegbv.graphs import MAX_ROWS, Bucket, NotRecordable
from eaglegbv.transfer import send

HEAD_DIMS = frozenset({64, 128, 256})
"""Head sizes that the kernels are tested with upstream."""

DTYPES = frozenset({torch.float16, torch.bfloat16})

_BACKEND = "fa2"
"""The kernels that read masks. Left to choose, FlashInfer 0.7 decodes by cuDNN at times, which has
neither these plans nor this memory.
"""

_WORKSPACE_BYTES = 128 << 20
"""Least of what wrappers are given for partial results."""

_WORKSPACE_SLACK = 8 << 20
"""More than the least that they were found to need: they align parts of it."""

_PLAN_BYTES = 1 << 18
"""What a plan of fixed sizes is given, on the device and the host each: some twelve bytes a tile of
query rows. FlashInfer's own choice for any plan is 8 MiB, and there may be a hundred of them.
"""

_WAVES, _TILE, _ROW_TILE = 2, 128, 16
"""Blocks a multiprocessor runs at once by FlashInfer's count, and the query rows of one: at most,
and where requests have one query each.
"""

_TENSOR_CORE_GROUP = 4
_MOST_ROW_KEYS = 1 << 22
"""Keys of all drafted rows of a level together: 16 MiB of slots."""

_log = logging.getLogger(__name__)


class Wrapper(Protocol):
    """What is used of FlashInfer's batch wrappers."""

    _mask_indptr_buf: Tensor | None

    def plan(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401  FlashInfer's own types
        """Prepare a batch."""

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        """Attend."""

    def reset_workspace_buffer(self, partial_results: Tensor, plans: Tensor) -> None:
        """Use other memory from now on."""


class Kernels(Protocol):
    """Makes wrappers; FlashInfer's, or a test's."""

    def processors(self, device: torch.device) -> int:
        """Return how many multiprocessors share the work."""

    def prefill(self, workspace: Tensor) -> Wrapper:
        """Return a new wrapper for requests of several queries."""

    def decode(self, workspace: Tensor, *, tensor_cores: bool) -> Wrapper:
        """Return a new wrapper for requests of one query each."""

    def static_prefill(self, workspace: Tensor, buffers: "TreeBuffers") -> Wrapper:
        """Return a new wrapper for masked requests of fixed sizes, planned into ``buffers``."""

    def static_decode(
        self, workspace: Tensor, buffers: "RowBuffers", *, tensor_cores: bool
    ) -> Wrapper:
        """Return a new wrapper for a fixed number of rows, planned into ``buffers``."""


class FlashInferKernels:
    """FlashInfer's wrappers."""

    def __init__(self) -> None:
        """Import FlashInfer.

        Raises:
            InvalidArgument: It is not installed.
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

    def static_prefill(self, workspace: Tensor, buffers: "TreeBuffers") -> Wrapper:
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
        return _of_small_plans(wrapper, workspace)

    def static_decode(
        self, workspace: Tensor, buffers: "RowBuffers", *, tensor_cores: bool
    ) -> Wrapper:
        """See :meth:`Kernels.static_decode`."""
        wrapper: Wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            backend=_BACKEND,
            paged_kv_indptr_buffer=buffers.key_offsets,
            paged_kv_indices_buffer=buffers.key_slots,
            paged_kv_last_page_len_buffer=buffers.last_pages,
        )
        return _of_small_plans(wrapper, workspace)


def _of_small_plans(wrapper: Wrapper, workspace: Tensor) -> Wrapper:
    """Take back from a wrapper what it has for plans of any size."""
    wrapper.reset_workspace_buffer(workspace, workspace.new_empty(_PLAN_BYTES))
    return wrapper


@dataclass(frozen=True, slots=True)
class TreeBuffers:
    """What a wrapper that is recorded is planned into: always the same memory.

    Attributes:
        query_offsets: ``[requests + 1]`` int32.
        key_offsets: ``[requests + 1]`` int32.
        key_slots: ``[keys at most]`` int32; those of all kinds of layers are the same.
        last_pages: ``[requests]`` int32.
        mask: ``[bytes at most]`` uint8.
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
        """Make room for ``requests`` of ``rows`` rows together and ``keys`` keys each at most."""
        device = key_slots.device

        def numbers(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        # The row of a request has a bit for each of its keys, and requests begin on a byte.
        mask = numbers(rows * keys // 8 + requests + 1, torch.uint8)
        offsets = (numbers(requests + 1), numbers(requests + 1))
        return cls(*offsets, key_slots, numbers(requests), mask, numbers(requests + 1))


@dataclass(frozen=True, slots=True)
class PackedMasks:
    """Masks of several requests behind each other.

    Attributes:
        bits: ``[bytes]`` uint8.
        byte_offsets: ``[requests + 1]`` int32, on the host.
    """

    bits: Tensor
    byte_offsets: Tensor

    @classmethod
    def of(
        cls, segments: Sequence[Segment], window: int | None, device: torch.device | str = "cpu"
    ) -> Self:
        """Pack what each new token sees, for ``device``; nothing is read from there."""
        sizes = [segment.num_new * segment.num_keys for segment in segments]
        offsets = list(accumulate(((size + 7) // 8 for size in sizes), initial=0))
        packed = [pack_bits(_mask(segment, window, device).flatten()) for segment in segments]
        return cls(joined(packed, device), torch.tensor(offsets, dtype=torch.int32))


def pack_bits(bits: Tensor) -> Tensor:
    """Pack ``[n]`` bool into ``[ceil(n / 8)]`` uint8, the first bit lowest."""
    padding = -bits.shape[0] % 8
    octets = torch.nn.functional.pad(bits, (0, padding)).view(-1, 8).to(torch.uint8)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (octets * weights).sum(dim=1, dtype=torch.uint8)


def _mask(segment: Segment, window: int | None, device: torch.device | str) -> Tensor:
    # A prompt's is large, and quickly made where it is needed; those of trees are small and many.
    mask = segment.key_mask(window, device if segment.visible is None else None)
    if mask is None:
        shape = (segment.num_new, segment.num_keys)
        return torch.ones(shape, dtype=torch.bool, device=segment.token_ids.device)
    return mask


@dataclass(frozen=True, slots=True)
class _LayerKind:
    """Layers that share a plan.

    Attributes:
        window: Sliding window, or None.
        scale: Of the scores.
        softcap: Of the scores, or None.
        heads: Query heads.
    """

    window: int | None
    scale: float
    softcap: float | None
    heads: int


@dataclass(frozen=True, slots=True)
class RowBuffers:
    """What a wrapper for rows of one query each is planned into.

    Attributes:
        key_offsets: ``[rows + 1]`` int32.
        key_slots: ``[keys at most]`` int32.
        last_pages: ``[rows]`` int32.
        tails: ``[rows, level]`` int64, where in ``key_slots`` the slots of a row's path stand.
    """

    key_offsets: Tensor
    key_slots: Tensor
    last_pages: Tensor
    tails: Tensor

    @classmethod
    def of(cls, rows: int, level: int, key_slots: Tensor) -> Self:
        """Make room for ``rows``, the last ``level`` keys of each a path."""

        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=key_slots.device)

        tails = numbers(rows, level, dtype=torch.int64)
        return cls(numbers(rows + 1), key_slots, numbers(rows), tails)


class FlashInferPagedAttention(PagedAttention):
    """Attention by FlashInfer over a pool on a GPU."""

    recordable: ClassVar[bool] = True

    def __init__(self, pool: KVPool, kernels: Kernels | None = None) -> None:
        """Attend over ``pool``.

        Args:
            pool: Keys and values, in half precision.
            kernels: Makes wrappers; None for FlashInfer's.

        Raises:
            InvalidArgument: FlashInfer is not installed, or the pool's head size or type is one it
                does not serve.
        """
        check_pool(pool)
        self.pool = pool
        self._fallbacks: Counter[str] = Counter()
        self._kernels = FlashInferKernels() if kernels is None else kernels
        self._workspace = pool.keys.new_empty(0, dtype=torch.uint8)
        self._torch = TorchPagedAttention(pool)
        self._wrappers: dict[tuple[str, _LayerKind], _Planned] = {}
        self._planned: PackedBatch | None = None
        self._plans: dict[_LayerKind, Wrapper] = {}
        self._row_wrappers: dict[tuple[int, int, int], tuple[RowBuffers, _Planned]] = {}
        self._row_keys: dict[int, Tensor] = {}

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
        keys, values = self.pool.layer(layer)
        keys.index_copy_(0, batch.slots, k)
        values.index_copy_(0, batch.slots, v)
        wrapper = self._plan(batch, _LayerKind(window, scale, softcap, q.shape[1]))
        return _attend(wrapper, q, keys, values)

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """See :meth:`PagedAttention.fallbacks`."""
        return self._fallbacks

    def static(self, bucket: Bucket, *, max_context: int) -> "StaticTreeAttention":
        """See :meth:`PagedAttention.static`."""
        return StaticTreeAttention(self, bucket, max_context)

    def branches(self, shape: BranchShape) -> "FlashInferBranches":
        """See :meth:`PagedAttention.branches`."""
        return FlashInferBranches(self, shape)

    def _fall_back(self, reason: str) -> TorchPagedAttention:
        if not self._fallbacks[reason]:
            _log.warning(
                "FlashInfer's kernels lack %s: PyTorch's attention takes their calls", reason
            )
        self._fallbacks[reason] += 1
        return self._torch

    def _plan(self, batch: PackedBatch, kind: _LayerKind) -> Wrapper:
        if batch is not self._planned:
            self._planned, self._plans = batch, {}
        if kind.window is not None and all(s.num_keys <= kind.window for s in batch.segments):
            kind = _LayerKind(None, kind.scale, kind.softcap, kind.heads)
        wrapper = self._plans.get(kind)
        if wrapper is None:
            wrapper = self._plans[kind] = self._plan_kind(batch, kind)
        return wrapper

    def _plan_kind(self, batch: PackedBatch, kind: _LayerKind) -> Wrapper:
        causal = kind.window is None and all(s.visible is None for s in batch.segments)
        if causal and batch.rows == len(batch.segments):
            return self._plan_decode(batch, kind)
        planned = self._wrapper("causal" if causal else "tree", kind)
        wrapper = planned.wrapper
        if causal:
            self._plan_prefill(wrapper, batch, kind, None)
        else:
            masks = self.plan_tree(wrapper, batch, kind)
            # See the module's description: plan leaves bits where the kernel reads bytes.
            wrapper._mask_indptr_buf = send(masks.byte_offsets, self.pool.keys.device)
        planned.mark()
        return wrapper

    def plan_tree(self, wrapper: Wrapper, batch: PackedBatch, kind: _LayerKind) -> PackedMasks:
        """Plan a batch under its masks; the wrapper's ``mask_indptr`` is the caller's to mend."""
        masks = PackedMasks.of(batch.segments, kind.window, self.pool.keys.device)
        self._plan_prefill(wrapper, batch, kind, masks.bits)
        return masks

    def static_wrapper(self, buffers: TreeBuffers, bucket: Bucket, heads: int) -> "_Planned":
        """Return a new wrapper for a bucket that is planned into ``buffers``."""
        room = self._room(heads, rows=bucket.rows, requests=bucket.requests + 1)
        return self._planned_by(self._kernels.static_prefill(room, buffers))

    def row_wrapper(self, shape: BranchShape, level: int) -> tuple[RowBuffers, "_Planned"]:
        """Return the wrapper of drafted rows at a level, and what it is planned into.

        Recordings of as many rows share it, and those of a level the list of keys: all is planned
        again before any of them is replayed.
        """
        rows = shape.requests * shape.branches
        found = self._row_wrappers.get((rows, level, shape.heads))
        if found is None:
            with torch.inference_mode(mode=False):
                if level not in self._row_keys:
                    self._row_keys[level] = torch.zeros(
                        self.most_row_keys(shape), dtype=torch.int32, device=self.pool.keys.device
                    )
                buffers = RowBuffers.of(rows, level, self._row_keys[level])
                sharing = self._sharing(shape.heads)
                cores = sharing >= _TENSOR_CORE_GROUP
                tile = _ROW_TILE if sharing <= _ROW_TILE else _TILE  # they are rows of a block
                room = self._room(shape.heads, rows=rows, requests=rows, tile=tile)
                wrapper = self._kernels.static_decode(room, buffers, tensor_cores=cores)
            found = buffers, self._planned_by(wrapper)
            self._row_wrappers[rows, level, shape.heads] = found
        return found

    def most_row_keys(self, shape: BranchShape) -> int:
        """Return how many keys drafted rows of a level may have together."""
        longest = min(shape.max_context, self.pool.num_slots) + MAX_DEPTH
        return min(MAX_ROWS * longest, _MOST_ROW_KEYS)

    def plan_rows(self, wrapper: Wrapper, pages: tuple[Tensor, Tensor], shape: BranchShape) -> None:
        """Plan rows of one query each, from offsets (host) and slots of keys (host)."""
        offsets, slots = pages
        kind = _LayerKind(None, shape.scale, None, shape.heads)
        wrapper.plan(
            offsets,
            send(slots, self.pool.keys.device),
            torch.ones(len(offsets) - 1, dtype=torch.int32),
            kind.heads,
            *self._sizes,
            **self._settings(kind),
        )

    def _plan_prefill(
        self, wrapper: Wrapper, batch: PackedBatch, kind: _LayerKind, bits: Tensor | None
    ) -> None:
        wrapper.plan(
            torch.tensor(batch.offsets, dtype=torch.int32),
            *self._pages(batch),
            kind.heads,
            *self._sizes,
            packed_custom_mask=bits,
            causal=bits is None,
            **self._settings(kind),
        )

    def _plan_decode(self, batch: PackedBatch, kind: _LayerKind) -> Wrapper:
        planned = self._wrapper("decode", kind)
        planned.wrapper.plan(*self._pages(batch), kind.heads, *self._sizes, **self._settings(kind))
        planned.mark()
        return planned.wrapper

    def _wrapper(self, name: str, kind: _LayerKind) -> "_Planned":
        """Return the wrapper of a kernel and kind of layer, ready to be planned."""
        planned = self._wrappers.get((name, kind))
        if planned is None:
            room = self._room(kind.heads)
            with torch.inference_mode(mode=False):  # what it makes, later plans write to
                if name == "decode":
                    cores = self._sharing(kind.heads) >= _TENSOR_CORE_GROUP
                    wrapper = self._kernels.decode(room, tensor_cores=cores)
                else:
                    wrapper = self._kernels.prefill(room)
            planned = self._wrappers[name, kind] = self._planned_by(wrapper)
        planned.wait()
        return planned

    def _sharing(self, heads: int) -> int:
        """Return how many of the query heads read one key head."""
        return heads // self.pool.keys.shape[2]

    def _room(self, heads: int, *, rows: int = 0, requests: int = 0, tile: int = _TILE) -> Tensor:
        """Return memory for a new wrapper's partial results; wrappers run one after another.

        Where more is needed than before, earlier wrappers keep what they were given.
        """
        device = self.pool.keys.device
        kv_heads, head_dim, _ = self._sizes
        needed = workspace_bytes(
            heads,
            kv_heads,
            head_dim,
            processors=self._kernels.processors(device),
            rows=rows,
            requests=requests,
            tile=tile,
        )
        if needed > len(self._workspace):
            # By powers of two, so that those of earlier wrappers add up to no more than this one.
            size = 1 << (needed - 1).bit_length()
            with torch.inference_mode(mode=False):
                self._workspace = torch.empty(size, dtype=torch.uint8, device=device)
        return self._workspace

    def _planned_by(self, wrapper: Wrapper) -> "_Planned":
        return _Planned(wrapper, torch.cuda.Event() if self.pool.keys.is_cuda else None)

    def _pages(self, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return offsets (host), slots of all keys (device), and lengths of last pages (host)."""
        counts = (segment.num_keys for segment in batch.segments)
        offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        slots = torch.cat([segment.key_slots() for segment in batch.segments]).to(torch.int32)
        slots = send(slots, self.pool.keys.device)
        return offsets, slots, torch.ones(len(batch.segments), dtype=torch.int32)

    def _settings(self, kind: _LayerKind) -> dict[str, Any]:
        dtype = self.pool.keys.dtype
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
        return self.pool.keys.shape[2], self.pool.keys.shape[3], 1


class StaticTreeAttention(StaticAttention):
    """Masked attention of batches of fixed sizes, planned into memory that stays where it is.

    Every kind of layer has a wrapper of its own: one that has once been given a mask reads it
    always. A window goes into the mask, whether texts have reached it or not.
    """

    def __init__(self, owner: FlashInferPagedAttention, bucket: Bucket, max_context: int) -> None:
        """Begin without wrappers: the first forward shows what kinds of layers there are.

        Args:
            owner: Whose pool, kernels and workspace are used.
            bucket: Requests, one more that pads, and rows.
            max_context: Most positions of a text.
        """
        super().__init__(owner)
        self._owner = owner
        self._bucket = bucket
        self._max_context = max_context
        self._batch: PackedBatch | None = None
        self._wrappers: dict[_LayerKind, tuple[_Planned, TreeBuffers]] = {}
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
        for kind, (planned, buffers) in self._wrappers.items():
            self._plan_kind(batch, kind, planned, buffers)

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
            NotRecordable: There are sinks, which the kernels lack.
        """
        if sinks is not None:
            raise NotRecordable("sinks")
        keys, values = self.pool.layer(layer)
        keys.index_copy_(0, batch.slots, k)
        values.index_copy_(0, batch.slots, v)
        if window is not None and window >= self._max_context:
            window = None
        wrapper = self._wrapper(_LayerKind(window, scale, softcap, q.shape[1]))
        return _attend(wrapper, q, keys, values)

    def _wrapper(self, kind: _LayerKind) -> Wrapper:
        known = self._wrappers.get(kind)
        if known is None:
            assert self._batch is not None  # a recording begins with a plan
            with torch.inference_mode(mode=False):
                sizes = (self._bucket.requests + 1, self._bucket.rows, self._keys)
                buffers = TreeBuffers.of(*sizes, self._key_slots)
                planned = self._owner.static_wrapper(buffers, self._bucket, kind.heads)
            known = self._wrappers[kind] = planned, buffers
            self._plan_kind(self._batch, kind, *known)
        return known[0].wrapper

    def _plan_kind(
        self, batch: PackedBatch, kind: _LayerKind, planned: "_Planned", buffers: TreeBuffers
    ) -> None:
        planned.wait()
        masks = self._owner.plan_tree(planned.wrapper, batch, kind)
        # See the module's description: plan leaves bits where the kernel reads bytes.
        buffers.mask_offsets.copy_(masks.byte_offsets, non_blocking=True)
        planned.mark()


class FlashInferBranches(BranchAttention):
    """Drafted rows as requests of their own: decode kernels, a wrapper planned for every level.

    Which slots a row's path has may be found out while the recording runs: the places they stand at
    among the row's keys are known when it is planned, and their numbers are written there then.
    """

    def __init__(self, owner: FlashInferPagedAttention, shape: BranchShape) -> None:
        """Make the wrappers.

        Args:
            owner: Whose pool, kernels and workspace are used.
            shape: The rows.
        """
        super().__init__(owner.pool, shape)
        self.most_keys = owner.most_row_keys(shape)
        self._owner = owner
        self._levels = [owner.row_wrapper(shape, level) for level in range(1, shape.levels + 1)]

    def plan(self, contexts: Sequence[Tensor]) -> None:
        """See :meth:`BranchAttention.plan`."""
        for level, (buffers, planned) in enumerate(self._levels, start=1):
            ends = [len(c) + level for c in contexts for _ in range(self.shape.branches)]
            offsets = torch.tensor([0, *accumulate(ends)], dtype=torch.int32)
            # Slots of the path are written over by the recording; the text's last stands in.
            keys = [torch.cat((c, c[-1:].expand(level))) for c in contexts]
            slots = torch.cat([own for own in keys for _ in range(self.shape.branches)])
            places = offsets[1:].long().unsqueeze(1) - torch.arange(level, 0, -1)
            buffers.tails.copy_(places, non_blocking=True)
            planned.wait()
            self._owner.plan_rows(planned.wrapper, (offsets, slots.to(torch.int32)), self.shape)
            planned.mark()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tails: Tensor) -> Tensor:
        """See :meth:`BranchAttention.attend`."""
        buffers, planned = self._levels[tails.shape[1] - 1]
        buffers.key_slots.index_copy_(0, buffers.tails.flatten(), tails.flatten().to(torch.int32))
        keys, values = self._write(k, v, tails)
        return _attend(planned.wrapper, q, keys, values)


def _attend(wrapper: Wrapper, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend from ``[rows, heads, head_dim]`` to a layer of the pool."""
    # Kernels read and write rows in order, though some models hand their heads over in another. And
    # without ``out`` a wrapper would clear fresh memory in every layer.
    q = q.contiguous()
    return wrapper.run(q, (keys.unsqueeze(1), values.unsqueeze(1)), out=torch.empty_like(q))


@dataclass(frozen=True, slots=True)
class _Planned:
    """A wrapper, and the moment its plan has reached the device.

    A plan is copied from host memory that the next plan overwrites.
    """

    wrapper: Wrapper
    copied: torch.cuda.Event | None

    def mark(self) -> None:
        """Note that the copy was asked for."""
        if self.copied is not None:
            self.copied.record()

    def wait(self) -> None:
        """Wait for the copy of the plan before."""
        if self.copied is not None:
            self.copied.synchronize()


def workspace_bytes(
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    processors: int,
    rows: int = 0,
    requests: int = 0,
    tile: int = _TILE,
) -> int:
    """Return what a wrapper needs at most for partial results (``scheduler.cuh`` of 0.6.18).

    Keys are split among blocks, a tile of query rows each, the query heads of a key head being
    rows. There are as many blocks as run at once, or what a recorded batch may have: every request
    may begin a tile. A block keeps a vector, and the sum of its weights, for every query head.

    Args:
        heads: Query heads.
        kv_heads: Key heads.
        head_dim: Their size.
        processors: Multiprocessors of the device.
        rows: Packed rows of a recorded batch; 0 for one that is not recorded.
        requests: Its requests.
        tile: Query rows of a block.
    """
    at_once = _WAVES * processors // kv_heads * tile
    recorded = rows * (heads // kv_heads) + requests * tile
    return max(
        _WORKSPACE_BYTES, heads * max(at_once, recorded) * (head_dim + 1) * 4 + _WORKSPACE_SLACK
    )


def check_pool(pool: KVPool) -> None:
    """Check that FlashInfer serves a pool.

    Raises:
        InvalidArgument: Its head size or type is not among those of the kernels.
    """
    head_dim, dtype = pool.keys.shape[3], pool.keys.dtype
    if head_dim not in HEAD_DIMS:
        raise InvalidArgument("head_dim", head_dim, f"one of {sorted(HEAD_DIMS)} for FlashInfer")
    if dtype not in DTYPES:
        raise InvalidArgument("dtype", str(dtype), "float16 or bfloat16 for FlashInfer")


def paged_attention(pool: KVPool) -> PagedAttention:
    """Return the attention for a pool: FlashInfer on a GPU, PyTorch elsewhere.

    Where FlashInfer is not installed or does not serve the pool, PyTorch's is taken on a GPU too; a
    warning says why, and its calls are counted as fall-backs by the argument that did not fit.
    """
    if not pool.keys.is_cuda:
        return TorchPagedAttention(pool)
    try:
        return FlashInferPagedAttention(pool)
    except InvalidArgument as error:
        _log.warning("PyTorch's attention on a GPU, which is slower: %s", error)
        return TorchPagedAttention(pool, instead=error.argument)
