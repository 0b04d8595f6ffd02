"""An accelerator that is none: tensors of the CPU that say they live elsewhere.

Within :class:`PretendDevice` tensors made on, or moved to, ``cuda`` are marked; what is computed
from marked tensors is marked. As on a real device, operations over tensors of both places fail,
but for those of PyTorch that allow it; and everything that would make the host wait is noted:

- ``reads``: numbers read from the device, and shapes that depend on them;
- ``blocking``: copies to the device that wait for it, those of much pageable memory among them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda")

BY_KERNELS = (
    "eaglegbv.models.hf",
    "eaglegbv.attention.kv_cache",
    "eaglegbv.drafters.eagle_model",
)
"""Modules that run layers by kernels on a GPU."""

_READS = {
    "item",
    "tolist",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "nonzero",
    "argwhere",
    "masked_select",
    "unique",
    "equal",
    "allclose",
    "is_nonzero",
    "bincount",
    "numpy",
}
_MOVES = {"to", "cpu", "cuda"}
_MIXING = {
    "_has_compatible_shallow_copy_type",
    "__getitem__",
    "__setitem__",
    "copy_",
    "index",
    "index_put_",
    "type_as",
}


STAGED = 1 << 16
"""Bytes of pageable memory up to which CUDA stages a copy by itself."""


def _pinned(tensor: Tensor) -> bool:
    return bool(getattr(tensor, "pinned", False))


def marked(value: object) -> bool:
    """Whether a tensor is on the pretended device."""
    return isinstance(value, Tensor) and getattr(value, "pretended", False)


def mark(value: Any, on: bool = True) -> Any:
    """Put tensors on the pretended device."""

    def put(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            leaf.pretended = on  # type: ignore[attr-defined]
        return leaf

    return tree_map(put, value)


class PretendDevice(TorchFunctionMode):
    """Pretends that there is a CUDA device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.blocking: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__", "__delete__"):
            return self._property(func, name, args)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in _MOVES and leaves:
            return self._move(func, name, args, kwargs)
        on = any(marked(leaf) for leaf in leaves)
        asked = kwargs.get("device")
        if asked is not None:
            on = torch.device(asked).type == "cuda"
            kwargs["device"] = "cpu"
            if on and name in ("tensor", "as_tensor", "new_tensor"):
                self.blocking.append(name)
        elif name not in _MIXING:
            self._check(name, leaves)
        if on and asked is None:
            self._note(name, args, kwargs)
        if name == "__iter__":
            return iter(mark(list(args[0].unbind(0)), on)) if on else func(*args, **kwargs)
        if name == "pin_memory":
            args[0].pinned = True
            return args[0]
        result = func(*args, **kwargs)
        if isinstance(result, Iterator):
            return result
        return mark(result) if on and name not in ("tolist", "item") else result

    def _property(self, func: Any, name: str, args: Any) -> Any:
        own = func.__self__.__name__
        if name == "__get__":
            if own == "device":
                return DEVICE if marked(args[0]) else func(*args)
            if own in ("is_cuda", "is_cpu"):
                return marked(args[0]) == (own == "is_cuda")
            return mark(func(*args)) if marked(args[0]) else func(*args)
        func(*args)
        if own == "data":
            mark(args[0], marked(args[1]))
        return None

    def _move(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        tensor, dtype = args[0], kwargs.get("dtype")
        wanted = {"cpu": "cpu", "cuda": "cuda"}.get(name) or kwargs.get("device")
        for value in args[1:]:
            if isinstance(value, str | torch.device):
                wanted = value
            elif isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, Tensor):
                wanted, dtype = (DEVICE if marked(value) else "cpu"), value.dtype
        on = marked(tensor) if wanted is None else torch.device(wanted).type == "cuda"
        free = kwargs.get("non_blocking", False)
        if marked(tensor) and not on:
            # A copy back that waits for nothing is read after a wait for all: noted as one read.
            self.reads.append("fetch" if free else name)
        elif on and not marked(tensor) and not free:
            self.blocking.append(name)
        elif on and not marked(tensor) and tensor.nbytes > STAGED and not _pinned(tensor):
            self.blocking.append("pageable")
        moved = tensor if dtype is None else tensor.to(dtype)
        if on != marked(tensor):
            moved = moved.clone()
        return mark(moved, on)

    def _check(self, name: str, leaves: list[Tensor]) -> None:
        if any(map(marked, leaves)) and any(not marked(x) and x.dim() > 0 for x in leaves):
            raise RuntimeError(f"{name}: tensors on the host and on the device")

    def _note(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        if name in _READS:
            self.reads.append(name)
        if name == "copy_" and marked(args[0]) != marked(args[1]):
            free = any(args[2:]) or kwargs.get("non_blocking", False)
            if marked(args[1]):
                self.reads.append(name)
            elif not free:
                self.blocking.append(name)
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            for part in index:
                if isinstance(part, list) or (isinstance(part, Tensor) and not marked(part)):
                    self.blocking.append(name)
                elif isinstance(part, Tensor) and part.dtype is torch.bool and marked(part):
                    scalar = name == "__setitem__" and not isinstance(args[2], Tensor)
                    if not scalar:
                        self.reads.append(f"{name} by a mask")
            if not marked(args[0]):
                raise RuntimeError(f"{name}: a host tensor indexed by one of the device")
        if name == "repeat_interleave" and any(marked(x) for x in args[1:]):
            self.reads.append(name)
