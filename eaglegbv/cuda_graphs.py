"""Work that is recorded once and replayed: CUDA graphs, and a substitute on other devices.

A forward of few rows launches over a thousand kernels that take longer to launch than to run. A
CUDA graph launches them all at once, with the sizes and addresses at the time of recording. So a
function without arguments over *static buffers* is recorded. Before every replay, new numbers are
copied into the buffers, padded up to the sizes for which they were made (a *bucket*). With
:class:`Recorder` itself, which runs the function again over the same padded buffers, everything but
the recording itself is the same.
"""

import gc
import logging
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Self, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eaglegbv.config import GraphMode as GraphMode
from eaglegbv.errors import InvalidArgument
from eaglegbv.utils import power_of_two

Work: TypeAlias = Callable[[], tuple[Tensor, ...]]
"""Reads static buffers and returns tensors; a replay returns the same tensors, recomputed.

They are valid until the same recorder replays anything else: recordings share their memory.
"""

MAX_ROWS = 512
"""Packed rows of the largest bucket: a larger forward takes longer to run than to launch. At the
8B shape 256 rows run for about 4 ms, and their 1,480 launches take 8 to 10."""

REPLAYED = "replayed"  # label of replays in counts of work; other labels say why there was none

_log = logging.getLogger(__name__)

_ROWS = (*range(8, 65, 8), 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, MAX_ROWS)


class NotRecordable(Exception):
    """Work turned out to need something that cannot be recorded."""

    def __init__(self, reason: str, *, lasting: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason  # short name of it, under which it is counted
        self.lasting = lasting  # whether other numbers would not help


class Outcomes(Counter[str]):
    """Counts of work that was ``replayed``, or by why it was not, which is logged once."""

    def note(self, what: str, outcome: str) -> None:
        """Count an outcome of ``what``; prompts are never replayed, and not logged."""
        if outcome not in (*self, REPLAYED, "prefill"):
            _log.warning("%s run eagerly: %s", what, outcome)
        self[outcome] += 1


class Recorder:
    """Makes work replayable; this one runs the work itself each time."""

    def record(self, work: Work) -> Work:
        """Return a function that replays ``work``, or NotRecordable where that needs the host.

        Its static buffers hold numbers of a real step.
        """
        return work


Kind = TypeVar("Kind", bound=Hashable)
Buffers = TypeVar("Buffers")


class Recordings(Generic[Kind, Buffers]):
    """What was recorded of one sort of work, by kind, and which kinds turned out not to be.

    Attributes:
        counts: Work by outcome: ``replayed``, or the reason why it ran as it is.
    """

    def __init__(
        self, what: str, recorder: Recorder, work: Callable[[Buffers], tuple[Tensor, ...]]
    ) -> None:
        """Begin with nothing recorded; ``what`` names the work over static buffers in the log."""
        self.counts = Outcomes()
        self._what = what
        self._recorder = recorder
        self._work = work
        self._recorded: dict[Kind, tuple[Buffers, Work]] = {}
        self._refused: dict[Kind, str] = {}

    def __contains__(self, kind: Kind) -> bool:
        """Whether the work of a kind was recorded."""
        return kind in self._recorded

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is replayed within; NotRecordable is counted by its reason, and ends here."""
        try:
            yield
        except NotRecordable as obstacle:
            self.counts.note(self._what, obstacle.reason)
        else:
            self.counts.note(self._what, REPLAYED)

    def loaded(
        self, kind: Kind, make: Callable[[Kind], Buffers], load: Callable[[Buffers], None]
    ) -> Work:
        """Return what replays the work on the numbers that ``load`` copies into its buffers.

        The buffers of a new kind are made, and its work is recorded, first. Raises NotRecordable,
        the next time without trying again if its obstacle is a lasting one.
        """
        if kind in self._refused:
            raise NotRecordable(self._refused[kind])
        known = self._recorded.get(kind)
        try:
            buffers = known[0] if known else make(kind)
            load(buffers)
            replay = known[1] if known else self._recorder.record(partial(self._work, buffers))
        except NotRecordable as obstacle:
            if obstacle.lasting:
                self._refused[kind] = obstacle.reason
            raise
        self._recorded[kind] = buffers, replay
        return replay


class CudaRecorder(Recorder):
    """Records CUDA graphs, which share the memory of their intermediate results."""

    def __init__(self) -> None:
        self._pool: Any = None
        # One stream to warm up and to record on: libraries keep a workspace for every stream, and
        # the allocator keeps the memory of each apart.
        self._stream: torch.cuda.Stream | None = None
        self._refusals: set[str] = set()

    def record(self, work: Work) -> Work:
        """See :meth:`Recorder.record`; the work runs a few times. A refusal names the operation."""
        try:
            return self._record(work)
        except RuntimeError as error:
            with _never_waiting():
                reason = f"not recordable: {failing_operation(work)}"
            if reason not in self._refusals:
                _log.warning("%s; such work runs as it is from now on: %s", reason, error)
            self._refusals.add(reason)
            raise NotRecordable(reason) from error

    def _record(self, work: Work) -> Work:
        self._stream = stream = self._stream or torch.cuda.Stream()
        present = torch.cuda.current_stream()
        stream.wait_stream(present)
        try:
            with torch.cuda.stream(stream):
                work()  # compile and tune kernels outside the graph
                with _never_waiting():
                    work()
        finally:
            present.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=stream,
            # Other threads may allocate or copy meanwhile, as those of a server do.
            capture_error_mode="thread_local",
        )
        # A capture that fails leaves its own stream as the current one.
        with _holding_garbage(), torch.cuda.stream(present), capture:
            results = work()
        self._pool = graph.pool()

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return results

        return replay


class OperationWatch(TorchDispatchMode):
    """Counts the tensor operations dispatched within it, views too, and notes the last one."""

    def __init__(self) -> None:
        parent: Any = super()
        parent.__init__()
        self.name = "an operation of compiled code"
        self.count = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, since torch.compile takes other modes for a change in what it traced."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        del types
        self.name = str(func)
        self.count = self.count + 1
        return func(*args, **(kwargs or {}))


def failing_operation(work: Work) -> str:
    """Run work that failed once more, and return the name of the operation in which it fails."""
    last = OperationWatch()
    try:
        with last:
            work()
    except RuntimeError:
        return last.name
    return "the capture itself"


@contextmanager
def _holding_garbage() -> Iterator[None]:
    """Collect garbage now and none within: to free a graph or event would break off a capture."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def _never_waiting() -> Iterator[None]:
    """Raise RuntimeError where the host waits for the device: a capture would not end cleanly."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def make_recorder(
    mode: GraphMode | Recorder, *, cuda: bool, recordable: bool, shared: Recorder | None = None
) -> Recorder | None:
    """Return the recorder for the user's ``mode``, or None if nothing is recorded.

    InvalidArgument if graphs are requested where they are impossible; ``recordable`` says whether
    the attention can be. CUDA graphs are recorded by ``shared`` if that is given.
    """
    if isinstance(mode, Recorder):
        return mode
    if mode is GraphMode.EAGER:
        return Recorder()
    if mode is GraphMode.ON and not (cuda and recordable):
        expected = "'auto', 'off' or 'eager' on a CPU: CUDA graphs need a CUDA device"
        if cuda:
            expected = "'auto', 'off' or 'eager' without FlashInfer: no other attention is recorded"
        raise InvalidArgument("cuda_graphs", str(mode), expected)
    if mode is GraphMode.OFF or not (cuda and recordable):
        return None
    return shared or CudaRecorder()


def spare_slots(mode: GraphMode | Recorder, *, cuda: bool) -> int:
    """Return how many KV slots without an owner padding needs: one if work may be padded."""
    padded = isinstance(mode, Recorder) or mode is GraphMode.EAGER
    return int(padded or (cuda and mode is not GraphMode.OFF))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sizes for which work is recorded."""

    requests: int  # most requests served. The work has at least one more after them, for padding.
    rows: int  # packed rows, including those of padding

    @classmethod
    def holding(cls, requests: int, rows: int) -> Self | None:
        """Return the smallest bucket for ``requests`` with ``rows`` rows together, or None.

        There is at least one padding request, and each has at least one row.
        """
        most = power_of_two(requests)
        place = bisect_left(_ROWS, rows + most + 1 - requests)
        return cls(most, _ROWS[place]) if place < len(_ROWS) else None

    @staticmethod
    def sizes(requests: int) -> list[int]:
        """Return the numbers to which batches of so many requests or fewer are padded."""
        return [1 << exponent for exponent in range(power_of_two(requests).bit_length())]

    @classmethod
    def up_to(cls, requests: int, rows_each: int) -> list[Self]:
        """Return the buckets of all batches of as many requests and rows of each, or fewer."""
        buckets: dict[Self, None] = {}
        for count in range(1, requests + 1):
            for rows in range(count, count * rows_each + 1):
                bucket = cls.holding(count, rows)
                if bucket is None:
                    break
                buckets[bucket] = None
        return list(buckets)
