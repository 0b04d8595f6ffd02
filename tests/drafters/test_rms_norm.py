"""The norm of drafting heads."""

import pytest
import torch
from torch import nn

from eaglegbv.drafters.rms_norm import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_it_equals_pytorch(dtype: torch.dtype, scale: float) -> None:
    ours, theirs = RMSNorm(48, 1e-5, dtype=dtype), nn.RMSNorm(48, 1e-5, dtype=dtype)
    theirs.weight.data = ours.weight.data = torch.randn(48, dtype=dtype)
    x = scale * torch.randn(3, 2, 48, dtype=dtype)
    torch.testing.assert_close(ours(x), theirs(x))
