"""Memory for the partial results of FlashInfer's wrappers."""

import torch
from torch import Tensor

from eaglegbv.attention.flashinfer_kernels import Kernels
from eaglegbv.attention.kv_pool import KVPool

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
