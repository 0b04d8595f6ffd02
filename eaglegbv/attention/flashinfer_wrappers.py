"""FlashInfer's wrappers over a pool, each made when it is first asked for."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eaglegbv.attention.branches import BranchShape
from eaglegbv.attention.flashinfer_buffers import RowBuffers, TreeBuffers
from eaglegbv.attention.flashinfer_kernels import Kernels, Wrapper
from eaglegbv.attention.flashinfer_plans import LayerKind
from eaglegbv.attention.kv_pool import KVPool
from eaglegbv.attention.workspace import Workspace
from eaglegbv.config import MAX_DEPTH
from eaglegbv.graphs import MAX_ROWS, Bucket

_TENSOR_CORE_GROUP = 4
"""Fewest query heads of a key head whose rows are decoded by tensor cores, which FlashInfer advises
for large groups.
"""

_MOST_ROW_KEYS = 1 << 22
"""Keys of all drafted rows of a level together: 16 MiB of slots."""


@dataclass(frozen=True, slots=True)
class PlannedWrapper:
    """A wrapper, and the moment its plan has reached the device.

    A plan is copied from host memory that the next plan overwrites.

    Attributes:
        wrapper: FlashInfer's.
        copied: Comes after the copy; None on a CPU.
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

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from ``[rows, heads, head_dim]`` to a layer of the pool, as it was planned.

        Args:
            q: ``[rows, heads, head_dim]``, in any order in memory.
            keys: ``[slots, kv_heads, head_dim]``.
            values: ``[slots, kv_heads, head_dim]``.

        Returns:
            ``[rows, heads, head_dim]``.
        """
        # Kernels read and write rows in order, though some models hand their heads over in another.
        # And without ``out`` a wrapper would clear fresh memory in every layer.
        q = q.contiguous()
        pages = keys.unsqueeze(1), values.unsqueeze(1)
        return self.wrapper.run(q, pages, out=torch.empty_like(q))


class FlashInferWrappers:
    """Makes and keeps the wrappers over a pool, which share their memory for partial results."""

    def __init__(self, pool: KVPool, kernels: Kernels) -> None:
        """Begin without wrappers.

        Args:
            pool: Keys and values.
            kernels: Makes wrappers.
        """
        self._pool = pool
        self._kernels = kernels
        self._workspace = Workspace(pool, kernels)
        self._plain: dict[tuple[str, LayerKind], PlannedWrapper] = {}
        self._rows: dict[tuple[int, int, int], tuple[RowBuffers, PlannedWrapper]] = {}
        self._row_keys: dict[int, Tensor] = {}

    def plain(self, work: Literal["decode", "causal", "tree"], kind: LayerKind) -> PlannedWrapper:
        """Return the wrapper of a shape of work and kind of layer, ready to be planned."""
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

    def static(self, buffers: TreeBuffers, bucket: Bucket, heads: int) -> PlannedWrapper:
        """Return a new wrapper for a bucket that is planned into ``buffers``."""
        room = self._workspace.room(heads, rows=bucket.rows, requests=bucket.requests + 1)
        return self._planned_by(self._kernels.static_prefill(room, buffers))

    def rows(self, shape: BranchShape, level: int) -> tuple[RowBuffers, PlannedWrapper]:
        """Return the wrapper of drafted rows at a level, and what it is planned into.

        Recordings of as many rows share it, and those of a level the list of keys: all is planned
        again before any of them is replayed.
        """
        rows = shape.requests * shape.branches
        found = self._rows.get((rows, level, shape.heads))
        if found is None:
            with torch.inference_mode(mode=False):
                if level not in self._row_keys:
                    self._row_keys[level] = torch.zeros(
                        self.most_row_keys(shape), dtype=torch.int32, device=self._pool.keys.device
                    )
                buffers = RowBuffers.of(rows, level, self._row_keys[level])
                room = self._workspace.row_room(shape.heads, rows)
                cores = self._by_tensor_cores(shape.heads)
                wrapper = self._kernels.static_decode(room, buffers, tensor_cores=cores)
            found = buffers, self._planned_by(wrapper)
            self._rows[rows, level, shape.heads] = found
        return found

    def most_row_keys(self, shape: BranchShape) -> int:
        """Return how many keys drafted rows of a level may have together."""
        longest = min(shape.max_context, self._pool.num_slots) + MAX_DEPTH
        return min(MAX_ROWS * longest, _MOST_ROW_KEYS)

    def _by_tensor_cores(self, heads: int) -> bool:
        """Return whether as many query heads read a key head as tensor cores are good for."""
        return heads // self._pool.keys.shape[2] >= _TENSOR_CORE_GROUP

    def _planned_by(self, wrapper: Wrapper) -> PlannedWrapper:
        return PlannedWrapper(wrapper, torch.cuda.Event() if self._pool.keys.is_cuda else None)
