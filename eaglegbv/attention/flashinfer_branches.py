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
