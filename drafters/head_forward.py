"""Forwards of an EAGLE head over packed rows and a pool."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from eaglegbv.attention.base import PagedAttention, Segment, pack
from eaglegbv.attention.opaque import PagedCall
from eaglegbv.drafters.eagle_head import EagleHead
from eaglegbv.drafters.eagle_layers import Attend
from eaglegbv.drafters.head_rows import (
    Drafted,
    Forward,
    LevelRows,
    Result,
    Rows,
    go_on_rows,
    read_rows,
    step_rows,
)
from eaglegbv.drafters.rotary import Rotation
from eaglegbv.quantization import Quantization

_FIRST_ANGLES = 1023
"""Positions whose angles are known from the start: 1023, because no model dimension equals it, and
the compiler treats sizes that coincide while tracing as always equal."""


class HeadForward:
    """A head over a one-layer pool.

    Attributes:
        attention: Paged attention over the pool.
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

    def _run(self, forward: Forward[Result], segments: Sequence[Segment], above: Tensor) -> Result:
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
