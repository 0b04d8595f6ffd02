"""How a drafter's weights are held: 8 bits change its laws, which the verifier gets exactly."""

from enum import StrEnum

import torch

from eaglegbv.errors import InvalidArgument

_FAST_INT8 = frozenset({"AVX2", "AVX512"})
"""CPU capabilities for which PyTorch has fast kernels for 8-bit weights."""


class Quantization(StrEnum):
    """How a drafter's weights are held."""

    AUTO = "auto"
    """As ``int8`` where that is fast, otherwise as ``none``."""
    INT8 = "int8"
    """8-bit integers with a scale for each row; rows to multiply are rounded to bfloat16."""
    NONE = "none"
    """Unchanged."""


def settled(
    quantization: Quantization, *, dtype: torch.dtype, device: torch.device
) -> Quantization:
    """Resolve ``auto`` for weights of a dtype on a device; return other values unchanged.

    Raises:
        InvalidArgument: It is ``int8`` where 8 bits would be slower or are not supported.
    """
    fast = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in _FAST_INT8
    able = fast and dtype in (torch.float32, torch.bfloat16)
    if quantization is Quantization.INT8 and not able:
        expected = "none, or auto: 8 bits take float32 or bfloat16 and a CPU with AVX2 or AVX-512"
        raise InvalidArgument("draft_quantization", str(quantization), expected)
    if quantization is Quantization.AUTO:
        return Quantization.INT8 if able else Quantization.NONE
    return quantization
