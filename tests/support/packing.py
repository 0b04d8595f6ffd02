"""Weights are packed where PyTorch has oneDNN."""

import pytest
import torch

from eaglegbv.fused_linears import can_pack

needs_packing = pytest.mark.skipif(
    not can_pack(torch.zeros(1, 1)), reason="PyTorch without oneDNN packs no weights"
)
