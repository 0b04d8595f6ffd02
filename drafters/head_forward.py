"""Forwards of an EAGLE head over packed rows and a pool; those of drafted levels may be compiled.

A level of the tiny head takes less to compute than its operations take to launch, which compiled
code does faster. What runs once a step, on the target's features, gains nothing by it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from eaglegbv.attention.base import PackedBatch, PagedAttention, Segment, pack
from eaglegbv.attention.opaque import PagedCall, attend_opaque, serving
from eaglegbv.compiling import check_backend, compiled_alone
from eaglegbv.drafters.eagle_head import Attend, EagleHead, Rotation
from eaglegbv.products import Quantization, in_use

_FIRST_ANGLES = 1024
"""Positions whose angles are known from the start."""


class Drafted(NamedTuple):
    """What rows on the head's own output come to.

    Attributes:
        hidden: ``[rows, hidden]``.
        logits: ``[rows, draft_vocab]``, of the token after next.
    """

    hidden: Tensor
    logits: Tensor


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
        compile_backend: str | None = None,
    ) -> None:
        """Take a head on its last device and in its last dtype.

        Args:
            head: The head; its products are made ready for few rows.
            attention: Paged attention over its pool, of three slots or more, none of them in use.
            quantization: Of its weights; not ``auto``.
            compile_backend: Compile the forward of a drafted level by this backend of
                ``torch.compile`` now; None runs it as it is.

        Raises:
            InvalidArgument: There is no such backend.
        """
        self._products = head.prepare_products(quantization)
        self._head = head
        self.attention = attention
        self._scale = head.config.head_dim**-0.5
        self._angles = self._angles_of(_FIRST_ANGLES)
        self._compiled: Callable[..., tuple[Tensor, Tensor]] | None = None
        if compile_backend is not None:
            check_backend(compile_backend)
            attend = partial(attend_opaque, 0, scale=self._scale)
            self._compiled = compiled_alone(partial(_go_on, head, attend), compile_backend)
            self._warm_up()

    def step(self, segments: Sequence[Segment], hidden: Tensor) -> Tensor:
        """Run rows on ``hidden`` ``[rows, hidden]``; return the next, likewise."""
        batch, angles = self._pack(segments)
        attend = partial(PagedCall(self.attention, batch).attend, 0, scale=self._scale)
        return _step(
            self._head, attend, batch.token_ids, batch.positions, hidden, angles.cos, angles.sin
        )

    def go_on(self, segments: Sequence[Segment], hidden: Tensor) -> Drafted:
        """Run rows on the head's own output ``[rows, hidden]``, contiguous, with logits."""
        if self._compiled is None:
            hidden = self.step(segments, hidden)
            return Drafted(hidden, self._head.logits(hidden))
        batch, angles = self._pack(segments)
        # Graphs are made for tensors of one kind, those of inference mode; these may be older.
        inputs = batch.token_ids.clone(), batch.positions.clone()
        with serving(PagedCall(self.attention, batch)), in_use(self._products):
            return Drafted(*self._compiled(*inputs, hidden, angles.cos, angles.sin))

    def _pack(self, segments: Sequence[Segment]) -> tuple[PackedBatch, Rotation]:
        batch = pack(segments, self._head.embedding.device)
        return batch, self._rotations(max(segment.num_keys for segment in segments))

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Make the graphs, of one row and of any number: for the tensors of inference mode."""
        like = self._head.embedding
        for rows in (1, 3):
            slots = torch.arange(rows)
            segment = Segment.causal(torch.zeros_like(slots), slots[:0], slots)
            self.go_on([segment], like.new_zeros((rows, self._head.config.hidden_size)))

    def _rotations(self, count: int) -> Rotation:
        """Return the angles of the first ``count`` positions or more: looked up, not computed."""
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


def _step(
    head: EagleHead,
    attend: Attend,
    token_ids: Tensor,
    positions: Tensor,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    embedded = functional.embedding(token_ids, head.embedding)
    return head.step(embedded, hidden, Rotation(cos, sin).at(positions), attend)


def _go_on(head: EagleHead, attend: Attend, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    hidden = _step(head, attend, *inputs)
    return hidden, head.logits(hidden)
