"""A recording of tensor operations on the CPU: what a CUDA graph is, without a GPU.

Operations are noted with the very tensors they were given. A replay runs them again on those
tensors and writes the results where the first run left them; no Python of the recorded work runs.
So numbers that were read on the host, shapes that depended on them, and tensors that were made
outside stay what they were when the work was recorded.

Graphs share the memory of what they compute: a replay may leave anything in the results of others.
Here it leaves nonsense.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpu.cuda.runtime import HostRuntime, Launched
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from eaglegbv.cuda_graphs import Recorder, Work

HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "equal")


class HostRead(Exception):
    """Work that is recorded asked for a number on the host."""


class Tape(TorchDispatchMode):
    """Notes operations while they run."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket.__name__ in HOST_READS:
            raise HostRead(func.overloadpacket.__name__)
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if is_tensor(x)}
        fresh = [
            out
            for out in tree_leaves(result)
            if is_tensor(out) and out.untyped_storage()._cdata not in given
        ]
        writes = bool(func._schema.is_mutable)
        if fresh or writes:  # views of the same memory need no second time
            self._steps.append((func, args, kwargs, fresh))
        return result

    def note(self, work: Callable[[], None]) -> None:
        """Have work done by replays that is no tensor operation."""
        self._steps.append((work, (), {}, []))

    def spoil(self, results: tuple[Tensor, ...]) -> None:
        """Overwrite those of ``results`` that were computed on the tape."""
        made = {out.untyped_storage()._cdata for step in self._steps for out in step[3]}
        for result in results:
            if result.untyped_storage()._cdata in made:
                result.fill_(result.dtype.is_floating_point and torch.nan)

    def replay(self) -> None:
        for func, args, kwargs, fresh in self._steps:
            result = func(*args, **kwargs)
            outs = [out for out in tree_leaves(result) if is_tensor(out)]
            for place, out in zip(fresh, outs, strict=False):
                place.copy_(out)


def is_tensor(value: object) -> bool:
    # Packed weights have no storage to look at, and are never written.
    return isinstance(value, Tensor) and value.layout is torch.strided


class TapeRecorder(Recorder):
    """Records tapes.

    With a runtime, kernels launched on it are recorded too: as a graph does it, with the bytes of
    their arguments.
    """

    def __init__(self, runtime: HostRuntime | None = None) -> None:
        self.recorded = 0
        self._runtime = runtime
        self.made: list[tuple[Tape, tuple[Tensor, ...]]] = []

    def record(self, work: Work) -> Work:
        work()  # as with a graph: what is prepared once is prepared outside
        self.recorded += 1
        tape = Tape()
        with torch.no_grad(), self._launches_on(tape), tape:
            results = work()
        self.made.append((tape, results))

        def replay() -> tuple[Tensor, ...]:
            with torch.no_grad():
                for other, others in self.made:
                    if other is not tape:
                        other.spoil(others)
                tape.replay()
            return results

        return replay

    @contextmanager
    def _launches_on(self, tape: Tape) -> Iterator[None]:
        if self._runtime is None:
            yield
            return
        before = self._runtime.on_launch

        def keep(launched: Launched) -> None:
            tape.note(launched.run)
            before(launched)

        self._runtime.on_launch = keep
        try:
            yield
        finally:
            self._runtime.on_launch = before


class Watch(TorchDispatchMode):
    """Counts the bytes alive in tensors created inside."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {
            x.untyped_storage().data_ptr()
            for x in tree_flatten((args, kwargs))[0]
            if isinstance(x, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, torch.Tensor):
                self._record(tensor, given)
        return result

    def _record(self, tensor: torch.Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or address in given or address in self._known:
            return
        self._known.add(address)
        self.alive += size
        self.peak = max(self.peak, self.alive)

        def freed() -> None:
            self._known.discard(address)
            self.alive -= size

        weakref.finalize(storage, freed)
