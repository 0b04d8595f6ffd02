"""Attention of drafted rows by FlashInfer's kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eaglegbv.attention.base import offsets_of
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
        for level, (buffers, planned) in enumerate(self._levels, start=1):
            ends = [len(c) + level for c in contexts for _ in range(self.shape.branches)]
            offsets = torch.tensor(offsets_of(ends), dtype=torch.int32)
            # Slots of the path are written over by the recording; the text's last stands in.
            keys = [torch.cat((c, c[-1:].expand(level))) for c in contexts]
            slots = torch.cat([own for own in keys for _ in range(self.shape.branches)])
            places = offsets[1:].long().unsqueeze(1) - torch.arange(level, 0, -1)
            buffers.tails.copy_(places, non_blocking=True)
            planned.wait()
            self._plans.plan_rows(planned.wrapper, (offsets, slots.to(torch.int32)), self.shape)
            planned.mark()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tails: Tensor) -> Tensor:
        """See :meth:`BranchAttention.attend`."""
        buffers, planned = self._levels[tails.shape[1] - 1]
        buffers.key_slots.index_copy_(0, buffers.tails.flatten(), tails.flatten().to(torch.int32))
        keys, values = self.pool.write(0, tails[:, -1], k, v)
        return planned.attend(q, keys, values)
