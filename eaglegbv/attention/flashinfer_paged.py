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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from eaglegbv.attention.base import PackedBatch, PagedAttention, Segment
from eaglegbv.attention.kv_pool import KVPool
from eaglegbv.attention.torch_paged import TorchPagedAttention
from eaglegbv.errors import InvalidArgument

HEAD_DIMS = frozenset({64, 128, 256})
"""Head sizes that the kernels are tested with upstream."""

DTYPES = frozenset({torch.float16, torch.bfloat16})

_WORKSPACE_BYTES = 256 << 20
_TENSOR_CORE_GROUP = 4

_log = logging.getLogger(__name__)


class Wrapper(Protocol):
    """What is used of FlashInfer's batch wrappers."""

    _mask_indptr_buf: Tensor | None

    def plan(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401  FlashInfer's own types
        """Prepare a batch."""

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        """Attend."""


class Kernels(Protocol):
    """Makes wrappers; FlashInfer's, or a test's."""

    def prefill(self, workspace: Tensor) -> Wrapper:
        """Return a new wrapper for requests of several queries."""

    def decode(self, workspace: Tensor, *, tensor_cores: bool) -> Wrapper:
        """Return a new wrapper for requests of one query each."""


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

    def prefill(self, workspace: Tensor) -> Wrapper:
        """See :meth:`Kernels.prefill`; the FA2 kernels are those that read masks."""
        wrapper: Wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend="fa2"
        )
        return wrapper

    def decode(self, workspace: Tensor, *, tensor_cores: bool) -> Wrapper:
        """See :meth:`Kernels.decode`."""
        wrapper: Wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=tensor_cores
        )
        return wrapper


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
    def of(cls, segments: Sequence[Segment], window: int | None) -> Self:
        """Pack what each new token sees; nothing is read on the host."""
        sizes = [segment.num_new * segment.num_keys for segment in segments]
        offsets = list(accumulate(((size + 7) // 8 for size in sizes), initial=0))
        packed = [pack_bits(_mask(segment, window).flatten()) for segment in segments]
        return cls(torch.cat(packed), torch.tensor(offsets, dtype=torch.int32))


def pack_bits(bits: Tensor) -> Tensor:
    """Pack ``[n]`` bool into ``[ceil(n / 8)]`` uint8, the first bit lowest."""
    padding = -bits.shape[0] % 8
    octets = torch.nn.functional.pad(bits, (0, padding)).view(-1, 8).to(torch.uint8)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (octets * weights).sum(dim=1, dtype=torch.uint8)


def _mask(segment: Segment, window: int | None) -> Tensor:
    mask = segment.key_mask(window)
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


class FlashInferPagedAttention(PagedAttention):
    """Attention by FlashInfer over a pool on a GPU."""

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
        self.fallbacks: Counter[str] = Counter()
        """Calls that PyTorch's attention served instead, by what the kernels lack."""
        self._kernels = FlashInferKernels() if kernels is None else kernels
        self._workspace = torch.empty(
            _WORKSPACE_BYTES if pool.keys.is_cuda else 1,
            dtype=torch.uint8,
            device=pool.keys.device,
        )
        self._torch = TorchPagedAttention(pool)
        self._wrappers: dict[tuple[str, _LayerKind], _Planned] = {}
        self._planned: PackedBatch | None = None
        self._plans: dict[_LayerKind, Wrapper] = {}

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
        # Without ``out`` it would clear fresh memory in every layer.
        return wrapper.run(
            q.contiguous(), (keys.unsqueeze(1), values.unsqueeze(1)), out=torch.empty_like(q)
        )

    def _fall_back(self, reason: str) -> TorchPagedAttention:
        if not self.fallbacks[reason]:
            _log.warning(
                "FlashInfer's kernels lack %s: PyTorch's attention takes their calls", reason
            )
        self.fallbacks[reason] += 1
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
        masks = None if causal else PackedMasks.of(batch.segments, kind.window)
        wrapper = planned.wrapper
        wrapper.plan(
            torch.tensor(batch.offsets, dtype=torch.int32),
            *self._pages(batch),
            kind.heads,
            *self._sizes,
            packed_custom_mask=None if masks is None else masks.bits,
            causal=causal,
            **self._settings(kind),
        )
        if masks is not None:
            # See the module's description: plan leaves bits where the kernel reads bytes.
            device = self.pool.keys.device
            wrapper._mask_indptr_buf = masks.byte_offsets.to(device)
        planned.mark()
        return wrapper

    def _plan_decode(self, batch: PackedBatch, kind: _LayerKind) -> Wrapper:
        planned = self._wrapper("decode", kind)
        planned.wrapper.plan(*self._pages(batch), kind.heads, *self._sizes, **self._settings(kind))
        planned.mark()
        return planned.wrapper

    def _wrapper(self, name: str, kind: _LayerKind) -> "_Planned":
        """Return the wrapper of a kernel and kind of layer, ready to be planned."""
        planned = self._wrappers.get((name, kind))
        if planned is None:
            if name == "decode":
                cores = kind.heads // self.pool.keys.shape[2] >= _TENSOR_CORE_GROUP
                wrapper = self._kernels.decode(self._workspace, tensor_cores=cores)
            else:
                wrapper = self._kernels.prefill(self._workspace)
            event = torch.cuda.Event() if self.pool.keys.is_cuda else None
            planned = self._wrappers[name, kind] = _Planned(wrapper, event)
        planned.wait()
        return planned

    def _pages(self, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return offsets (host), slots of all keys (device), and lengths of last pages (host)."""
        counts = (segment.num_keys for segment in batch.segments)
        offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        slots = torch.cat([segment.key_slots() for segment in batch.segments]).to(torch.int32)
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

    Where FlashInfer is not installed or does not serve the pool, PyTorch's is taken on a GPU too,
    and a warning says why.
    """
    if not pool.keys.is_cuda:
        return TorchPagedAttention(pool)
    try:
        return FlashInferPagedAttention(pool)
    except InvalidArgument as error:
        _log.warning("PyTorch's attention on a GPU, which is slower: %s", error)
        return TorchPagedAttention(pool)
