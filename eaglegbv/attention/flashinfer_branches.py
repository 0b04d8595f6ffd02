"""Attention of drafted rows by FlashInfer's kernels."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eaglegbv.attention.branches import BranchAttention, BranchShape
from eaglegbv.attention.flashinfer_plans import FlashInferPlans
from eaglegbv.attention.flashinfer_wrappers import FlashInferWrappers
from eaglegbv.attention.kv_pool import KVPool


class FlashInferBranches(BranchAttention):
    """Drafted rows as requests of their own: decode kernels, a wrapper planned for every level.

    Which slots a row's path has may be found out while the recording runs: the places they stand at
    among the row's keys are known when it is planned, and their numbers are written there then.
    """

    def __init__(self, pool: KVPool, wrappers: FlashInferWrappers, shape: BranchShape) -> None:
        """Make the wrappers.

        Args:
            pool: Keys and values.
            wrappers: Makes wrappers over them.
            shape: The rows.
        """
        super().__init__(pool, shape)
        self.most_keys = wrappers.most_row_keys(shape)
        self._plans = FlashInferPlans(pool)
        self._levels = [wrappers.rows(shape, level) for level in range(1, shape.levels + 1)]

    def plan(self, contexts: Sequence[Tensor]) -> None:
        """See :meth:`BranchAttention.plan`."""
        texts = [context.numpy() for context in contexts]
        for level, (buffers, planned) in enumerate(self._levels, start=1):
            lengths = np.repeat([len(text) + level for text in texts], self.shape.branches)
            ends = lengths.cumsum()
            places = ends[:, np.newaxis] - np.arange(level, 0, -1)
            buffers.tails.copy_(torch.from_numpy(places), non_blocking=True)
            offsets = torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32))
            slots = torch.from_numpy(_key_slots(texts, self.shape.branches, level))
            planned.wait()
            self._plans.plan_rows(planned.wrapper, (offsets, slots), self.shape)
            planned.mark()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tails: Tensor) -> Tensor:
        """See :meth:`BranchAttention.attend`."""
        buffers, planned = self._levels[tails.shape[1] - 1]
        buffers.key_slots.index_copy_(0, buffers.tails.flatten(), tails.flatten().to(torch.int32))
        keys, values = self.pool.write(0, tails[:, -1], k, v)
        return planned.attend(q, keys, values)


def _key_slots(texts: Sequence[NDArray[np.int64]], branches: int, level: int) -> NDArray[np.int32]:
    """Return ``[keys]``, for each branch of each text: the text's slots, and a path's ``level``.

    The path's are written over by the recording; the text's last stands in for them.
    """
    keys = np.empty(branches * sum(len(text) + level for text in texts), dtype=np.int32)
    first = 0
    for text in texts:
        length = len(text) + level
        own = keys[first : first + branches * length].reshape(branches, length)
        own[:, : len(text)] = text
        own[:, len(text) :] = text[-1]
        first += own.size
    return keys
