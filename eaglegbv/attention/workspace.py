"""Memory for the partial results of FlashInfer's wrappers."""

import torch
from torch import Tensor

from eaglegbv.attention.flashinfer_kernels import Kernels
from eaglegbv.attention.kv_pool import KVPool

_WORKSPACE_BYTES = 128 << 20
"""Least of what wrappers are given for partial results."""

_WORKSPACE_SLACK = 8 << 20
"""More than the least that they were found to need: they align parts of it."""

_WAVES = 2
"""Blocks that a multiprocessor runs at once, by FlashInfer's count."""

_TILE = 128
"""Query rows of a block at most."""

_MIDDLE_TILE, _SMALL_TILE = 64, 16
"""Query rows of a block where no request can have more; large heads have no more than the first."""

_LARGE_HEAD = 256
"""Head size from which on blocks have fewer rows."""


class Workspace:
    """One piece of memory for all wrappers over a pool: they run one after another.

    Where more is needed than before, earlier wrappers keep what they were given.
    """

    def __init__(self, pool: KVPool, kernels: Kernels) -> None:
        """Begin without memory.

        Args:
            pool: Whose key heads, head size and device count.
            kernels: Tells how many multiprocessors share the work.
        """
        self._pool = pool
        self._kernels = kernels
        self._memory = pool.keys.new_empty(0, dtype=torch.uint8)

    def room(self, heads: int, *, rows: int = 0, requests: int = 0) -> Tensor:
        """Return ``[bytes]`` uint8 for a new wrapper.

        Args:
            heads: Query heads.
            rows: Packed rows of a recorded batch; 0 for one that is not recorded.
            requests: Its requests.
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
            # By powers of two, so that those of earlier wrappers add up to no more than this one.
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
    """
    group = heads // kv_heads
    tile = _tile((rows - requests + 1) * group, head_dim) if rows else _TILE
    at_once = _WAVES * processors // kv_heads * tile
    recorded = rows * group + requests * tile
    return max(
        _WORKSPACE_BYTES, heads * max(at_once, recorded) * (head_dim + 1) * 4 + _WORKSPACE_SLACK
    )


def _tile(longest: int, head_dim: int) -> int:
    """Return the query rows of a block where no request has more than ``longest`` (``utils.cuh``).

    Of a recorded batch that is told by its rows, as if all other requests had one.
    """
    if longest <= _SMALL_TILE:
        return _SMALL_TILE
    return _MIDDLE_TILE if longest <= _MIDDLE_TILE or head_dim >= _LARGE_HEAD else _TILE
