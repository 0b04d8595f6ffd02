"""Forwards of an EAGLE head, compiled: generated code has fewer operations to launch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eaglegbv.attention.base import PagedAttention, Segment, pack
from eaglegbv.attention.opaque import PagedCall, attend_opaque, attending
from eaglegbv.compiling import (
    can_generate,
    check_backend,
    compile_graph,
    generating_products,
    making_graphs,
)
from eaglegbv.drafters.eagle_head import EagleHead
from eaglegbv.drafters.eagle_layers import Attend
from eaglegbv.drafters.head_forward import HeadForward
from eaglegbv.drafters.head_rows import (
    Drafted,
    Forward,
    LevelRows,
    Result,
    go_on_rows,
    read_rows,
)
from eaglegbv.products import in_use
from eaglegbv.quantization import Quantization

_WARM_UP_KEYS = 11
"""Keys before the rows that graphs are made from, one slot repeated: enough for the numbers of rows
and of keys to differ."""


class CompiledHeadForward(HeadForward):
    """A head over a one-layer pool, whose forwards are compiled at construction.

    Compiled are those on true features, and those of drafts: of trees grown on the host, or of the
    levels of a recorded loop. All others run uncompiled.
    """

    def __init__(
        self,
        head: EagleHead,
        attention: PagedAttention,
        *,
        quantization: Quantization,
        compile_backend: str,
        recorded: bool = False,
    ) -> None:
        """Take a head on its final device and in its final dtype, and compile its forwards.

        Args:
            head: See :class:`HeadForward`.
            attention: See :class:`HeadForward`.
            quantization: See :class:`HeadForward`.
            compile_backend: A backend of ``torch.compile``.
            recorded: Whether drafts come from a recorded loop over :meth:`level`.

        Raises:
            InvalidArgument: There is no such backend.
        """
        kind = head.embedding
        generates = can_generate(compile_backend, dtype=kind.dtype, device=kind.device)
        super().__init__(head, attention, quantization=quantization, generated=generates)
        check_backend(compile_backend)
        attend = partial(attend_opaque, 0, scale=self._scale)
        self._graphs: dict[Callable[..., Any], Callable[..., Any]] = {
            forward: compile_graph(partial(forward, head, attend), compile_backend)
            for forward in (read_rows, go_on_rows)
        }
        self._logits = compile_graph(head.logits, compile_backend)
        self._recorded = recorded
        with making_graphs(), generating_products() if generates else nullcontext():
            self._warm_up()

    def go_on(self, segments: Sequence[Segment], hidden: Tensor) -> Drafted:
        """See :meth:`HeadForward.go_on`."""
        if self._recorded:  # the graphs are those of levels
            return super()._run(go_on_rows, segments, hidden)
        return super().go_on(segments, hidden)

    def level(self, rows: LevelRows, hidden: Tensor, attend: Attend) -> Drafted:
        """See :meth:`HeadForward.level`."""
        if not self._recorded:
            return super().level(rows, hidden, attend)

        def attend_rows(layer: int, q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
            del layer  # a head has one
            return attend(q, k, v)

        with in_use(self._products), attending(attend_rows):
            found: Drafted = self._graphs[go_on_rows](rows, hidden)
            return found

    def logits(self, hidden: Tensor) -> Tensor:
        """See :meth:`HeadForward.logits`."""
        if self._recorded:
            return super().logits(hidden)
        with in_use(self._products):
            found: Tensor = self._logits(hidden)
            return found

    def _run(self, forward: Forward[Result], segments: Sequence[Segment], above: Tensor) -> Result:
        """Run a forward by its graph, if it has one."""
        graph = self._graphs.get(forward)
        if graph is None:
            return super()._run(forward, segments, above)
        batch = pack(segments, self._head.embedding.device)
        # Graphs are made for tensors of inference mode; these may have been made outside it.
        rows = self._rows(batch.token_ids.clone(), batch.positions.clone(), segments)
        with in_use(self._products), attending(PagedCall(self.attention, batch).attend):
            found: Result = graph(rows, above)
            return found

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Make the graphs for one row and for any number, from tensors of inference mode."""
        config, like = self._head.config, self._head.embedding
        for segments in _examples():
            count = sum(segment.num_new for segment in segments)
            hidden = like.new_zeros((count, config.hidden_size))
            self.read(segments, like.new_zeros((count, config.feature_size)))
            if self._recorded:
                places = torch.zeros(count, dtype=torch.int64, device=like.device)
                rows = LevelRows(places, self._head.rotary(places, like.dtype))
                self.level(rows, hidden, lambda q, *_: torch.zeros_like(q))
            else:
                self.go_on(segments, hidden)
                self.logits(hidden)


def _examples() -> Iterator[list[Segment]]:
    """Yield rows to make graphs from: one, and a few of two requests."""
    context = torch.zeros(_WARM_UP_KEYS, dtype=torch.int64)
    for lengths in ((1,), (3, 1)):
        new = torch.arange(sum(lengths)).split(lengths)
        yield [Segment.causal(torch.zeros_like(own), context, own) for own in new]
