"""Counts of the tensor operations that code dispatches."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class OperationCounter(TorchDispatchMode):
    """Counts the tensor operations dispatched within it; views count too."""

    def __init__(self) -> None:
        parent: Any = super()
        parent.__init__()
        self.count = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, since torch.compile takes other modes for a change in what it traced."""
        return True

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Count an operation and run it."""
        del types
        self.count += 1
        return func(*args, **(kwargs or {}))
