"""Watching what a piece of torch code does: host reads, memory, number of operations."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "equal")


class Watch(TorchDispatchMode):
    """Counts operations, host reads and the bytes alive in tensors created inside."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.host_reads: list[str] = []
        self.alive = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        self.operations += 1
        if name in HOST_READS or name.startswith("unique"):
            self.host_reads.append(name)
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
