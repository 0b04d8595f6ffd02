"""Forwards of an EAGLE head over packed rows and a pool."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eaglegbv.attention.base import PagedAttention, Segment, pack
from eaglegbv.attention.opaque import PagedCall
from eaglegbv.drafters.drawing import Drawing, Drawn, Followed, draw
from eaglegbv.drafters.eagle_head import EagleHead
from eaglegbv.drafters.eagle_layers import Attend
from eaglegbv.drafters.head_rows import (
    Above,
    Drafted,
    FollowInput,
    Forward,
    LevelRows,
    Result,
    Rows,
    follow_rows,
    go_on_rows,
    read_rows,
    step_rows,
)
from eaglegbv.drafters.rotary import Rotation
from eaglegbv.quantization import Quantization

_FIRST_ANGLES = 1023
"""Positions whose angles are known from the start: 1023, because no model dimension equals it, and
the compiler treats sizes that coincide while tracing as always equal."""


class PathRows(NamedTuple):
    """The rows of a path, run one after another: what is known before tokens are drawn.

    Attributes:
        context: ``[c]`` int64, one or more, slots of what every row sees.
        slots: ``[rows]`` int64, slots the rows take, in order.
        positions: ``[rows]`` int64, their positions in the text.
    """

    context: Tensor
    slots: Tensor
    positions: Tensor

    @classmethod
    def of(cls, context: Tensor, slots: Tensor) -> "PathRows":
        """Return rows that follow the ``context``."""
        start = len(context)
        return cls(context, slots, torch.arange(start, start + len(slots)))

    def segment(self, level: int, token: Tensor) -> Segment:
        """Return the segment of the row that reads ``token`` ``[1]``, drawn at ``level``."""
        positions = self.positions[: level + 1]
        return Segment(token, positions[level:], self.context, self.slots[: level + 1], positions)


class FollowPaths(Protocol):
    """Runs the next row of every path on the head's own output, and draws what follows."""

    def __call__(self, level: int, token_ids: Tensor, hidden: Tensor, drawing: Drawing) -> Followed:
        """Run a row of each.

        Args:
            level: Which row of the paths, counted from 0; all earlier ones have run.
            token_ids: ``[paths]`` int64, the tokens the rows read.
            hidden: ``[paths, hidden]``, contiguous.
            drawing: How a token is drawn after each.
        """


class HeadForward:
    """A head over a one-layer pool.

    Attributes:
        attention: Paged attention over the pool.
        drafts_all: Whether the draft tokens are all of the target's, in its order.
    """

    def __init__(
        self,
        head: EagleHead,
        attention: PagedAttention,
        *,
        quantization: Quantization,
        generated: bool = False,
    ) -> None:
        """Take a head on its final device and in its final dtype.

        Args:
            head: The head; its products are made ready for few rows.
            attention: Paged attention over its pool, of four slots or more, none of them in use.
            quantization: Quantization of its weights; not ``auto``.
            generated: Whether its products will be generated instead of packed.
        """
        self._products = head.prepare_products(quantization, generated=generated)
        self._head = head
        self.attention = attention
        self._scale = head.config.head_dim**-0.5
        self._angles = self._angles_of(_FIRST_ANGLES)
        self._ids = head.draft_to_target.new_empty((0, len(head.draft_to_target)))
        every = torch.arange(head.config.vocab_size, device=head.draft_to_target.device)
        self.drafts_all = torch.equal(head.draft_to_target, every)

    def step(self, segments: Sequence[Segment], hidden: Tensor) -> Tensor:
        """Run rows on ``hidden`` ``[rows, hidden]``; return the next hidden states."""
        return self._run(step_rows, segments, hidden)

    def read(self, segments: Sequence[Segment], features: Tensor) -> Tensor:
        """Run rows on ``features`` ``[rows, F]``, contiguous; return the next hidden states."""
        return self._run(read_rows, segments, features)

    def go_on(self, segments: Sequence[Segment], hidden: Tensor) -> Drafted:
        """Run rows on the head's own output ``[rows, hidden]``, contiguous, with logits."""
        return self._run(go_on_rows, segments, hidden)

    def level(self, rows: LevelRows, hidden: Tensor, attend: Attend) -> Drafted:
        """Run rows on the head's own output ``[rows, hidden]``, with the caller's attention."""
        return go_on_rows(self._head, attend, rows, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``[rows, draft_vocab]`` of the head's output ``[rows, hidden]``, contiguous."""
        return self._head.logits(hidden)

    def along(self, paths: Sequence[PathRows]) -> FollowPaths:
        """Return a function that runs the rows of ``paths``, one row of each at a time."""

        def follow(level: int, token_ids: Tensor, hidden: Tensor, drawing: Drawing) -> Followed:
            tokens = token_ids.split(1)
            segments = [p.segment(level, own) for p, own in zip(paths, tokens, strict=True)]
            return self.follow(segments, hidden, drawing)

        return follow

    def follow(self, segments: Sequence[Segment], hidden: Tensor, drawing: Drawing) -> Followed:
        """Run one row of each segment on the head's own output ``[rows, hidden]``, and draw."""
        return self._run(follow_rows, segments, FollowInput(hidden, drawing))

    def draw(self, hidden: Tensor, drawing: Drawing) -> Drawn:
        """Draw a token after each row of results ``hidden`` ``[rows, hidden]``, contiguous."""
        return draw(self._head, hidden, drawing)

    @property
    def draft_to_target(self) -> Tensor:
        """``[draft_vocab]`` int64, the target's id of each draft token."""
        return self._head.draft_to_target

    @torch.inference_mode()
    def every_id(self, batch: int, nodes: int) -> Tensor:
        """Return ``[batch, nodes, draft_vocab]`` int64, the ids of laws over all draft tokens.

        It is made once and shared, so nobody may write to it.
        """
        rows = batch * nodes
        if len(self._ids) < rows:
            self._ids = self.draft_to_target.repeat(rows, 1)
        return self._ids[:rows].view(batch, nodes, -1)

    def _run(
        self, forward: Forward[Above, Result], segments: Sequence[Segment], above: Above
    ) -> Result:
        """Run a forward without a graph."""
        batch = pack(segments, self._head.embedding.device)
        attend = partial(PagedCall(self.attention, batch).attend, 0, scale=self._scale)
        rows = self._rows(batch.token_ids, batch.positions, segments)
        return forward(self._head, attend, rows, above)

    def _rows(self, token_ids: Tensor, positions: Tensor, segments: Sequence[Segment]) -> Rows:
        longest = max(segment.num_keys for segment in segments)
        return Rows(token_ids, positions, self._rotations(longest))

    def _rotations(self, count: int) -> Rotation:
        """Return the angles of the first ``count`` positions or more: computed once, then kept."""
        known = len(self._angles.cos)
        if known < count:
            self._angles = self._angles_of(max(count, 2 * known))
        return self._angles

    @torch.inference_mode()
    def _angles_of(self, count: int) -> Rotation:
        embedding = self._head.embedding
        positions = torch.arange(count, device=embedding.device)
        angles: Rotation = self._head.rotary(positions, embedding.dtype)
        return angles
