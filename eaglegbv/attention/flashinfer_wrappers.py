"""FlashInfer's wrappers over a pool, each made on first use."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eaglegbv.attention.branches import BranchShape
from eaglegbv.attention.flashinfer_buffers import TreeBuffers
from eaglegbv.attention.flashinfer_kernels import Kernels, Wrapper
from eaglegbv.attention.flashinfer_plans import LayerKind
from eaglegbv.attention.kv_pool import KVPool
from eaglegbv.attention.workspace import Workspace
from eaglegbv.config import MAX_DEPTH
from eaglegbv.graphs import MAX_ROWS

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

    def plain(self, work: Literal["decode", "causal", "tree"], kind: LayerKind) -> PlannedWrapper:
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
