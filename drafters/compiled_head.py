"""Forwards of an EAGLE head, compiled.

The operations of a tiny head's forward take longer to launch than to compute. Compiled code
launches faster, most of all for a lone request, whose attention is part of the graph. On a device,
where the loop over a draft's levels is recorded, generated code has fewer kernels to run.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from eaglegbv.attention.base import PagedAttention, Segment, pack
from eaglegbv.attention.lone import LoneKeys, attend_lone, attends_alone, lone_keys, path_keys
from eaglegbv.attention.opaque import PagedCall, attend_opaque, attending
from eaglegbv.compiling import (
    can_generate,
    check_backend,
    compiled_by_kind,
    generating_products,
    making_graphs,
)
from eaglegbv.drafters.drawing import Drawing, Drawn, Followed, draw
from eaglegbv.drafters.eagle_head import EagleHead
from eaglegbv.drafters.eagle_layers import Attend
from eaglegbv.drafters.head_forward import FollowPaths, HeadForward, PathRows
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
)
from eaglegbv.products import in_use
from eaglegbv.quantization import Quantization

_WARM_UP_KEYS = 11
"""Keys before the rows that graphs are made from, one slot repeated: enough for the numbers of rows
and of keys to differ."""


class _Graphs(Generic[Above, Result]):
    """A forward compiled for a few rows of one request, attention included, and for all others."""

    def __init__(
        self, forward: Forward[Above, Result], head: EagleHead, *, scale: float, backend: str
    ) -> None:
        def lone(rows: Rows, keys: LoneKeys, above: Above) -> Result:
            return forward(head, partial(attend_lone, over=keys, scale=scale), rows, above)

        def batch(rows: Rows, above: Above) -> Result:
            return forward(head, partial(attend_opaque, 0, scale=scale), rows, above)

        self.lone: Callable[..., Result] = compiled_by_kind(lone, backend, _single)
        self.batch: Callable[..., Result] = compiled_by_kind(batch, backend, _single)


class _Compiled(NamedTuple):
    """Compiled forwards."""

    go_on: _Graphs[Tensor, Drafted]
    follow: _Graphs[FollowInput, Followed]
    logits: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, Drawing], Drawn]


class _CompiledReading(HeadForward, ABC):
    """A head over a one-layer pool, whose forwards on true features are compiled at construction.

    Subclasses compile its drafting.
    """

    def __init__(
        self,
        head: EagleHead,
        attention: PagedAttention,
        *,
        quantization: Quantization,
        compile_backend: str,
    ) -> None:
        """Take a head on its final device and in its final dtype, and compile its forwards.

        Args:
            head: See :class:`HeadForward`.
            attention: See :class:`HeadForward`.
            quantization: See :class:`HeadForward`.
            compile_backend: A backend of ``torch.compile``.

        Raises:
            InvalidArgument: There is no such backend.
        """
        kind = head.embedding
        generates = can_generate(compile_backend, dtype=kind.dtype, device=kind.device)
        super().__init__(head, attention, quantization=quantization, generated=generates)
        check_backend(compile_backend)
        self._read = _Graphs(read_rows, head, scale=self._scale, backend=compile_backend)
        self._compile(compile_backend)
        with making_graphs(), generating_products() if generates else nullcontext():
            self._warm_up()

    @abstractmethod
    def _compile(self, backend: str) -> None:
        """Compile the drafting forwards; graphs are made when they are first called."""

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Make the graphs for one row and for any number, from tensors of inference mode."""
        like = self._head.embedding
        for segments in self._examples():
            rows = sum(segment.num_new for segment in segments)
            self.read(segments, like.new_zeros((rows, self._head.config.feature_size)))

    def read(self, segments: Sequence[Segment], features: Tensor) -> Tensor:
        """See :meth:`HeadForward.read`."""
        return self._run_compiled(self._read, segments, features)

    def _run_compiled(
        self, graphs: _Graphs[Above, Result], segments: Sequence[Segment], above: Above
    ) -> Result:
        with in_use(self._products):
            if attends_alone(segments, self.attention.pool):
                (segment,) = segments
                keys = lone_keys(segment, self.attention.pool, layer=0)
                rows = self._graph_rows(segment.token_ids, segment.positions, segments)
                return graphs.lone(rows, keys, above)
            batch = pack(segments, self._head.embedding.device)
            rows = self._graph_rows(batch.token_ids, batch.positions, segments)
            with attending(PagedCall(self.attention, batch).attend):
                return graphs.batch(rows, above)

    def _graph_rows(
        self, token_ids: Tensor, positions: Tensor, segments: Sequence[Segment]
    ) -> Rows:
        # Graphs are made for tensors of inference mode; these may have been made outside it.
        return self._rows(token_ids.clone(), positions.clone(), segments)

    def _examples(self) -> Iterator[list[Segment]]:
        """Yield rows to make graphs from: one, a few of one request, and a few of two requests."""
        context = torch.zeros(_WARM_UP_KEYS, dtype=torch.int64)
        for lengths in ((1,), (3,), (3, 1)):
            new = torch.arange(sum(lengths)).split(lengths)
            yield [Segment.causal(torch.zeros_like(own), context, own) for own in new]


class CompiledLevels(_CompiledReading):
    """A head that drafts level by level, for a loop that is recorded.

    Other drafts run uncompiled.
    """

    def _compile(self, backend: str) -> None:
        attend = partial(attend_opaque, 0, scale=self._scale)

        def level(rows: LevelRows, hidden: Tensor) -> Drafted:
            return go_on_rows(self._head, attend, rows, hidden)

        self._level: Callable[..., Drafted] = compiled_by_kind(level, backend, _single)

    def level(self, rows: LevelRows, hidden: Tensor, attend: Attend) -> Drafted:
        """See :meth:`HeadForward.level`."""

        def attend_rows(layer: int, q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
            del layer  # a head has one
            return attend(q, k, v)

        with in_use(self._products), attending(attend_rows):
            return self._level(rows, hidden)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        super()._warm_up()
        config, like = self._head.config, self._head.embedding
        for count in (1, 3):
            places = torch.zeros(count, dtype=torch.int64, device=like.device)
            rotation = self._head.rotary(places, like.dtype)
            hidden = like.new_zeros((count, config.hidden_size))
            self.level(LevelRows(places, rotation), hidden, _attend_nothing)


class CompiledHeadForward(_CompiledReading):
    """A head that drafts trees grown on the host."""

    def _compile(self, backend: str) -> None:
        head = self._head
        self._compiled = _Compiled(
            go_on=_Graphs(go_on_rows, head, scale=self._scale, backend=backend),
            follow=_Graphs(follow_rows, head, scale=self._scale, backend=backend),
            logits=compiled_by_kind(head.logits, backend, _single),
            draw=compiled_by_kind(partial(draw, head), backend, _single),
        )

    def go_on(self, segments: Sequence[Segment], hidden: Tensor) -> Drafted:
        """See :meth:`HeadForward.go_on`."""
        return self._run_compiled(self._compiled.go_on, segments, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """See :meth:`HeadForward.logits`."""
        with in_use(self._products):
            return self._compiled.logits(hidden)

    def along(self, paths: Sequence[PathRows]) -> FollowPaths:
        """See :meth:`HeadForward.along`."""
        first, *others = paths
        if others or self.attention.pool.keys.device.type != "cpu":
            return super().along(paths)
        return self._along_alone(self._compiled.follow.lone, first)

    def _along_alone(self, graph: Callable[..., Followed], path: PathRows) -> FollowPaths:
        """See :meth:`along`; all that the rows of a lone path need is prepared in advance."""
        keys = path_keys(path.context, path.slots, self.attention.pool, layer=0)
        positions = path.positions.split(1)
        angles = self._rotations(len(path.context) + len(path.slots))

        def follow(level: int, token_ids: Tensor, hidden: Tensor, drawing: Drawing) -> Followed:
            rows = Rows(token_ids, positions[level], angles)
            with in_use(self._products):
                return graph(rows, keys[level], FollowInput(hidden, drawing))

        return follow

    def follow(self, segments: Sequence[Segment], hidden: Tensor, drawing: Drawing) -> Followed:
        """See :meth:`HeadForward.follow`."""
        return self._run_compiled(self._compiled.follow, segments, FollowInput(hidden, drawing))

    def draw(self, hidden: Tensor, drawing: Drawing) -> Drawn:
        """See :meth:`HeadForward.draw`."""
        with in_use(self._products):
            return self._compiled.draw(hidden, drawing)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        super()._warm_up()
        config, like = self._head.config, self._head.embedding
        context = torch.zeros(_WARM_UP_KEYS, dtype=torch.int64)
        for segments in self._examples():
            rows = sum(segment.num_new for segment in segments)
            above = like.new_zeros((rows, config.hidden_size))
            self.go_on(segments, above)
            self.logits(above)
        for count in (1, 3):
            above = like.new_zeros((count, config.hidden_size))
            drawing = Drawing(torch.ones(count), torch.zeros(count, dtype=torch.float64))
            token_ids = self.draw(above, drawing).token_ids
            segments = [
                Segment.causal(token, context, slot)
                for token, slot in zip(
                    token_ids.split(1), torch.arange(count).split(1), strict=True
                )
            ]
            self.follow(segments, above, drawing)


def _attend_nothing(q: Tensor, *_: Tensor) -> Tensor:
    return torch.zeros_like(q)


def _single(rows: Rows | LevelRows | Tensor, *_: object) -> bool:
    """Return whether a forward is of one row; graphs treat a size of 1 as a constant."""
    return (rows if isinstance(rows, Tensor) else rows.token_ids).shape[0] == 1
