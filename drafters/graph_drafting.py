"""An EAGLE head's whole draft loop, recorded once and replayed: all its launches are one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from typing import Self

import torch
from torch import Tensor

from eaglegbv.attention.base import BranchAttention, BranchShape
from eaglegbv.config import DraftSampling, Plan
from eaglegbv.cuda_graphs import MAX_ROWS, Bucket, NotRecordable, Recorder, Recordings
from eaglegbv.devices import send
from eaglegbv.drafters.draft_probs import DraftProbs, draft_params, draft_probs, log_probs, support
from eaglegbv.drafters.drawn_paths import DrawnPaths, takes
from eaglegbv.drafters.eagle_model import Drafted, EagleHead, HeadForward, Rotation, Rows
from eaglegbv.drafters.host_drafting import DraftCall, draft_numbers
from eaglegbv.drafters.tree_growth import Frontier, LevelTable, TreeGrowth, in_columns, level_table
from eaglegbv.request import Request
from eaglegbv.rng import RequestRng
from eaglegbv.sampling import SamplingParams, WarpSettings
from eaglegbv.tree import DraftTree
from eaglegbv.utils import power_of_two

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
        largest = max((k for k in settings.limits if k < candidates), default=None)
        limit = None if largest is None else min(power_of_two(largest), candidates - 1)
        used = frozenset(settings.tensors) - ({"top_k"} if limit is None else set())
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
    ) -> None:
        """Begin with nothing recorded.

        The last slot of the pool of ``forward`` is nobody's; texts have ``max_context`` positions
        at most.
        """
        self._recordings = Recordings[_Kind, _Drafting]("drafts", recorder, _Drafting.work)
        self.counts = self._recordings.counts
        self._head = head
        self._forward = forward
        self._max_context = max_context

    def draft(
        self, call: DraftCall, contexts: Sequence[Tensor], hidden: Tensor
    ) -> DraftTree | None:
        """Draft one tree per request; return None where that has to be done on the host.

        ``contexts`` are for each request the slots ``[rows]`` int64 of its true rows, ``hidden``
        ``[requests, hidden]`` is the head's output at the last of them.
        """
        with self._recordings.counting():
            return self._replay(call, contexts, hidden)
        return None

    def record(
        self, requests: int, plan: Plan, draft_sampling: DraftSampling, params: SamplingParams
    ) -> None:
        """Record now the drafts of up to ``requests`` requests with such settings."""
        counts = self.counts.copy()
        slot = torch.tensor([self._forward.attention.pool.num_slots - 1])
        size, like = self._head.config.hidden_size, self._head.embedding
        for count in Bucket.sizes(requests):
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
        padded = power_of_two(len(requests))
        if call.ruled:
            raise NotRecordable("rules")
        table = self._table(plan, draft_sampling)
        if padded * table.most_rows > MAX_ROWS:
            raise NotRecordable("too many rows")
        params = [draft_params(request.params, plan) for request in requests]
        params += params[-1:] * (padded - len(requests))
        settings = WarpSettings.of(params, [1] * padded)
        kind = _Kind.of(plan, draft_sampling, settings, len(self._head.draft_to_target))
        replay = self._recordings.loaded(
            kind,
            partial(_Drafting, settings, self._head, self._forward, table, self._max_context),
            methodcaller("load", call, settings, contexts, hidden),
        )
        trees = DraftTree(draft_sampling, *replay(), columns=in_columns(plan, draft_sampling))
        # Trees of another plan in this step would overwrite these. Kernels judge contiguous ones.
        kept = torch.contiguous_format
        return trees.mapped(lambda tensor: tensor[: len(requests)].clone(memory_format=kept))

    def _table(self, plan: Plan, draft_sampling: DraftSampling) -> LevelTable:
        width = support(plan, draft_sampling, len(self._head.draft_to_target))
        return level_table(plan, draft_sampling, self._head.draft_to_target.device, width=width)


class _Drafting:
    """Static buffers of one kind of draft, and the loop over them."""

    def __init__(
        self,
        settings: WarpSettings,
        head: EagleHead,
        forward: HeadForward,
        table: LevelTable,
        max_context: int,
        kind: _Kind,
    ) -> None:
        plan, config, batch = kind.plan, head.config, kind.requests
        pool, device = forward.attention.pool, forward.attention.pool.keys.device
        self._kind = kind
        self._head = head
        self._forward = forward
        self._table = table
        self._rows = table.most_rows
        self._width = support(plan, kind.draft_sampling, len(head.draft_to_target))
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
            padded = replace(settings, top_k=top_k, limits=limits, tempered=True)
            self._settings = padded.mapped(lambda column: torch.zeros_like(column, device=device))

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
                raise NotRecordable("too many keys", lasting=False)
            for levels, tree_slots in zip(slots[:real], call.tree_slots, strict=True):
                self._take(levels, tree_slots)
            attention.plan(contexts, slots)
        tokens = [request.token_ids[-1] for request in call.requests]
        _fill(self._roots, torch.tensor([*tokens, *[0] * missing]))
        _fill(self._contexts, torch.tensor(lengths))
        self._hidden[:real].copy_(hidden)
        if kind.draft_sampling is not DraftSampling.FIXED:
            for name, buffer in self._settings.tensors.items():
                _fill(buffer, settings.tensors[name])
            _fill(self._uniforms[:real], draft_numbers(call.requests, kind.plan))

    def _take(self, levels: Tensor, slots: Tensor) -> None:
        """Write the slots of a request's rows to ``levels`` ``[levels, rows]``."""
        first = 0
        for row, level in zip(levels, self._table.levels, strict=False):
            end = first + level.next_rows
            row[: level.next_rows] = slots[first:end]
            first = end

    def work(self) -> tuple[Tensor, ...]:
        """Draft, and return the tensors of the trees in order."""
        kind = self._kind
        if takes(kind.plan, kind.draft_sampling, self._width, self._roots.device):
            return self._drawn_by_kernels()
        fixed = kind.draft_sampling is DraftSampling.FIXED
        growth = TreeGrowth(self._table, self._roots, None if fixed else self._uniforms)
        rotations = self._rotations()
        frontier = growth.grow(self._probs(self._head.logits(self._hidden), 1))
        hidden = self._hidden.unsqueeze(1)
        chains: Tensor | None = None
        for level, rotation in enumerate(rotations):
            rows = frontier.token_ids.shape[1]
            chains = self._chains(level, chains, hidden.shape[1], frontier)
            if frontier.parents is not None:
                index = frontier.parents.unsqueeze(2).expand(-1, -1, hidden.shape[2])
                hidden = hidden.gather(1, index)
            elif level == 0:  # all rows continue the root
                hidden = hidden.repeat_interleave(rows, dim=1)
            tokens = _padded(frontier.token_ids, self._rows)
            drafted = self._step(
                level, Rows(tokens.flatten(), rotation), _padded(hidden, self._rows), chains
            )
            hidden = drafted.hidden.view(kind.requests, self._rows, -1)[:, :rows]
            logits = drafted.logits.view(kind.requests, self._rows, -1)[:, :rows]
            frontier = growth.grow(self._probs(logits.flatten(0, 1), rows))
        return tuple(growth.finish().tensors.values())

    def _drawn_by_kernels(self) -> tuple[Tensor, ...]:
        plan, head = self._kind.plan, self._head
        paths = DrawnPaths(
            plan,
            self._roots,
            self._uniforms,
            width=self._width,
            draft_to_target=head.draft_to_target,
        )
        rotations = self._rotations()
        tokens = paths.grow(head.logits(self._hidden), self._settings)
        settings = self._settings.mapped(lambda column: column.repeat_interleave(plan.paths))
        hidden = self._hidden.repeat_interleave(plan.paths, dim=0)
        for level, rotation in enumerate(rotations):
            rows = Rows(tokens.flatten(), rotation)
            drafted = self._step(level, rows, hidden.unflatten(0, tokens.shape), None)
            hidden = drafted.hidden
            tokens = paths.grow(drafted.logits, settings)
        return tuple(paths.finish().tensors.values())

    def _chains(
        self, level: int, above: Tensor | None, rows_above: int, frontier: Frontier
    ) -> Tensor | None:
        """Return the branches of each row's path; None if each continues that of its own number.

        ``above`` are those of the level before, which has ``rows_above`` rows.
        """
        if level == 0 or (above is None and frontier.parents is None):
            return None
        batch, rows = frontier.token_ids.shape
        device = frontier.token_ids.device
        if above is None:
            every = torch.arange(rows_above, device=device)
            above = every.view(1, -1, 1).expand(batch, -1, level)
        if frontier.parents is not None:
            above = above.gather(1, frontier.parents.unsqueeze(2).expand(-1, -1, level))
        else:
            above = above[:, :rows]
        branches = torch.arange(rows, device=device).expand(batch, -1).unsqueeze(2)
        return _padded(torch.cat((above, branches), dim=2), self._rows)

    def _rotations(self) -> list[Rotation]:
        """Return the angles of each level's rows, in as many operations as for one level."""
        count, device = self._kind.plan.depth - 1, self._contexts.device
        levels = torch.arange(count, device=device).view(-1, 1, 1)
        positions = (self._contexts.unsqueeze(1) + levels).expand(-1, -1, self._rows)
        every: Rotation = self._head.rotary(positions.flatten(1), self._hidden.dtype)
        return [Rotation(*of_level) for of_level in zip(every.cos, every.sin, strict=True)]

    def _step(self, level: int, rows: Rows, hidden: Tensor, chains: Tensor | None) -> Drafted:
        attention = self._attention
        assert attention is not None  # this level exists

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention.attend(level, q, k, v, chains)

        return self._forward.level(rows, hidden.flatten(0, 1), attend)

    def _probs(self, logits: Tensor, rows: int) -> DraftProbs:
        """Return the distributions of ``rows`` rows per request."""
        kind, ids = self._kind, self._head.draft_to_target
        width = self._width
        if kind.draft_sampling is DraftSampling.FIXED:
            return log_probs(logits, width=width, draft_to_target=ids)
        settings = self._settings.mapped(lambda column: column.repeat_interleave(rows))
        return draft_probs(logits, settings, width=width, draft_to_target=ids)


def _padded(rows: Tensor, most: int) -> Tensor:
    """Return ``[requests, most, ...]``: as many rows, the missing ones 0."""
    missing = most - rows.shape[1]
    if not missing:
        return rows
    return torch.cat((rows, rows.new_zeros((len(rows), missing, *rows.shape[2:]))), dim=1)


def _fill(buffer: Tensor, values: Tensor) -> None:
    """Copy host numbers into a static buffer, without waiting for the device."""
    buffer.copy_(send(values, buffer.device))
