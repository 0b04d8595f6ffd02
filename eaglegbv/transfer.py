"""Moving numbers between the host and a device, without waiting more often than needed.

A copy to a device need not wait for it: the numbers are staged, and the copy takes its place in the
device's queue. A copy back waits until all work before it is done, so a step of the engine makes
one, of everything it has to know.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_STAGED_BY_CUDA = 1 << 16
"""Bytes of pageable memory up to which CUDA stages a copy by itself."""


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return ``tensor`` on ``device``; from the host nothing is waited for.

    Of more pageable memory CUDA waits for all that is queued before it copies. So that is pinned
    first, in memory that PyTorch keeps, and gives to nobody else before the copy is done.
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
    """Return tensors on the host, however many, by one wait for their device."""
    found = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    if device is not None:
        _wait_for(device)
    return found


def _wait_for(device: torch.device) -> None:
    torch.accelerator.current_stream(device).synchronize()
