"""How a drafter's weights are held: 8 bits change its laws, which the verifier is told exactly."""

from enum import StrEnum

import torch

from eaglegbv.errors import InvalidArgument

_FAST_INT8 = frozenset({"AVX2", "AVX512"})
"""Capabilities of a CPU for which PyTorch has fast kernels for weights of 8 bits."""


class Quantization(StrEnum):
    """How a drafter's weights are held."""

    AUTO = "auto"
    """As ``int8`` where that is fast, else as ``none``."""
    INT8 = "int8"
    """Integers of 8 bits and a scale for each row; rows to multiply are rounded to bfloat16."""
    NONE = "none"
    """As they are."""


def settled(
    quantization: Quantization, *, dtype: torch.dtype, device: torch.device
) -> Quantization:
    """Settle ``auto`` for weights of a dtype on a device; return what is not ``auto`` as it is.

    Raises:
        InvalidArgument: It is ``int8`` where 8 bits would be slower, or are not supported.
    """
    fast = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in _FAST_INT8
    able = fast and dtype in (torch.float32, torch.bfloat16)
    if quantization is Quantization.INT8 and not able:
        expected = "none, or auto: 8 bits take float32 or bfloat16 and a CPU with AVX2 or AVX-512"
        raise InvalidArgument("draft_quantization", str(quantization), expected)
    if quantization is Quantization.AUTO:
        return Quantization.INT8 if able else Quantization.NONE
    return quantization
