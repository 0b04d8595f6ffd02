"""Operations for graphs that run Python: compilers call them by name instead of tracing them."""

from collections.abc import Callable

import torch
from torch import Tensor


def define(
    name: str, signature: str, run: Callable[..., Tensor], shape: Callable[..., Tensor]
) -> None:
    """Define ``torch.ops.eaglegbv.<name>``.

    Args:
        name: Name of the operation.
        signature: Its arguments and result, as in torch's schemas.
        run: Computes the result.
        shape: Returns a tensor like the result, from the same arguments.
    """
    full = f"eaglegbv::{name}"
    torch.library.define(full, signature)
    torch.library.impl(full, "default", run)
    torch.library.register_fake(full, shape)
