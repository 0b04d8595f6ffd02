"""Forwards of an EAGLE head over rows, as functions of tensors and of attention."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch import Tensor
from torch.nn import functional

from eaglegbv.drafters.eagle_head import EagleHead
from eaglegbv.drafters.eagle_layers import Attend
from eaglegbv.drafters.rotary import Rotation


class Drafted(NamedTuple):
    """Result of rows that continue the head's own output.

    Attributes:
        hidden: ``[rows, hidden]``.
        logits: ``[rows, draft_vocab]``, of the token after next.
    """

    hidden: Tensor
    logits: Tensor


class Rows(NamedTuple):
    """Rows of a forward, apart from the states they continue.

    Attributes:
        token_ids: ``[rows]`` int64.
        positions: ``[rows]`` int64.
        angles: The angles of positions 0, 1, ...
    """

    token_ids: Tensor
    positions: Tensor
    angles: Rotation

    @property
    def rotation(self) -> Rotation:
        """The angles of the rows."""
        return self.angles.at(self.positions)


class LevelRows(NamedTuple):
    """Rows of one level of a draft loop; angles are computed for all levels at once.

    Attributes:
        token_ids: ``[rows]`` int64.
        rotation: The angles of the rows.
    """

    token_ids: Tensor
    rotation: Rotation


Result = TypeVar("Result")

Forward = Callable[[EagleHead, Attend, Rows, Tensor], Result]
"""A forward of a head over rows, given its attention and the states that the rows continue."""


def step_rows(head: EagleHead, attend: Attend, rows: Rows | LevelRows, hidden: Tensor) -> Tensor:
    """Run rows on ``hidden`` ``[rows, hidden]``; return the next hidden states."""
    embedded = functional.embedding(rows.token_ids, head.embedding)
    return head.step(embedded, hidden, rows.rotation, attend)


def read_rows(head: EagleHead, attend: Attend, rows: Rows, features: Tensor) -> Tensor:
    """Run rows on the target's ``features`` ``[rows, F]``; return ``[rows, hidden]``."""
    return step_rows(head, attend, rows, head.fuse(features))


def go_on_rows(head: EagleHead, attend: Attend, rows: Rows | LevelRows, hidden: Tensor) -> Drafted:
    """Run rows on the head's own output ``[rows, hidden]``, with logits."""
    hidden = step_rows(head, attend, rows, hidden)
    return Drafted(hidden, head.logits(hidden))
