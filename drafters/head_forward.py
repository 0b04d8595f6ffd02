"""Forwards of an EAGLE head over packed rows and a pool, which may be compiled.

A forward of the tiny head takes less to compute than its operations take to launch, which compiled
code does faster.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from eaglegbv.attention.base import PackedBatch, PagedAttention, Segment, pack
from eaglegbv.attention.opaque import PagedCall, attend_opaque, serving
from eaglegbv.compiling import check_backend, compiled_alone, making_graphs
from eaglegbv.drafters.eagle_head import Attend, EagleHead, Rotation
from eaglegbv.products import Quantization, in_use

_FIRST_ANGLES = 1024
"""Positions whose angles are known from the start."""


Result = TypeVar("Result")


class Drafted(NamedTuple):
    """What rows on the head's own output come to.

    Attributes:
        hidden: ``[rows, hidden]``.
        logits: ``[rows, draft_vocab]``, of the token after next.
    """

    hidden: Tensor
    logits: Tensor


class _Compiled(NamedTuple):
    """Compiled forwards."""

    read: Callable[..., Tensor]
    go_on: Callable[..., Drafted]


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
            compile_backend: Compile the forwards of a draft by this backend of ``torch.compile``
                now; None runs them as they are.

        Raises:
            InvalidArgument: There is no such backend.
        """
        self._products = head.prepare_products(quantization)
        self._head = head
        self.attention = attention
        self._scale = head.config.head_dim**-0.5
        self._angles = self._angles_of(_FIRST_ANGLES)
        self._compiled: _Compiled | None = None
        if compile_backend is not None:
            check_backend(compile_backend)
            attend = partial(attend_opaque, 0, scale=self._scale)
            self._compiled = _Compiled(
                read=compiled_alone(partial(_read, head, attend), compile_backend),
                go_on=compiled_alone(partial(_go_on, head, attend), compile_backend),
            )
            with making_graphs():
                self._warm_up()

    def step(self, segments: Sequence[Segment], hidden: Tensor) -> Tensor:
        """Run rows on ``hidden`` ``[rows, hidden]``; return the next, likewise."""
        return self._run(partial(_step, self._head), segments, hidden)

    def read(self, segments: Sequence[Segment], features: Tensor) -> Tensor:
        """Run rows on the target's ``features`` ``[rows, F]``, contiguous; return the next."""
        if self._compiled is None:
            return self._run(partial(_read, self._head), segments, features)
        return self._run_compiled(self._compiled.read, segments, features)

    def go_on(self, segments: Sequence[Segment], hidden: Tensor) -> Drafted:
        """Run rows on the head's own output ``[rows, hidden]``, contiguous, with logits."""
        if self._compiled is None:
            return self._run(partial(_go_on, self._head), segments, hidden)
        return self._run_compiled(self._compiled.go_on, segments, hidden)

    def _run(
        self, forward: Callable[..., Result], segments: Sequence[Segment], rows: Tensor
    ) -> Result:
        """Run a forward as it is."""
        batch, angles = self._pack(segments)
        attend = partial(PagedCall(self.attention, batch).attend, 0, scale=self._scale)
        return forward(attend, batch.token_ids, batch.positions, rows, angles.cos, angles.sin)

    def _run_compiled(
        self, graph: Callable[..., Result], segments: Sequence[Segment], rows: Tensor
    ) -> Result:
        batch, angles = self._pack(segments)
        # Graphs are made for tensors of one kind, those of inference mode; these may be older.
        inputs = batch.token_ids.clone(), batch.positions.clone()
        with serving(PagedCall(self.attention, batch)), in_use(self._products):
            return graph(*inputs, rows, angles.cos, angles.sin)

    def _pack(self, segments: Sequence[Segment]) -> tuple[PackedBatch, Rotation]:
        batch = pack(segments, self._head.embedding.device)
        return batch, self._rotations(max(segment.num_keys for segment in segments))

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Make the graphs, of one row and of any number: for the tensors of inference mode."""
        config, like = self._head.config, self._head.embedding
        for rows in (1, 3):
            slots = torch.arange(rows)
            segment = Segment.causal(torch.zeros_like(slots), slots[:0], slots)
            self.read([segment], like.new_zeros((rows, config.feature_size)))
            self.go_on([segment], like.new_zeros((rows, config.hidden_size)))

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


def _read(
    head: EagleHead,
    attend: Attend,
    token_ids: Tensor,
    positions: Tensor,
    features: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    return _step(head, attend, token_ids, positions, head.fuse(features), cos, sin)


def _go_on(head: EagleHead, attend: Attend, *inputs: Tensor) -> Drafted:
    hidden = _step(head, attend, *inputs)
    return Drafted(hidden, head.logits(hidden))
