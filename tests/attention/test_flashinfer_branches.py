"""FlashInfer's kernels of drafted rows."""

import pytest
import torch
from support.flashinfer_place import Place
from support.ragged_batches import SCALE, SHUFFLED, SIZES, SLOTS, Sizes, new_rows, pools

from eaglegbv.attention.base import BranchShape
from eaglegbv.attention.flashinfer import FlashInferPagedAttention
from eaglegbv.attention.torch import TorchPagedAttention


@pytest.mark.parametrize("sizes", [SIZES, Sizes(8, 2, 64)], ids=str)
def test_kernels_of_drafted_rows_agree(sizes: Sizes, place: Place) -> None:
    """Level by level, for texts of two steps; rows of a request go on from each other's parents."""
    shape = BranchShape(
        requests=2, branches=3, levels=3, max_context=SLOTS, heads=sizes.heads, scale=SCALE
    )
    ours, reference = pools(place.device, sizes=sizes)
    both = (
        FlashInferPagedAttention(ours, place.kernels).branches(shape),
        TorchPagedAttention(reference).branches(shape),
    )
    for lengths, parents in (((5, 300), [[0, 0, 2], [0, 2, 1]]), ((40, 8), None)):
        slots = SHUFFLED[800:818].view(2, 3, 3)
        for left in (ours.keys, ours.values):  # by an earlier text, of slots to come
            left[0, SHUFFLED[806:]] = torch.nan
        for branches in both:
            branches.plan([SHUFFLED[: lengths[0]], SHUFFLED[400 : 400 + lengths[1]]], slots)
        chains = None
        for level in range(3):
            if parents is not None:
                own = torch.arange(3).expand(2, 3).unsqueeze(2)
                above = [] if chains is None else [chains.cpu()[[[0], [1]], parents]]
                chains = torch.cat([*above, own], dim=2).to(place.device)
            q, k, v = new_rows(6, place.device, sizes=sizes)
            found, expected = (
                branches.attend(level, q.roll(level, 0), k, v, chains) for branches in both
            )
            torch.testing.assert_close(found, expected, atol=0.03, rtol=0.03)
