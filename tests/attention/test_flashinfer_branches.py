"""FlashInfer's kernels of drafted rows."""

import pytest
import torch
from support.flashinfer_place import Place
from support.ragged_batches import SCALE, SHUFFLED, SIZES, SLOTS, Sizes, new_rows, pools

from eaglegbv.attention.branches import BranchShape
from eaglegbv.attention.flashinfer_paged import FlashInferPagedAttention
from eaglegbv.attention.torch_paged import TorchPagedAttention


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
    for lengths in ((5, 300), (40, 8)):
        for branches in both:
            branches.plan([SHUFFLED[: lengths[0]], SHUFFLED[400 : 400 + lengths[1]]])
        tails = torch.zeros((6, 0), dtype=torch.int64)
        for level in range(3):
            parents = torch.tensor([0, 0, 2, 3, 5, 4]) if level else torch.arange(6)
            own = SHUFFLED[800 + 6 * level : 806 + 6 * level].unsqueeze(1)
            tails = torch.cat((tails[parents], own), dim=1)
            q, k, v = new_rows(6, place.device, sizes=sizes)
            found, expected = (
                branches.attend(q.roll(level, 0), k, v, tails.to(place.device)) for branches in both
            )
            torch.testing.assert_close(found, expected, atol=0.03, rtol=0.03)
