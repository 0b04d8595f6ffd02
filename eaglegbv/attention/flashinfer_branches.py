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
from eaglegbv.attention.packed_masks import PackedMasks
from eaglegbv.transfer import send


class FlashInferBranches(BranchAttention):
    """Drafted rows as masked queries of their requests: one wrapper, planned once for all levels.

    The keys of all levels are listed from the start, those to come unseen. Which of them a row does
    see may be found out while the recording runs: their bits are set in the mask then.

        bits of a row | context: 1 ... 1 | level 0: 0 0 1 0 | level 1: 0 1 0 0 | level 2: 0 0 0 0 |
    """

    def __init__(self, pool: KVPool, wrappers: FlashInferWrappers, shape: BranchShape) -> None:
        """Make the wrapper.

        Args:
            pool: Keys and values.
            wrappers: Makes wrappers over them.
            shape: The rows.
        """
        super().__init__(pool, shape)
        self.most_keys = wrappers.most_row_keys(shape.max_context)
        self._plans = FlashInferPlans(pool)
        self._buffers, self._planned = wrappers.branches(shape)
        device = pool.keys.device
        with torch.inference_mode(mode=False):
            # Where in the mask the bits of a row's drafted keys begin.
            self._firsts = torch.zeros(
                (shape.requests, shape.branches), dtype=torch.int64, device=device
            )
            self._branches = torch.arange(shape.branches, device=device)
            self._levels = torch.arange(shape.levels, device=device) * shape.branches
            # The mask as it is planned: a recording that runs twice is to find it so both times.
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
        """Make ready for the first level of a draft.

        Values that nobody sees yet are multiplied by 0, so what an earlier text left must not be
        infinite, or no number.
        """
        _, values = self.pool.layer(0)
        values.index_fill_(0, self.slots.flatten(), 0)
        levels = self._levels.view(-1, 1, 1)
        self._own = _octets_and_bits(levels + self._firsts + self._branches)
        self._buffers.mask.copy_(self._planned_mask)

    def _show_own(self, level: int) -> None:
        """Have every row see its own branch at a level; it sees those before."""
        octets, bits = self._own
        self._buffers.mask.index_add_(0, octets[level].flatten(), bits[level].flatten())

    def _show(self, chains: Tensor) -> None:
        """Have every row see the keys of its path alone."""
        first = self._firsts.unsqueeze(2) + self._levels[: chains.shape[2]]
        octets, bits = _octets_and_bits(first + chains)
        mask = self._buffers.mask.copy_(self._planned_mask)
        mask.index_add_(0, octets.flatten(), bits.flatten())


def _octets_and_bits(places: Tensor) -> tuple[Tensor, Tensor]:
    """Return which bytes bits of a mask are in, and what they add to these: int64 and uint8."""
    return places >> 3, torch.bitwise_left_shift(1, places & 7).to(torch.uint8)


def _mask_of_context(length: int, drafted: int, branches: int) -> NDArray[np.uint8]:
    """Return the packed mask of a request whose ``branches`` see all of its keys but the last."""
    seen = np.ones((branches, length), dtype=bool)
    seen[:, length - drafted :] = False
    return np.packbits(seen, bitorder="little")


def _offsets(sizes: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return where parts of ``sizes`` begin, and the end."""
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
