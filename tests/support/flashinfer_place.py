"""Where FlashInfer's kernels run in tests: on a GPU, or interpreted on the host."""

from dataclasses import dataclass
from typing import Any

import torch

from eaglegbv.attention.base import AttentionCall, pack
from eaglegbv.attention.flashinfer import FlashInferKernels, FlashInferPagedAttention
from eaglegbv.attention.torch import TorchPagedAttention
from support.ragged_batches import BATCHES, LAYERS, SCALE, SIZES, Sizes, moved, new_rows, pools


@dataclass(frozen=True)
class Place:
    """Where kernels run, and what makes their wrappers."""

    device: str
    kernels: FlashInferKernels


def check_kernels(place: Place, name: str, sizes: Sizes = SIZES, **scores: Any) -> None:
    """Check that FlashInfer attends as PyTorch does, over a named batch, in every layer."""
    ours, reference = pools(place.device, sizes=sizes)
    attention = FlashInferPagedAttention(ours, place.kernels)
    expected_by = TorchPagedAttention(reference)
    batch = pack(moved(BATCHES[name], place.device))
    for layer in range(LAYERS):
        q, k, v = new_rows(batch.rows, place.device, sizes=sizes)
        found, expected = (
            a.attend(AttentionCall(layer, SCALE, **scores), q, k, v, batch)
            for a in (attention, expected_by)
        )
        torch.testing.assert_close(found, expected, atol=0.03, rtol=0.03)
