"""Picking one of several records of tensors per request."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Record = TypeVar("Record")


def pick_record(records: Sequence[Record], numbers: Tensor) -> Record:
    """Return the record whose tensors are, for request b, those of ``records[numbers[b]]``.

    Args:
        records: Dataclasses of one type, of tensors ``[batch, ...]`` of equal shapes, of such
            dataclasses, and of values that are equal in all of them.
        numbers: ``[batch]`` int64.
    """
    return _pick(records, numbers)  # type: ignore[no-any-return]


def _pick(values: Sequence[Any], numbers: Tensor) -> Any:  # noqa: ANN401
    first = values[0]
    if isinstance(first, Tensor):
        stacked = torch.stack(tuple(values), dim=1)
        at = numbers.view(-1, *(1,) * (stacked.dim() - 1))
        return stacked.gather(1, at.expand(-1, 1, *stacked.shape[2:])).squeeze(1)
    if is_dataclass(first) and not isinstance(first, type):
        return type(first)(
            **{f.name: _pick([getattr(v, f.name) for v in values], numbers) for f in fields(first)}
        )
    return first
