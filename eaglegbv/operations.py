"""Operations of graphs that run Python: what a compiler does not look into, it calls by name."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_PYTHON: dict[object, Callable[..., Tensor]] = {}
"""What operations run; torch's own table of them cannot be read."""


def define(
    name: str, signature: str, run: Callable[..., Tensor], shape: Callable[..., Tensor]
) -> None:
    """Define ``torch.ops.eaglegbv.<name>``.

    Args:
        name: Of the operation.
        signature: Its arguments and result, as torch's schemas have them.
        run: Computes it.
        shape: Returns a tensor like its result, from the same arguments.
    """
    full = f"eaglegbv::{name}"
    torch.library.define(full, signature)
    torch.library.impl(full, "default", run)
    torch.library.register_fake(full, shape)
    _PYTHON[getattr(torch.ops.eaglegbv, name)] = run


def python_of(operation: Any) -> Callable[..., Tensor] | None:  # noqa: ANN401
    """Return what an operation of :func:`define` runs; None for any other."""
    return _PYTHON.get(operation)
