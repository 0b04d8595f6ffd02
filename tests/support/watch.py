"""Watching how much memory a piece of torch code takes."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


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
