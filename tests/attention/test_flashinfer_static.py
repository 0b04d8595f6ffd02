"""FlashInfer's kernels of fixed sizes."""

import pytest
import torch
from support.flashinfer_place import Place
from support.ragged_batches import BATCHES, SCALE, SLOTS, moved, new_rows, padded, pools

from eaglegbv.attention.base import pack
from eaglegbv.attention.flashinfer import FlashInferPagedAttention
from eaglegbv.attention.torch import TorchPagedAttention


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_kernels_of_fixed_sizes_agree(name: str, window: int | None, place: Place) -> None:
    """Planned anew for other texts of as many rows."""
    ours, reference = pools(place.device)
    on_host, bucket = padded(BATCHES[name])
    segments = moved(on_host, place.device)
    static = FlashInferPagedAttention(ours, place.kernels).static(bucket, max_context=SLOTS)
    expected_by = TorchPagedAttention(reference)
    turned = [*segments[-2::-1], segments[-1]]
    for layer, own in enumerate((segments, turned)):
        batch = pack(own)
        q, k, v = new_rows(batch.rows, place.device)
        static.plan(batch)
        found, expected = (
            a.attend(layer, q, k, v, batch, scale=SCALE, window=window)
            for a in (static, expected_by)
        )
        # Rows that pad share a slot with others here.
        torch.testing.assert_close(found[:-1], expected[:-1], atol=0.03, rtol=0.03)
