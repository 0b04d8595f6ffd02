"""An EAGLE head's forwards, compiled, and its whole draft loop, recorded once and replayed.

Generated code has fewer operations to launch, and a recording launches them all at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from eaglegbv.attention.base import BranchAttention, BranchShape
from eaglegbv.config import Plan
from eaglegbv.cuda_graphs import MAX_ROWS, REPLAYED, NotRecordable, Outcomes, Recorder, Work
from eaglegbv.devices import send
from eaglegbv.drafters.eagle_model import Drafted, EagleHead, HeadForward, Rotation, Rows
from eaglegbv.drafters.tree_growth import (
    DraftCall,
    DraftProbs,
    DrawPaths,
    Frontier,
    TreeGrowth,
    compiled_draw_paths,
    draft_numbers,
    draft_params,
    draft_probs,
    frontier_rows,
    in_columns,
    log_probs,
    support,
)
from eaglegbv.request import Request
from eaglegbv.rng import RequestRng
from eaglegbv.sampling import SamplingParams, WarpSettings
from eaglegbv.tree import DraftSampling, DraftTree

# The draft loop on the device, for fixed sizes.
#
# The host loads a step's numbers (roots, features, contexts, random numbers, settings), and takes
# the trees as they are: padded, on the device, without reading them. One recording serves a plan, a
# draft sampling, a number of requests (padded to a power of two), and a kind of warping.


@dataclass(frozen=True, slots=True)
class _Kind:
    """The settings a recording is made for."""

    requests: int  # number of requests, padded
    plan: Plan  # their plan
    draft_sampling: DraftSampling  # how children arise
    warping: frozenset[str] = frozenset()  # the settings that any request uses
    # A bound on top-k limits: a power of two, or all candidates of a row but one; None where
    # nothing is limited.
    limit: int | None = None

    @classmethod
    def of(
        cls, plan: Plan, draft_sampling: DraftSampling, settings: WarpSettings, draft_vocab: int
    ) -> Self:
        """Return the kind that serves drafts warped by ``settings``; fixed ones are not warped."""
        requests = len(settings.temperature)
        if draft_sampling is DraftSampling.FIXED:
            return cls(requests, plan, draft_sampling)
        # One bound for all limits, so that one recording serves many mixtures of them.
        candidates = support(plan, draft_sampling, draft_vocab)
        largest = max((own for own in settings.limits if own < candidates), default=None)
        limit = None if largest is None else min(1 << (largest - 1).bit_length(), candidates - 1)
        used = frozenset(settings.columns) - ({"top_k"} if limit is None else set())
        return cls(requests, plan, draft_sampling, used, limit)


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

        The last slot of the pool of ``forward`` is nobody's; texts have ``max_context`` positions
        at most. A ``compile_backend``, a known one of ``torch.compile``, compiles the growth of
        drawn trees now.
        """
        self.counts = Outcomes()
        self._head = head
        self._forward = forward
        self._recorder = recorder
        draw = compiled_draw_paths(compile_backend, forward.attention.pool.keys.device)
        self._make = partial(
            _Drafting, head=head, forward=forward, draw=draw, max_context=max_context
        )
        self._recorded: dict[_Kind, _Drafting] = {}
        self._refused: dict[_Kind, str] = {}

    def draft(
        self, call: DraftCall, contexts: Sequence[Tensor], hidden: Tensor
    ) -> DraftTree | None:
        """Draft one tree per request; return None where that has to be done on the host.

        ``contexts`` are for each request the slots ``[rows]`` int64 of its true rows, ``hidden``
        ``[requests, hidden]`` is the head's output at the last of them.
        """
        try:
            tree = self._replay(call, contexts, hidden)
        except NotRecordable as obstacle:
            self.counts.note("drafts", obstacle.reason)
            return None
        self.counts.note("drafts", REPLAYED)
        return tree

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
            call = DraftCall(made, plan, draft_sampling, slots)
            self.draft(call, [slot] * count, like.new_zeros((count, size)))
        self.counts.clear()
        self.counts.update(counts)

    def _replay(self, call: DraftCall, contexts: Sequence[Tensor], hidden: Tensor) -> DraftTree:
        """Draft one tree per request.

        Raises NotRecordable where texts are too long, or as was found now or before.
        """
        requests, plan, draft_sampling = call.requests, call.plan, call.draft_sampling
        padded = 1 << (len(requests) - 1).bit_length()
        if draft_sampling is DraftSampling.FIXED and plan.shape:
            raise NotRecordable("shape")
        if call.ruled:
            raise NotRecordable("rules")
        if plan.widths and draft_sampling is not DraftSampling.FIXED:
            raise NotRecordable("widths")
        if padded * frontier_rows(plan, draft_sampling) > MAX_ROWS:
            raise NotRecordable("too many rows")
        params = [draft_params(request.params, plan) for request in requests]
        params += params[-1:] * (padded - len(requests))
        settings = WarpSettings.of(params, [1] * padded)
        kind = _Kind.of(plan, draft_sampling, settings, len(self._head.draft_to_target))
        if kind in self._refused:
            raise NotRecordable(self._refused[kind])
        known = self._recorded.get(kind)
        drafting = known or self._make(kind, settings)
        drafting.load(call, settings, contexts, hidden)
        if known is None:
            try:
                drafting.replay = self._recorder.record(drafting.work)
            except NotRecordable as obstacle:
                self._refused[kind] = obstacle.reason
                raise
            self._recorded[kind] = drafting
        trees = DraftTree(
            draft_sampling, *drafting.replay(), columns=in_columns(plan, draft_sampling)
        )
        # Trees of another plan in this step would overwrite these. A lone row must not keep the
        # strides of the buffer it was cut from, as graphs are made for strides too.
        kept = torch.contiguous_format
        return trees.mapped(lambda tensor: tensor[: len(requests)].clone(memory_format=kept))


class _Drafting:
    """Static buffers of one kind of draft, and the loop over them."""

    replay: Work

    def __init__(
        self,
        kind: _Kind,
        settings: WarpSettings,
        *,
        head: EagleHead,
        forward: HeadForward,
        draw: DrawPaths,
        max_context: int,
    ) -> None:
        plan, config, batch = kind.plan, head.config, kind.requests
        pool, device = forward.attention.pool, forward.attention.pool.keys.device
        self._kind = kind
        self._head = head
        self._forward = forward
        self._draw = draw
        self._rows = frontier_rows(plan, kind.draft_sampling)
        self._scratch_slot = pool.num_slots - 1
        self._attention: BranchAttention | None = None
        if plan.depth > 1:
            shape = BranchShape(
                requests=batch,
                branches=self._rows,
                levels=plan.depth - 1,
                max_context=max_context,
                heads=config.num_heads,
                scale=config.head_dim**-0.5,
            )
            self._attention = forward.attention.branches(shape)
        with torch.inference_mode(mode=False):

            def room(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
                return torch.zeros(shape, dtype=dtype, device=device)

            self._roots = room(batch)
            self._contexts = room(batch)
            self._hidden = room(batch, config.hidden_size, dtype=pool.keys.dtype)
            self._uniforms = room(batch, plan.paths, plan.depth, dtype=torch.float64)
            limits = frozenset(() if kind.limit is None else (kind.limit,))
            top_k = None if kind.limit is None else settings.top_k
            own = replace(settings, top_k=top_k, limits=limits, tempered=True)
            self._settings = own.mapped(lambda column: torch.zeros_like(column, device=device))

    def load(
        self, call: DraftCall, settings: WarpSettings, contexts: Sequence[Tensor], hidden: Tensor
    ) -> None:
        """Copy a step's numbers into the buffers, and plan; NotRecordable for too many keys."""
        kind, real = self._kind, len(call.requests)
        missing = kind.requests - real  # with one key each
        contexts = [*contexts, *[torch.tensor([self._scratch_slot])] * missing]
        lengths = [len(context) for context in contexts]
        attention = self._attention
        if attention is not None:
            slots = torch.full(attention.slots.shape, self._scratch_slot)
            most = attention.most_keys
            if most is not None and sum(lengths) + slots.numel() > most:
                raise NotRecordable("too many keys")
            for row, own in zip(slots.flatten(1)[:real], call.tree_slots, strict=True):
                row.copy_(own[: len(row)])
            attention.plan(contexts, slots)
        tokens = [request.token_ids[-1] for request in call.requests]
        _fill(self._roots, torch.tensor([*tokens, *[0] * missing]))
        _fill(self._contexts, torch.tensor(lengths))
        self._hidden[:real].copy_(hidden)
        if kind.draft_sampling is not DraftSampling.FIXED:
            for name, buffer in self._settings.columns.items():
                _fill(buffer, settings.columns[name])
            _fill(self._uniforms[:real], draft_numbers(call.requests, kind.plan))

    def work(self) -> tuple[Tensor, ...]:
        """Draft, and return the tensors of the trees in order."""
        kind, head, rows = self._kind, self._head, self._rows
        growth = TreeGrowth(
            kind.plan, kind.draft_sampling, self._roots, self._uniforms, draw=self._draw
        )
        rotations = self._rotations()
        frontier = growth.grow(self._probs(head.logits(self._hidden), 1))
        hidden = self._hidden.unsqueeze(1)
        chains: Tensor | None = None
        for level in range(kind.plan.depth - 1):
            if frontier.parents is not None:
                hidden = hidden.gather(
                    1, frontier.parents.unsqueeze(2).expand(-1, -1, hidden.shape[2])
                )
            elif level == 0:  # all rows continue the root
                hidden = hidden.repeat_interleave(rows, dim=1)
            chains = self._chains(chains, frontier)
            level_rows = Rows(frontier.token_ids.flatten(), rotations[level])
            drafted = self._step(level, level_rows, hidden, chains)
            hidden = drafted.hidden.view(kind.requests, rows, -1)
            frontier = growth.grow(self._probs(drafted.logits, rows))
        return tuple(growth.finish().tensors.values())

    def _chains(self, above: Tensor | None, frontier: Frontier) -> Tensor | None:
        """Return the branches of each row's path; None if each continues that of its own number."""
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
        return [Rotation(*own) for own in zip(every.cos, every.sin, strict=True)]

    def _step(self, level: int, rows: Rows, hidden: Tensor, chains: Tensor | None) -> Drafted:
        attention = self._attention
        assert attention is not None  # this level exists

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention.attend(level, q, k, v, chains)

        return self._forward.level(rows, hidden.flatten(0, 1), attend)

    def _probs(self, logits: Tensor, rows: int) -> DraftProbs:
        """Return the distributions of ``rows`` rows per request."""
        kind, ids = self._kind, self._head.draft_to_target
        width = support(kind.plan, kind.draft_sampling, len(ids))
        if kind.draft_sampling is DraftSampling.FIXED:
            return log_probs(logits, width=width, draft_to_target=ids)
        settings = self._settings.mapped(lambda column: column.repeat_interleave(rows))
        return draft_probs(logits, settings, width=width, draft_to_target=ids)


def _fill(buffer: Tensor, values: Tensor) -> None:
    """Copy host numbers into a static buffer, without waiting for the device."""
    buffer.copy_(send(values, buffer.device))
