"""Counts what a GPU launches: kernels, and tensor operations that are no views or allocations."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class Operations(TorchDispatchMode):
    """Notes the names of what is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        aliases = [result.alias_info for result in func._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in aliases)
        if not (view or name.startswith(("aten.empty", "aten.new_empty", "aten._unsafe_view"))):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class Counted:
    """A kernel whose launches are noted with the operations."""

    def __init__(self, kernel: Any, names: list[str]) -> None:
        self.kernel, self.names = kernel, names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **named: Any) -> None:
            self.names.append(self.kernel.fn.__name__)
            with _disable_current_modes():  # the interpreter's own operations
                self.kernel[grid](*arguments, **named)

        return launch


@contextmanager
def launches(kernels: Mapping[ModuleType, tuple[str, ...]]) -> Iterator[list[str]]:
    """Note what is launched within, the kernels of these modules among it, in order."""
    operations = Operations()
    with pytest.MonkeyPatch.context() as patch, operations:
        for module, names in kernels.items():
            for name in names:
                patch.setattr(module, name, Counted(getattr(module, name), operations.names))
        yield operations.names
