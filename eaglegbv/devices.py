"""Devices and dtypes by name and by default, and the few operations that depend on them.

A copy to a device need not wait for it: the numbers are staged, and the copy takes its place in the
device's queue. A copy back waits until all earlier work is done. So a step of the engine makes one
such copy, of everything it needs to know.
"""

import ctypes
import logging
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from eaglegbv.errors import InvalidArgument, one_of

_log = logging.getLogger(__name__)

CPU_INFO = Path("/proc/cpuinfo")  # file in which Linux describes the processor

AUTO_DTYPE = "auto"  # name of the dtype that is fastest where it computes; see `place_of`
_DTYPES = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)


def named_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the dtype of a name such as ``"bfloat16"``, or a dtype itself; or InvalidArgument."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise InvalidArgument("dtype", dtype, f"{one_of([AUTO_DTYPE, *_DTYPES])}, or a torch.dtype")
    return _DTYPES[dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``"bfloat16"``, as used in configurations."""
    return str(dtype).removeprefix("torch.")


def named_device(device: torch.device | str) -> torch.device:
    """Return the device with a name such as ``"cuda:1"``; InvalidArgument if there is none here.

    PyTorch makes a device of any known name, and fails only when a tensor is moved there.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    others: list[str] = []
    expected = "cpu, as PyTorch finds no other device here"
    if accelerator is not None:
        others = [f"{accelerator.type}:{n}" for n in range(torch.accelerator.device_count())]
        expected = " or ".join(("cpu", *others))
    elif not torch.backends.cuda.is_built():
        expected += " (this PyTorch was built without CUDA)"
    try:
        wanted = torch.device(device)
    except RuntimeError:  # PyTorch does not know this kind of device
        raise InvalidArgument("device", str(device), expected) from None
    if f"{wanted.type}:{wanted.index or 0}" not in ("cpu:0", *others):
        raise InvalidArgument("device", str(device), expected)
    return wanted


def place_of(
    device: torch.device | str | None, dtype: torch.dtype | str
) -> tuple[torch.device, torch.dtype]:
    """Return the device and the dtype to compute with; InvalidArgument if there is no such one.

    By default the device is CUDA if there is one. The dtype ``"auto"`` is bfloat16 there, and on a
    CPU what :func:`cpu_dtype` chooses.
    """
    place = named_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return place, _auto_dtype(place.type) if dtype == AUTO_DTYPE else named_dtype(dtype)


class DtypeChoice(NamedTuple):
    """A dtype, and why it was chosen, in words."""

    dtype: torch.dtype
    reason: str


def cpu_dtype(*, has_bfloat16: bool, seconds: Callable[[], Mapping[str, float]]) -> DtypeChoice:
    """Return bfloat16 for a CPU that multiplies it faster than float32, or else float32.

    Args:
        has_bfloat16: Whether PyTorch multiplies bfloat16 by oneDNN here. It does so too on CPUs
            that have to emulate it, which takes longer than float32.
        seconds: Returns how long a product takes in ``"bfloat16"`` and in ``"float32"``.
    """
    if not has_bfloat16:
        return DtypeChoice(torch.float32, "PyTorch has no fast products in bfloat16 on this CPU")
    times = seconds()
    fastest = min(times, key=times.__getitem__)
    shown = " and ".join(f"{1e3 * times[name]:.2g} ms in {name}" for name in times)
    return DtypeChoice(named_dtype(fastest), f"a product takes {shown}")


@cache
def _auto_dtype(kind: str) -> torch.dtype:
    """Choose and say so once a process: a second timing could choose otherwise where both tie."""
    if kind == "cpu":
        has_bfloat16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        chosen = cpu_dtype(has_bfloat16=has_bfloat16, seconds=_seconds_of_products)
    else:
        usual = torch.bfloat16 if kind == "cuda" else torch.float32
        chosen = DtypeChoice(usual, f"the usual dtype on {kind}")
    _log.info("computing in %s: %s", dtype_name(chosen.dtype), chosen.reason)
    return chosen.dtype


def _seconds_of_products() -> dict[str, float]:
    """Return by dtype the fastest of some runs, taken in turn; the first make all ready.

    The product has so many rows that its time is that of multiplying, not of reading weights.
    """
    seconds = {"bfloat16": math.inf, "float32": math.inf}
    for _ in range(10):
        for name in seconds:
            rows, weight = torch.ones(2, 256, 256, dtype=_DTYPES[name])
            start = time.perf_counter()
            functional.linear(rows, weight)
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


_AUTOCAST = tuple(
    kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind)
)


@contextmanager
def torch_as_usual() -> Iterator[None]:
    """Have torch compute as it does by default, whatever the caller has set for this thread.

    Autocast would give keys, hidden states and probabilities other dtypes than their pools have; a
    default device would take what belongs on the host; weights made in inference mode could not be
    trained. What is not set costs no more than the question.
    """
    with ExitStack() as stack:
        for kind in _AUTOCAST:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
        if not torch.is_grad_enabled():
            stack.enter_context(torch.enable_grad())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


_SOFT_PAUSE = 1  # omp_pause_soft: what the runtime knows stays, its threads go


def end_idle_workers() -> None:
    """End the OpenMP workers that wait for the calling thread; its next operation starts others.

    Each thread that computes keeps workers of its own until it ends. GNU's OpenMP lets workers spin
    between two operations as long as the process has no more of them than cores; with one more they
    sleep, and waking them takes longer than a small product. So a thread that only waits for
    another one's results ends its own (``omp_pause_resource_all`` of OpenMP 5.0). Where no such
    function is to be found, nothing happens.
    """
    try:
        pause = ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, TypeError):  # TypeError: Windows, which has no such handle
        return
    pause(_SOFT_PAUSE)


def processor_fact(*names: str) -> str:
    """Return what the system says of the processor by one of these names, or the architecture."""
    if CPU_INFO.is_file():
        for line in CPU_INFO.read_text(encoding="utf-8").splitlines():
            if line.startswith(names):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def processor_name() -> str:
    """Return its name, such as ``AMD EPYC 9B45``, or the architecture if the system has no name."""
    return processor_fact("model name")


def machine_facts(device: torch.device) -> tuple[object, ...]:
    """Return what decides how a device computes: a folder may be shared by machines."""
    names = {"cuda": torch.cuda.get_device_name, "cpu": lambda _: processor_name()}
    return torch.__version__, torch.get_num_threads(), names.get(device.type, str)(device)


_STAGED_BY_CUDA = 1 << 16  # most bytes of pageable memory for which CUDA stages a copy by itself


def staged(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return ``tensor`` where a copy of it to ``device`` waits for nothing.

    For more pageable memory, CUDA waits for all queued work before it copies. So such a tensor is
    pinned first, in memory that PyTorch keeps and does not reuse before the copy is done.
    """
    leaves = torch.device(device).type == "cuda" and tensor.device.type == "cpu"
    return tensor.pin_memory() if leaves and tensor.nbytes > _STAGED_BY_CUDA else tensor


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return ``tensor`` on ``device``; a copy from the host waits for nothing."""
    return staged(tensor, device).to(device, non_blocking=True)


def upload(
    values: Sequence[object], *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Return host numbers as a tensor on ``device``, without waiting for it."""
    return send(torch.tensor(values, dtype=dtype), device)


def fill(buffer: Tensor, values: Tensor) -> None:
    """Copy host numbers into a static buffer, without waiting for its device."""
    buffer.copy_(send(values, buffer.device))


def fetch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return any number of tensors on the host, waiting for their device once."""
    fetched = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        _wait_for(device)
    return fetched


@dataclass(frozen=True, slots=True)
class TensorFields:
    """A dataclass some of whose fields are tensors."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by their names, in order."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return it with ``change`` applied to every tensor."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors.items()}
        return replace(self, **changed)


def _wait_for(device: torch.device) -> None:
    torch.accelerator.current_stream(device).synchronize()


PIECE = 4096  # entries of the vocabulary that a program of a kernel reads at once
WIDEST = 8192  # entries of the longest draft list that a program holds
PIECE_WARPS = 8  # warps that share them; with fewer, such a program mostly waits for memory


def runs_kernels(device: torch.device) -> bool:
    """Return whether Triton kernels decide there in place of tensor operations; it is logged once.

    They do on GPUs, unless Triton is missing.
    """
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    installed = find_spec("triton") is not None
    if not installed:
        _log.warning("Triton is not installed: verification launches one kernel an operation")
    return installed


def entry_at(table: Tensor, places: Tensor) -> Tensor:
    """Return the entries of ``table`` ``[..., entries]`` at ``places`` ``[...]`` int64."""
    return table.gather(-1, places.unsqueeze(-1)).squeeze(-1)


def first_true(flags: Tensor) -> Tensor:
    """Return the first index where ``flags`` ``[..., entries]`` bool is true; 0 if there is none.

    The result is ``[...]`` int64.
    """
    return flags.view(torch.uint8).argmax(dim=-1)


def most_likely_first(ids: Tensor, probs: Tensor) -> Tensor:
    """Return the order that sorts tokens by probability, most likely first, ties by token id.

    Drafters and verifiers must agree on it, because some draft samplings fix a node's most likely
    children. All are ``[..., width]``; ids and the order, indices along the last dimension, int64.
    """
    by_id = ids.argsort(dim=-1)
    by_probability = probs.gather(-1, by_id).sort(dim=-1, descending=True, stable=True).indices
    return by_id.gather(-1, by_probability)
