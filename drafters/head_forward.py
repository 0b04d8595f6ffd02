"""Forwards of an EAGLE head over packed rows and a pool, which may be compiled.

A forward of the tiny head takes less to compute than its operations take to launch, which compiled
code does faster; most of all where a lone request drafts, whose attention is part of the graph.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from eaglegbv.attention.base import PagedAttention, Segment, pack
from eaglegbv.attention.lone import (
    LoneKeys,
    attend_lone,
    attends_alone,
    lone_keys,
    path_keys,
)
from eaglegbv.attention.opaque import PagedCall, attend_opaque, serving
from eaglegbv.compiling import (
    can_generate,
    check_backend,
    compiled_by_kind,
    generating_products,
    making_graphs,
)
from eaglegbv.drafters.device_trees import pick
from eaglegbv.drafters.draft_law import draft_laws
from eaglegbv.drafters.eagle_head import EagleHead
from eaglegbv.drafters.eagle_layers import Attend
from eaglegbv.drafters.rotary import Rotation
from eaglegbv.products import in_use
from eaglegbv.quantization import Quantization
from eaglegbv.warp import WarpSettings

_FIRST_ANGLES = 1023
"""Positions whose angles are known from the start: a number that no model has units of, since
graphs take sizes that are equal when they are made for equal for good."""

_COLD = 1e-30
"""The temperature that stands for 0."""

_WARM_UP_KEYS = 11
"""Keys behind the rows that graphs are made from, one slot many times: rows and keys differ."""


class Drafted(NamedTuple):
    """What rows on the head's own output come to.

    Attributes:
        hidden: ``[rows, hidden]``.
        logits: ``[rows, draft_vocab]``, of the token after next.
    """

    hidden: Tensor
    logits: Tensor


class Drawing(NamedTuple):
    """How a token is drawn after each of some rows.

    Attributes:
        temperature: ``[rows]`` float32, of the draft laws; 0 takes the most likely token.
        uniforms: ``[rows]`` float64 in [0, 1).
    """

    temperature: Tensor
    uniforms: Tensor


class Drawn(NamedTuple):
    """Tokens drawn.

    Attributes:
        token_ids: ``[rows]`` int64, the target's ids.
        probs: ``[rows, draft_vocab]`` float64, the laws they were drawn from.
    """

    token_ids: Tensor
    probs: Tensor


class Followed(NamedTuple):
    """What rows on the head's own output come to, and the tokens drawn after them.

    Attributes:
        hidden: ``[rows, hidden]``.
        drawn: Of each row.
    """

    hidden: Tensor
    drawn: Drawn


class PathRows(NamedTuple):
    """The rows of a path, which are run one after another: what is known before any token is drawn.

    Attributes:
        context: ``[c]`` int64, one or more, slots of what every row sees.
        slots: ``[rows]`` int64, slots the rows take, in order.
        positions: ``[rows]`` int64, where they stand in the text.
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


class Follow(Protocol):
    """Runs the next row of every path on the head's own output, and draws what follows."""

    def __call__(self, level: int, token_ids: Tensor, hidden: Tensor, drawing: Drawing) -> Followed:
        """Run a row of each.

        Args:
            level: Which row of the paths, counted from 0; all before have run.
            token_ids: ``[paths]`` int64, the tokens the rows read.
            hidden: ``[paths, hidden]``, contiguous.
            drawing: How a token is drawn after each.
        """


class _Above(NamedTuple):
    """What rows go on from that draw a token each.

    Attributes:
        hidden: ``[rows, hidden]``.
        drawing: Of each row.
    """

    hidden: Tensor
    drawing: Drawing


class _Rows(NamedTuple):
    """Rows of a forward, but for what they go on from.

    Attributes:
        token_ids: ``[rows]`` int64.
        positions: ``[rows]`` int64.
        angles: Those of positions 0, 1, ...
    """

    token_ids: Tensor
    positions: Tensor
    angles: Rotation

    @property
    def rotation(self) -> Rotation:
        """The angles of the rows."""
        return self.angles.at(self.positions)


Result = TypeVar("Result")
Above = TypeVar("Above", Tensor, _Above)

_Forward = Callable[[EagleHead, Attend, _Rows, Above], Result]


class _Graphs(Generic[Above, Result]):
    """A forward, compiled: for a few rows of one request, with their attention, and for others."""

    def __init__(
        self, forward: _Forward[Above, Result], head: EagleHead, *, scale: float, backend: str
    ) -> None:
        def lone(rows: _Rows, keys: LoneKeys, above: Above) -> Result:
            return forward(head, partial(attend_lone, over=keys, scale=scale), rows, above)

        def batch(rows: _Rows, above: Above) -> Result:
            return forward(head, partial(attend_opaque, 0, scale=scale), rows, above)

        self.lone: Callable[..., Result] = compiled_by_kind(lone, backend, _single)
        self.batch: Callable[..., Result] = compiled_by_kind(batch, backend, _single)


class _Compiled(NamedTuple):
    """Compiled forwards."""

    read: _Graphs[Tensor, Tensor]
    go_on: _Graphs[Tensor, Drafted]
    follow: _Graphs[_Above, Followed]
    logits: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, Drawing], Drawn]


class HeadForward:
    """A head over a one-layer pool.

    Attributes:
        attention: Paged attention over the pool.
        drafts_all: Whether draft tokens are the target's, all of them, in their order.
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
            attention: Paged attention over its pool, of four slots or more, none of them in use.
            quantization: Of its weights; not ``auto``.
            compile_backend: Compile the forwards of a draft by this backend of ``torch.compile``
                now; None runs them as they are.

        Raises:
            InvalidArgument: There is no such backend.
        """
        kind = head.embedding
        generates = can_generate(compile_backend, dtype=kind.dtype, device=kind.device)
        self._products = head.prepare_products(quantization, generated=generates)
        self._head = head
        self.attention = attention
        self._scale = head.config.head_dim**-0.5
        self._angles = self._angles_of(_FIRST_ANGLES)
        self._ids = head.draft_to_target.new_empty((0, len(head.draft_to_target)))
        every = torch.arange(head.config.vocab_size, device=head.draft_to_target.device)
        self.drafts_all = torch.equal(head.draft_to_target, every)
        self._compiled: _Compiled | None = None
        if compile_backend is not None:
            check_backend(compile_backend)
            self._compiled = _Compiled(
                read=_Graphs(_read, head, scale=self._scale, backend=compile_backend),
                go_on=_Graphs(_go_on, head, scale=self._scale, backend=compile_backend),
                follow=_Graphs(_follow, head, scale=self._scale, backend=compile_backend),
                logits=compiled_by_kind(head.logits, compile_backend, _single),
                draw=compiled_by_kind(partial(_draw, head), compile_backend, _single),
            )
            with making_graphs(), generating_products() if generates else nullcontext():
                self._warm_up()

    def step(self, segments: Sequence[Segment], hidden: Tensor) -> Tensor:
        """Run rows on ``hidden`` ``[rows, hidden]``; return the next, likewise."""
        return self._run(_step, segments, hidden)

    def read(self, segments: Sequence[Segment], features: Tensor) -> Tensor:
        """Run rows on the target's ``features`` ``[rows, F]``, contiguous; return the next."""
        if self._compiled is None:
            return self._run(_read, segments, features)
        return self._run_compiled(self._compiled.read, segments, features)

    def go_on(self, segments: Sequence[Segment], hidden: Tensor) -> Drafted:
        """Run rows on the head's own output ``[rows, hidden]``, contiguous, with logits."""
        if self._compiled is None:
            return self._run(_go_on, segments, hidden)
        return self._run_compiled(self._compiled.go_on, segments, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``[rows, draft_vocab]`` of the head's output ``[rows, hidden]``, contiguous."""
        if self._compiled is None:
            return self._head.logits(hidden)
        with in_use(self._products):
            return self._compiled.logits(hidden)

    def along(self, paths: Sequence[PathRows]) -> Follow:
        """Return what runs the rows of ``paths``, a row of each at a time."""
        compiled, (first, *others) = self._compiled, paths
        if compiled is not None and not others and self.attention.pool.keys.device.type == "cpu":
            return self._along_alone(compiled.follow.lone, first)

        def follow(level: int, token_ids: Tensor, hidden: Tensor, drawing: Drawing) -> Followed:
            tokens = token_ids.split(1)
            segments = [p.segment(level, own) for p, own in zip(paths, tokens, strict=True)]
            return self.follow(segments, hidden, drawing)

        return follow

    def _along_alone(self, graph: Callable[..., Followed], path: PathRows) -> Follow:
        """See :meth:`along`; for a path alone all that its rows need is settled at once."""
        keys = path_keys(path.context, path.slots, self.attention.pool, layer=0)
        positions = path.positions.split(1)
        angles = self._rotations(len(path.context) + len(path.slots))

        def follow(level: int, token_ids: Tensor, hidden: Tensor, drawing: Drawing) -> Followed:
            rows = _Rows(token_ids, positions[level], angles)
            with in_use(self._products):
                return graph(rows, keys[level], _Above(hidden, drawing))

        return follow

    def follow(self, segments: Sequence[Segment], hidden: Tensor, drawing: Drawing) -> Followed:
        """Run a row each on the head's own output ``[rows, hidden]``, and draw what follows."""
        above = _Above(hidden, drawing)
        if self._compiled is None:
            return self._run(_follow, segments, above)
        return self._run_compiled(self._compiled.follow, segments, above)

    def draw(self, hidden: Tensor, drawing: Drawing) -> Drawn:
        """Draw what follows rows that came to ``hidden`` ``[rows, hidden]``, contiguous."""
        if self._compiled is None:
            return _draw(self._head, hidden, drawing)
        with in_use(self._products):
            return self._compiled.draw(hidden, drawing)

    @property
    def draft_to_target(self) -> Tensor:
        """``[draft_vocab]`` int64, the target's id of each draft token."""
        return self._head.draft_to_target

    @torch.inference_mode()
    def every_id(self, batch: int, nodes: int) -> Tensor:
        """Return ``[batch, nodes, draft_vocab]`` int64: every node's draft law has all tokens.

        It is made once and shared, so nobody may write to it.
        """
        rows = batch * nodes
        if len(self._ids) < rows:
            self._ids = self.draft_to_target.repeat(rows, 1)
        return self._ids[:rows].view(batch, nodes, -1)

    def _run(
        self, forward: _Forward[Above, Result], segments: Sequence[Segment], above: Above
    ) -> Result:
        """Run a forward as it is."""
        batch = pack(segments, self._head.embedding.device)
        attend = partial(PagedCall(self.attention, batch).attend, 0, scale=self._scale)
        rows = self._rows(batch.token_ids, batch.positions, segments)
        return forward(self._head, attend, rows, above)

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
            with serving(PagedCall(self.attention, batch)):
                return graphs.batch(rows, above)

    def _graph_rows(
        self, token_ids: Tensor, positions: Tensor, segments: Sequence[Segment]
    ) -> _Rows:
        # Graphs are made for tensors of one kind, those of inference mode; these may be older.
        return self._rows(token_ids.clone(), positions.clone(), segments)

    def _rows(self, token_ids: Tensor, positions: Tensor, segments: Sequence[Segment]) -> _Rows:
        longest = max(segment.num_keys for segment in segments)
        return _Rows(token_ids, positions, self._rotations(longest))

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Make the graphs, of one row and of any number: for the tensors of inference mode."""
        config, like = self._head.config, self._head.embedding
        context = torch.zeros(_WARM_UP_KEYS, dtype=torch.int64)
        for lengths in ((1,), (3,), (3, 1)):
            slots = torch.arange(sum(lengths))
            new = slots.split(lengths)
            segments = [Segment.causal(torch.zeros_like(own), context, own) for own in new]
            self.read(segments, like.new_zeros((len(slots), config.feature_size)))
            above = like.new_zeros((len(slots), config.hidden_size))
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


def _single(rows: _Rows | Tensor, *_: object) -> bool:
    """Return whether a forward is of one row: graphs take sizes of 1 for fixed."""
    return (rows.token_ids if isinstance(rows, _Rows) else rows).shape[0] == 1


def _step(head: EagleHead, attend: Attend, rows: _Rows, hidden: Tensor) -> Tensor:
    embedded = functional.embedding(rows.token_ids, head.embedding)
    return head.step(embedded, hidden, rows.rotation, attend)


def _read(head: EagleHead, attend: Attend, rows: _Rows, features: Tensor) -> Tensor:
    return _step(head, attend, rows, head.fuse(features))


def _follow(head: EagleHead, attend: Attend, rows: _Rows, above: _Above) -> Followed:
    hidden = _step(head, attend, rows, above.hidden)
    return Followed(hidden, _draw(head, hidden, above.drawing))


def _draw(head: EagleHead, hidden: Tensor, drawing: Drawing) -> Drawn:
    logits = head.logits(hidden)
    settings = WarpSettings(
        # Near 0, all is lost beside the most likely token: no case of its own.
        temperature=drawing.temperature.clamp(min=_COLD),
        greedy=None,
        top_k=None,
        limits=frozenset(),
        top_p=None,
        min_p=None,
    )
    ids = head.draft_to_target
    laws = draft_laws(logits, settings, width=logits.shape[1], draft_to_target=ids)
    return Drawn(ids.take(pick(laws.probs, drawing.uniforms)), laws.probs)


def _go_on(head: EagleHead, attend: Attend, rows: _Rows, hidden: Tensor) -> Drafted:
    hidden = _step(head, attend, rows, hidden)
    return Drafted(hidden, head.logits(hidden))
