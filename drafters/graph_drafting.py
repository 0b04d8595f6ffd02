"""Forwards of an EAGLE head, compiled: generated code has fewer operations to launch."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from eaglegbv.attention.base import (
    AttentionCall,
    BranchAttention,
    BranchShape,
    PagedAttention,
    Segment,
    attend_opaque,
    attending,
    pack,
)
from eaglegbv.compiling import (
    can_generate,
    check_backend,
    compile_graph,
    generating_products,
    making_graphs,
)
from eaglegbv.config import Plan
from eaglegbv.cuda_graphs import MAX_ROWS, REPLAYED, NotRecordable, Recorder, Work
from eaglegbv.devices import send
from eaglegbv.drafters.eagle_model import (
    Attend,
    Drafted,
    EagleHead,
    Forward,
    HeadForward,
    LevelRows,
    Result,
    Rotation,
    go_on_rows,
    read_rows,
)
from eaglegbv.drafters.tree_growth import (
    SAMPLINGS,
    DraftProbs,
    Frontier,
    Grow,
    Roots,
    draft_dists,
    draft_params,
    growth,
    log_probs,
    start_device_trees,
    support,
)
from eaglegbv.fused_linears import Quantization, in_use
from eaglegbv.request import Request
from eaglegbv.rng import Purpose, RequestRng
from eaglegbv.sampling import SamplingParams, WarpSettings
from eaglegbv.tree import DraftSampling, DraftTree

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
        attend = partial(attend_opaque, AttentionCall(0, self._scale))
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

        def attend_rows(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            del call  # a head has one layer
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
        with in_use(self._products), attending(partial(self.attention.attend, batch=batch)):
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


# A head's whole draft loop on the device, for fixed sizes: recorded once and replayed.
#
# The host loads a step's numbers (roots, features, contexts, random numbers, settings), and takes the
# trees as they are: padded, on the device, without reading them. One recording serves a plan, a distribution,
# a number of requests (padded to a power of two), and a kind of warping.


@dataclass(frozen=True, slots=True)
class _Kind:
    """The settings a recording is made for.

    Attributes:
        requests: Number of requests, padded.
        plan: Their plan.
        draft_sampling: How children arise.
        greedy: Whether any warping has temperature 0.
        limit: A bound on top-k limits: a power of two, or all candidates of a row but one; None
            where nothing is limited.
        top_p: Whether any warping uses top-p.
        min_p: Whether any warping uses min-p.
    """

    requests: int
    plan: Plan
    draft_sampling: DraftSampling
    greedy: bool
    limit: int | None
    top_p: bool
    min_p: bool

    @classmethod
    def of(
        cls,
        requests: int,
        plan: Plan,
        draft_sampling: DraftSampling,
        settings: WarpSettings,
        draft_vocab: int,
    ) -> Self:
        """Return the kind that serves drafts warped by ``settings``; fixed ones are not warped."""
        if draft_sampling is DraftSampling.FIXED:
            return cls(
                requests, plan, draft_sampling, greedy=False, limit=None, top_p=False, min_p=False
            )
        return cls(
            requests,
            plan,
            draft_sampling,
            greedy=settings.greedy is not None,
            limit=_limit(settings.limits, support(plan, draft_sampling, draft_vocab)),
            top_p=settings.top_p is not None,
            min_p=settings.min_p is not None,
        )


class DeviceDrafting:
    """Drafts of a head by replayed recordings.

    Attributes:
        counts: Drafts by outcome: ``replayed``, or the reason why they grew on the host.
    """

    def __init__(
        self,
        head: EagleHead,
        forward: HeadForward,
        recorder: Recorder,
        *,
        max_context: int,
        compile_backend: str | None = None,
    ) -> None:
        """Begin with nothing recorded.

        Args:
            head: The head.
            forward: Its forwards, over a pool whose last slot nobody owns.
            recorder: Makes work repeatable.
            max_context: Most positions of a text.
            compile_backend: A backend of ``torch.compile``, which compiles the growth of drawn
                trees now; None runs it uncompiled.

        Raises:
            InvalidArgument: There is no such backend.
        """
        self.counts: Counter[str] = Counter()
        self._head = head
        self._forward = forward
        self._recorder = recorder
        self._max_context = max_context
        self._grow = growth(compile_backend, forward.attention.pool.keys.device)
        self._recorded: dict[_Kind, _Drafting] = {}
        self._refused: dict[_Kind, str] = {}

    def draft(
        self,
        requests: Sequence[Request],
        plan: Plan,
        draft_sampling: DraftSampling,
        roots: Roots,
    ) -> DraftTree | None:
        """Draft one tree per request; return None where that has to be done on the host.

        Args:
            requests: The requests.
            plan: The plan they share.
            draft_sampling: How children arise.
            roots: What the drafts continue.
        """
        padded = 1 << (len(requests) - 1).bit_length()
        branches = plan.fixed_beam if draft_sampling is DraftSampling.FIXED else plan.paths
        if draft_sampling not in SAMPLINGS:
            self.counts[f"distribution {draft_sampling}"] += 1
        elif draft_sampling is DraftSampling.FIXED and plan.shape:
            self.counts["shape"] += 1
        elif padded * branches > MAX_ROWS:
            self.counts["too many rows"] += 1
        else:
            try:
                tree = self._replay(padded, requests, plan, draft_sampling, roots)
            except NotRecordable as obstacle:
                self.counts[obstacle.reason] += 1
                return None
            self.counts["too many keys" if tree is None else REPLAYED] += 1
            return tree
        return None

    def record(
        self, requests: int, plan: Plan, draft_sampling: DraftSampling, params: SamplingParams
    ) -> None:
        """Record now the drafts of up to ``requests`` requests with such settings."""
        counts = self.counts.copy()
        slot = torch.tensor([self._forward.attention.pool.num_slots - 1])
        size, like = self._head.config.hidden_size, self._head.embedding
        for exponent in range((requests - 1).bit_length() + 1):
            count = 1 << exponent
            made = [
                Request(0, (0,), params, plan, RequestRng(0), 1, token_ids=[0])
                for _ in range(count)
            ]
            slots = [slot.expand(plan.tree_slots)] * count
            roots = Roots([slot] * count, like.new_zeros((count, size)), slots)
            self.draft(made, plan, draft_sampling, roots)
        self.counts.clear()
        self.counts.update(counts)

    def _replay(
        self,
        padded: int,
        requests: Sequence[Request],
        plan: Plan,
        draft_sampling: DraftSampling,
        roots: Roots,
    ) -> DraftTree | None:
        """Draft one tree per request; return None where the texts are too long.

        Raises:
            NotRecordable: Drafts of this kind cannot be recorded, as was found now or before.
        """
        params = [draft_params(request.params, plan) for request in requests]
        params += params[-1:] * (padded - len(requests))
        settings = WarpSettings.of(params, [1] * padded)
        kind = _Kind.of(padded, plan, draft_sampling, settings, len(self._head.draft_to_target))
        if kind in self._refused:
            raise NotRecordable(self._refused[kind])
        known = self._recorded.get(kind)
        drafting = known or _Drafting(
            kind, self._head, self._forward, self._grow, max_context=self._max_context
        )
        if not drafting.holds(roots.contexts):
            return None
        drafting.load(requests, settings, roots)
        if known is None:
            try:
                drafting.replay = self._recorder.record(drafting.work)
            except NotRecordable as obstacle:
                self._refused[kind] = obstacle.reason
                raise
            self._recorded[kind] = drafting
        trees = DraftTree(draft_sampling, *drafting.replay())
        # Trees of another plan in this step would overwrite these. A lone row must not keep the
        # strides of the buffer it was cut from, as graphs are made for strides too.
        kept = torch.contiguous_format
        return trees.mapped(lambda tensor: tensor[: len(requests)].clone(memory_format=kept))


class _Drafting:
    """Static buffers of one kind of draft, and the loop over them."""

    def __init__(
        self, kind: _Kind, head: EagleHead, forward: HeadForward, grow: Grow, *, max_context: int
    ) -> None:
        plan, config, batch = kind.plan, head.config, kind.requests
        pool = forward.attention.pool
        self._kind = kind
        self._head = head
        self._forward = forward
        self._grow = grow
        self._rows = plan.fixed_beam if kind.draft_sampling is DraftSampling.FIXED else plan.paths
        self._width = support(plan, kind.draft_sampling, len(head.draft_to_target))
        self._scratch_slot = pool.num_slots - 1
        levels = plan.depth - 1
        self._attention: BranchAttention | None = None
        if levels:
            shape = BranchShape(
                requests=batch,
                branches=self._rows,
                levels=levels,
                max_context=max_context,
                heads=config.num_heads,
                scale=config.head_dim**-0.5,
            )
            self._attention = forward.attention.branches(shape)
        device, dtype = pool.keys.device, pool.keys.dtype
        self.replay: Work
        with torch.inference_mode(mode=False):

            def room(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
                return torch.zeros(shape, dtype=dtype, device=device)

            self._roots = room(batch)
            self._contexts = room(batch)
            self._hidden = room(batch, config.hidden_size, dtype=dtype)
            self._uniforms = room(batch, plan.paths, plan.depth, dtype=torch.float64)
            self._settings = WarpSettings(
                temperature=room(batch, dtype=torch.float32),
                greedy=room(batch, dtype=torch.bool) if kind.greedy else None,
                top_k=room(batch) if kind.limit else None,
                limits=frozenset(() if kind.limit is None else (kind.limit,)),
                top_p=room(batch, dtype=torch.float64) if kind.top_p else None,
                min_p=room(batch, dtype=torch.float64) if kind.min_p else None,
            )

    def holds(self, contexts: Sequence[Tensor]) -> bool:
        """Return whether attention can list the keys of all rows that continue ``contexts``."""
        attention = self._attention
        if attention is None or attention.most_keys is None:
            return True
        requests, levels, rows = attention.slots.shape
        missing = requests - len(contexts)  # with one key each
        keys = missing + sum(len(context) for context in contexts)
        return keys + requests * levels * rows <= attention.most_keys

    def load(self, requests: Sequence[Request], settings: WarpSettings, roots: Roots) -> None:
        """Copy a step's numbers into the buffers, and plan its attention."""
        kind, real = self._kind, len(requests)
        missing = kind.requests - real
        tokens = [request.token_ids[-1] for request in requests]
        _fill(self._roots, torch.tensor([*tokens, *[0] * missing]))
        contexts = [*roots.contexts, *[torch.tensor([self._scratch_slot])] * missing]
        _fill(self._contexts, torch.tensor([len(context) for context in contexts]))
        self._hidden[:real].copy_(roots.hidden)
        for name in ("temperature", "greedy", "top_k", "top_p", "min_p"):
            buffer, value = getattr(self._settings, name), getattr(settings, name)
            if buffer is not None:
                _fill(buffer, value)
        if kind.draft_sampling is not DraftSampling.FIXED:
            count = kind.plan.paths * kind.plan.depth
            numbers = np.zeros((kind.requests, count))
            for row, request in zip(numbers[:real], requests, strict=True):
                row[:] = request.stream.draw(request.step, Purpose.DRAFT, count)
            _fill(self._uniforms, torch.from_numpy(numbers).view(self._uniforms.shape))
        if self._attention is not None:
            shape = self._attention.slots.shape
            slots = torch.full(shape, self._scratch_slot).flatten(1)
            for row, own in zip(slots[:real], roots.tree_slots, strict=True):
                row.copy_(own[: len(row)])
            self._attention.plan(contexts, slots.view(shape))

    def work(self) -> tuple[Tensor, ...]:
        """Draft, and return the tensors of the trees in order."""
        kind, head, rows = self._kind, self._head, self._rows
        trees = start_device_trees(
            kind.plan, kind.draft_sampling, self._roots, self._uniforms, grow=self._grow
        )
        rotations = self._rotations()
        frontier = trees.begin(self._dists(head.logits(self._hidden), 1))
        hidden = self._hidden.unsqueeze(1)
        chains: Tensor | None = None
        for level in range(kind.plan.depth - 1):
            if level == 0:  # all rows continue the root
                hidden = hidden.repeat_interleave(rows, dim=1)
            elif frontier.parents is not None:
                above = frontier.parents.unsqueeze(2)
                hidden = hidden.gather(1, above.expand(-1, -1, hidden.shape[2]))
            chains = self._chains(chains, frontier)
            level_rows = LevelRows(frontier.token_ids.flatten(), rotations[level])
            drafted = self._step(level, level_rows, hidden, chains)
            hidden = drafted.hidden.view(kind.requests, rows, -1)
            frontier = trees.grow(self._dists(drafted.logits, rows))
        tree = trees.finish()
        return tuple(tree.tensors.values())

    def _chains(self, above: Tensor | None, frontier: Frontier) -> Tensor | None:
        """Return the branches of each row's path, given those of the level above.

        None means that each row continues the branch of its own number.
        """
        if frontier.parents is None:
            return None
        own = torch.arange(self._rows, device=frontier.parents.device)
        own = own.expand_as(frontier.parents).unsqueeze(2)
        if above is None:
            return own
        parents = frontier.parents.unsqueeze(2).expand(-1, -1, above.shape[2])
        return torch.cat((above.gather(1, parents), own), dim=2)

    def _rotations(self) -> list[Rotation]:
        """Return the angles of each level's rows, in as many operations as for one level."""
        count, device = self._kind.plan.depth - 1, self._contexts.device
        levels = torch.arange(count, device=device).view(-1, 1, 1)
        positions = (self._contexts.unsqueeze(1) + levels).expand(-1, -1, self._rows)
        every: Rotation = self._head.rotary(positions.flatten(1), self._hidden.dtype)
        levels_of_each = zip(every.cos.unbind(0), every.sin.unbind(0), strict=True)
        return [Rotation(cos, sin) for cos, sin in levels_of_each]

    def _step(self, level: int, rows: LevelRows, hidden: Tensor, chains: Tensor | None) -> Drafted:
        attention = self._attention
        assert attention is not None  # this level exists

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention.attend(level, q, k, v, chains)

        return self._forward.level(rows, hidden.flatten(0, 1), attend)

    def _dists(self, logits: Tensor, rows: int) -> DraftProbs:
        """Return the distributions of ``rows`` rows per request."""
        ids, width = self._head.draft_to_target, self._width
        if self._kind.draft_sampling is DraftSampling.FIXED:
            return log_probs(logits, width=width, draft_to_target=ids)
        own = self._settings

        def each(column: Tensor | None) -> Tensor | None:
            return None if column is None else column.repeat_interleave(rows)

        settings = WarpSettings(
            temperature=own.temperature.repeat_interleave(rows),
            greedy=each(own.greedy),
            top_k=each(own.top_k),
            limits=own.limits,
            top_p=each(own.top_p),
            min_p=each(own.min_p),
        )
        return draft_dists(logits, settings, width=width, draft_to_target=ids)


def _limit(limits: frozenset[int], candidates: int) -> int | None:
    """Return one bound for all limits, so that one recording serves many mixtures of them."""
    largest = max((limit for limit in limits if limit < candidates), default=None)
    if largest is None:
        return None
    return min(1 << (largest - 1).bit_length(), candidates - 1)


def _fill(buffer: Tensor, values: Tensor) -> None:
    """Copy host numbers into a static buffer, without waiting for the device."""
    buffer.copy_(send(values, buffer.device))
