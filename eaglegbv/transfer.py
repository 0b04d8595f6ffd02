"""Moving numbers between the host and a device, without waiting more often than needed.

A copy to a device need not wait for it: the numbers are staged, and the copy takes its place in the
device's queue. A copy back waits until all earlier work is done. So a step of the engine makes one
such copy, of everything it needs to know.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_STAGED_BY_CUDA = 1 << 16
"""Most bytes of pageable memory for which CUDA stages a copy by itself."""


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return ``tensor`` on ``device``; a copy from the host waits for nothing.

    For more pageable memory, CUDA waits for all queued work before it copies. So such a tensor is
    pinned first, in memory that PyTorch keeps and does not reuse before the copy is done.
    """
    leaves = torch.device(device).type == "cuda" and tensor.device.type == "cpu"
    if leaves and tensor.nbytes > _STAGED_BY_CUDA:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def upload(
    values: Sequence[object], *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Return host numbers as a tensor on ``device``, without waiting for it."""
    return send(torch.tensor(values, dtype=dtype), device)


def fetch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return any number of tensors on the host, waiting for their device once."""
    found = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    if device is not None:
        _wait_for(device)
    return found


def _wait_for(device: torch.device) -> None:
    torch.accelerator.current_stream(device).synchronize()
