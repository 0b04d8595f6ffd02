"""What a quantisation comes to, by type and place."""

import pytest
import torch
from support.eight_bits import HAS_INT8

from eaglegbv.errors import InvalidArgument
from eaglegbv.fused_linears import Quantization, settled

CPU = torch.device("cpu")


def test_what_quantisation_comes_to() -> None:
    usual = Quantization.INT8 if HAS_INT8 else Quantization.NONE
    assert settled(Quantization.AUTO, dtype=torch.float32, device=CPU) is usual
    for dtype, device in ((torch.float64, CPU), (torch.bfloat16, torch.device("cuda"))):
        assert settled(Quantization.AUTO, dtype=dtype, device=device) is Quantization.NONE
        assert settled(Quantization.NONE, dtype=dtype, device=device) is Quantization.NONE
        with pytest.raises(InvalidArgument, match=r"draft_quantization='int8'.*AVX"):
            settled(Quantization.INT8, dtype=dtype, device=device)
