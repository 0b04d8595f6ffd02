"""Measured bandwidth and arithmetic rate of the machine."""

from collections.abc import Callable

import msgspec
import torch

from eaglegbv.metrics import Phase, Stopwatch


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Measured rates of a device.

    Attributes:
        bandwidth: Bytes a second that a large copy moves; each byte counts once for reading and
            once for writing.
        flops: Multiplications and additions a second of a large matrix product.
    """

    bandwidth: float
    flops: float


def measure_machine(dtype: torch.dtype, device: torch.device, *, megabytes: int = 256) -> Machine:
    """Time a large copy and a large matrix product, and keep the best of several runs of each.

    Args:
        dtype: Dtype of the matrices.
        device: Device to measure.
        megabytes: Size of the copy, in MiB.
    """
    barrier = barrier_of(device)
    source = torch.zeros(megabytes << 20, dtype=torch.uint8, device=device)
    sink = torch.empty_like(source)
    copy = _best(lambda: sink.copy_(source), barrier)
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn((size, size), device=device).to(dtype)
    b = torch.randn((size, size), device=device).to(dtype)
    product = _best(lambda: torch.mm(a, b), barrier)
    return Machine(bandwidth=2 * source.numel() / copy, flops=2 * size**3 / product)


def barrier_of(device: torch.device) -> Callable[[], None] | None:
    """Return a function that waits for ``device`` to finish its work; None if none is needed."""
    return torch.cuda.synchronize if device.type == "cuda" else None


def _best(work: Callable[[], object], barrier: Callable[[], None] | None, runs: int = 6) -> float:
    """Return the shortest time of several runs, in seconds."""
    times = []
    for _ in range(runs):
        watch = Stopwatch(barrier)
        with watch.phase(Phase.FORWARD):
            work()
        times.append(watch.seconds[Phase.FORWARD])
    return min(times)
