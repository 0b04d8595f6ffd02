"""Masks lie where FlashInfer's kernels read them."""

import pytest
import torch
from support.pretend_device import PretendDevice
from support.ragged_batches import BATCHES

from eaglegbv.attention.masks import PackedMasks, pack_bits


def test_bits_are_packed_first_lowest() -> None:
    bits = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1], dtype=torch.bool)
    assert pack_bits(bits).tolist() == [1, 6]
    assert pack_bits(torch.ones(16, dtype=torch.bool)).tolist() == [255, 255]
    assert pack_bits(torch.zeros(0, dtype=torch.bool)).tolist() == []


@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize("name", BATCHES)
def test_every_bit_of_a_packed_mask_lies_where_the_kernel_reads_it(
    name: str, window: int | None
) -> None:
    segments = BATCHES[name]
    masks = PackedMasks.of(segments, window)
    assert masks.bits.dtype == torch.uint8
    assert masks.byte_offsets.dtype == torch.int32
    assert len(masks.bits) == masks.byte_offsets[-1]
    for segment, first in zip(segments, masks.byte_offsets.tolist(), strict=False):
        dense = segment.key_mask(window)
        for q in range(segment.num_new):
            for k in range(segment.num_keys):
                bit = q * segment.num_keys + k
                found = int(masks.bits[first + bit // 8]) >> bit % 8 & 1
                assert found == (1 if dense is None else int(dense[q, k]))


@pytest.mark.parametrize("window", [None, 4])
def test_masks_of_prompts_are_made_where_they_are_read(window: int | None) -> None:
    expected = PackedMasks.of(BATCHES["trees and a prompt"], window).bits
    with PretendDevice() as device:
        # The bits of a prompt alone: nothing of its size is copied there.
        found = PackedMasks.of(BATCHES["trees and a prompt"], window, "cuda")
        assert found.bits.device.type == "cuda"
        assert not device.reads
        assert not device.blocking
        assert torch.equal(found.bits.cpu(), expected)
