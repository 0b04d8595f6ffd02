"""Work that is recorded once and replayed: CUDA graphs, and what stands in for them elsewhere.

A forward of few rows launches over a thousand kernels that take longer to launch than to run. A
CUDA graph launches them all at once, with the sizes and the addresses of the time it was recorded
at. So what is recorded is a function without arguments over *static buffers*: before every replay
new numbers are copied into them, padded up to the sizes they were made for (a *bucket*).

Everything but the recording itself is the same with :class:`EagerRecorder`, which runs the function
again over the same padded buffers.
"""

import logging
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from eaglegbv.errors import InvalidArgument

Work: TypeAlias = Callable[[], tuple[Tensor, ...]]
"""Reads static buffers and returns tensors; a replay returns the same tensors, computed anew.

They are good until anything else by the same recorder is replayed: recordings share their memory.
"""

MAX_ROWS = 256
"""Packed rows of the largest bucket: beyond it a forward takes longer to run than to launch."""

REPLAYED = "replayed"
"""What counts of work call a replay; other labels say why there was none."""

_log = logging.getLogger(__name__)

_ROWS = (*range(8, 65, 8), 80, 96, 128, 160, 192, 224, MAX_ROWS)


class GraphMode(StrEnum):
    """Whether forwards of draft trees, and the drafting itself, are recorded and replayed."""

    AUTO = "auto"
    """On a CUDA device whose attention can be recorded (FlashInfer's), and nowhere else."""
    ON = "on"
    """As ``auto``; refused where it cannot be done."""
    OFF = "off"
    EAGER = "eager"
    """The same padded work without recording it, on any device: to find faults, not to be fast."""


class NotRecordable(Exception):
    """Work turned out to need something that no recording has.

    Attributes:
        reason: A word for it, under which it is counted.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Recorder(ABC):
    """Makes work repeatable."""

    needs_device: bool
    """Whether work must leave the host alone: no plan, no shape, no number may be read there."""

    @abstractmethod
    def record(self, work: Work) -> Work:
        """Return what does ``work`` again; its static buffers hold numbers of a real step.

        Raises:
            NotRecordable: The work needs the host.
        """


class EagerRecorder(Recorder):
    """Runs the work itself, each time."""

    needs_device = False

    def record(self, work: Work) -> Work:
        """See :meth:`Recorder.record`."""
        return work


class CudaRecorder(Recorder):
    """Records CUDA graphs. They share the memory of what they compute on the way."""

    needs_device = True

    def __init__(self) -> None:
        self._pool: Any = None
        # Libraries keep a workspace for every stream they see.
        self._stream: torch.cuda.Stream | None = None
        self._told: set[str] = set()

    def record(self, work: Work) -> Work:
        """See :meth:`Recorder.record`; the work runs a few times, so it must be repeatable.

        Raises:
            NotRecordable: It reads numbers on the host, say, as layers of experts do.
        """
        try:
            return self._record(work)
        except RuntimeError as error:
            if str(error) not in self._told:
                _log.warning("what cannot be recorded runs as it is: %s", error)
            self._told.add(str(error))
            raise NotRecordable("not recordable") from error

    def _record(self, work: Work) -> Work:
        self._stream = stream = self._stream or torch.cuda.Stream()
        present = torch.cuda.current_stream()
        stream.wait_stream(present)
        try:
            with torch.cuda.stream(stream):
                work()  # kernels are compiled and tuned outside the graph
                with _never_waiting():
                    work()
        finally:
            present.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # A capture that fails leaves its own stream the present one.
        with torch.cuda.stream(present), torch.cuda.graph(graph, pool=self._pool):
            results = work()
        self._pool = graph.pool()

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return results

        return replay


@contextmanager
def _never_waiting() -> Iterator[None]:
    """Raise RuntimeError where the host waits for the device: in a capture, it is too late for it.

    A capture that breaks off leaves PyTorch's allocator believing that it goes on.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def make_recorder(mode: GraphMode | Recorder, *, cuda: bool, recordable: bool) -> Recorder | None:
    """Return what records by ``mode``, or None for nothing.

    Args:
        mode: What the user wants, or what records.
        cuda: Whether the device is a CUDA device.
        recordable: Whether the attention can be recorded.

    Raises:
        InvalidArgument: Graphs are asked for where there can be none.
    """
    if isinstance(mode, Recorder):
        return mode
    if mode is GraphMode.EAGER:
        return EagerRecorder()
    if mode is GraphMode.ON and not (cuda and recordable):
        expected = "'auto', 'off' or 'eager' on a CPU: CUDA graphs need a CUDA device"
        if cuda:
            expected = "'auto', 'off' or 'eager' without FlashInfer: no other attention is recorded"
        raise InvalidArgument("cuda_graphs", str(mode), expected)
    return CudaRecorder() if mode is not GraphMode.OFF and cuda and recordable else None


def spare_slots(mode: GraphMode | Recorder, *, cuda: bool) -> int:
    """Return how many KV slots padding needs that nobody owns: one, where work may be padded."""
    padded = isinstance(mode, Recorder) or mode is GraphMode.EAGER
    return int(padded or (cuda and mode is not GraphMode.OFF))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sizes that work is recorded for.

    Attributes:
        requests: Most requests served. Behind them the work has one more at least, which pads.
        rows: Packed rows, those of padding included.
    """

    requests: int
    rows: int

    @classmethod
    def holding(cls, requests: int, rows: int) -> Self | None:
        """Return the smallest bucket for ``requests`` of ``rows`` rows together, if there is one.

        Every request that pads has a row at least, and there is at least one.
        """
        most = 1 << (requests - 1).bit_length()
        place = bisect_left(_ROWS, rows + most + 1 - requests)
        return cls(most, _ROWS[place]) if place < len(_ROWS) else None
