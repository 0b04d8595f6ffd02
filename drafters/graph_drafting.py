"""A drafter's whole draft loop, recorded once and replayed: all its launches are one.

The drafter says how a level starts and steps (:class:`LevelDrafter`); trees are grown here. The
host loads a step's numbers, and takes the trees as they are: padded, on the device, without reading
them. One recording serves a plan, a draft sampling, a number of requests (padded to a power of
two), and a kind of warping.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from operator import methodcaller
from typing import Protocol, Self, TypeAlias

import torch
from torch import Tensor

from eaglegbv.config import DraftSampling, Plan
from eaglegbv.cuda_graphs import MAX_ROWS, Bucket, NotRecordable, Recorder, Recordings
from eaglegbv.devices import fill
from eaglegbv.drafters.draft_probs import (
    DraftProbs,
    draft_params,
    draft_probs,
    log_probs,
    support,
)
from eaglegbv.drafters.drawn_paths import DrawnPaths, takes
from eaglegbv.drafters.host_drafting import DraftCall, draft_numbers
from eaglegbv.drafters.tree_growth import Frontier, LevelTable, TreeGrowth, in_columns, level_table
from eaglegbv.sampling import SamplingParams, WarpSettings
from eaglegbv.tree import DraftTree
from eaglegbv.utils import power_of_two


class LevelDrafter(Protocol):
    """A drafter's part in recorded drafts of one size, over static buffers of its own.

    What :meth:`start` and :meth:`step` do is recorded: they read nothing on the host, and the sizes
    of what they compute depend on the size of the draft alone. A drafter that runs once a level
    continues its rows in ``step``; one that gives all levels in one forward runs it in ``start``.
    """

    def load(self, call: DraftCall) -> None:
        """Copy a step's numbers into the buffers.

        There may be fewer requests than the draft has room for, or none: the others are padding.
        Raises NotRecordable where the numbers do not fit.
        """

    def start(self) -> Tensor:
        """Return ``[requests, draft_vocab]``, the logits of what follows the roots."""

    def step(self, depth: int, rows: Frontier) -> Tensor:
        """Return ``[requests * rows, draft_vocab]``, the logits of what follows rows of a depth.

        The depth is 1 for children of the roots. A row continues its parent among the rows of the
        depth before, see :attr:`Frontier.parents`.
        """


MakeLevels: TypeAlias = Callable[[int, LevelTable], LevelDrafter]
"""Makes the buffers for drafts of so many requests, each with the levels of a table."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """The settings a recording is made for."""

    requests: int
    """Number of requests, padded."""
    plan: Plan
    draft_sampling: DraftSampling
    warping: frozenset[str] = frozenset()
    """The settings that any request uses."""
    limit: int | None = None
    """A bound on top-k limits: a power of two, or all candidates of a row but one; None where
    nothing is limited."""

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
    """Drafts by replayed recordings.

    Attributes:
        counts: Drafts by outcome: ``replayed``, or the reason why they grew on the host.
    """

    def __init__(self, make: MakeLevels, draft_to_target: Tensor, recorder: Recorder) -> None:
        """Begin with nothing recorded.

        ``draft_to_target`` ``[draft_vocab]`` int64 is the target's id of each draft token, on the
        device where drafts are made.
        """
        self._recordings = Recordings[_Kind, _Drafting]("drafts", recorder, _Drafting.work)
        self.counts = self._recordings.counts
        self._make = make
        self._draft_to_target = draft_to_target

    def draft(self, call: DraftCall) -> DraftTree | None:
        """Draft one tree per request; return None where that has to be done on the host."""
        with self._recordings.counting():
            return self._replay(call)
        return None

    def record(
        self, requests: int, plan: Plan, draft_sampling: DraftSampling, params: SamplingParams
    ) -> None:
        """Record now the drafts of up to ``requests`` requests with such settings."""
        nobody = DraftCall((), plan, draft_sampling, ())
        for count in Bucket.sizes(requests):
            with suppress(NotRecordable):
                self._loaded(nobody, [draft_params(params, plan)] * count)

    def _replay(self, call: DraftCall) -> DraftTree:
        """Draft one tree per request.

        Raises NotRecordable where sequences are too long, or as was found now or before.
        """
        if call.ruled:
            raise NotRecordable("rules")
        requests = call.requests
        params = [draft_params(request.params, call.plan) for request in requests]
        padded = power_of_two(len(requests))
        replay = self._loaded(call, params + params[-1:] * (padded - len(requests)))
        columns = in_columns(call.plan, call.draft_sampling)
        trees = DraftTree(call.draft_sampling, *replay(), columns=columns)
        # Trees of another plan in this step would overwrite these. Kernels judge contiguous ones.
        kept = torch.contiguous_format
        return trees.mapped(lambda tensor: tensor[: len(requests)].clone(memory_format=kept))

    def _loaded(
        self, call: DraftCall, params: list[SamplingParams]
    ) -> Callable[[], tuple[Tensor, ...]]:
        """Return what replays a draft of as many requests as there are ``params``."""
        draft_vocab = len(self._draft_to_target)
        width = support(call.plan, call.draft_sampling, draft_vocab)
        device = self._draft_to_target.device
        table = level_table(call.plan, call.draft_sampling, device, width=width)
        if len(params) * table.most_rows > MAX_ROWS:
            raise NotRecordable("too many rows")
        settings = WarpSettings.of(params, [1] * len(params))
        kind = _Kind.of(call.plan, call.draft_sampling, settings, draft_vocab)

        def make(kind: _Kind) -> _Drafting:
            levels = self._make(kind.requests, table)
            return _Drafting(kind, levels, table, settings, self._draft_to_target)

        return self._recordings.loaded(kind, make, methodcaller("load", call, settings))


class _Drafting:
    """Static buffers of one kind of draft, and the loop over them."""

    def __init__(
        self,
        kind: _Kind,
        levels: LevelDrafter,
        table: LevelTable,
        settings: WarpSettings,
        draft_to_target: Tensor,
    ) -> None:
        plan = kind.plan
        batch = kind.requests
        device = draft_to_target.device
        self._kind = kind
        self._levels = levels
        self._table = table
        self._ids = draft_to_target
        self._width = support(plan, kind.draft_sampling, len(draft_to_target))
        with torch.inference_mode(mode=False):
            self._roots = torch.zeros(batch, dtype=torch.int64, device=device)
            shape = (batch, plan.paths, plan.depth)
            self._uniforms = torch.zeros(shape, dtype=torch.float64, device=device)
            limits = frozenset(() if kind.limit is None else (kind.limit,))
            top_k = None if kind.limit is None else settings.top_k
            padded = replace(settings, top_k=top_k, limits=limits, tempered=True)
            self._settings = padded.mapped(lambda column: torch.zeros_like(column, device=device))

    def load(self, call: DraftCall, settings: WarpSettings) -> None:
        """Copy a step's numbers into the buffers; NotRecordable where they do not fit."""
        self._levels.load(call)
        real = len(call.requests)
        tokens = [request.token_ids[-1] for request in call.requests]
        fill(self._roots, torch.tensor([*tokens, *[0] * (self._kind.requests - real)]))
        if self._kind.draft_sampling is not DraftSampling.FIXED:
            for name, buffer in self._settings.tensors.items():
                fill(buffer, settings.tensors[name])
            if real:
                fill(self._uniforms[:real], draft_numbers(call.requests, self._kind.plan))

    def work(self) -> tuple[Tensor, ...]:
        """Draft, and return the tensors of the trees in order."""
        kind = self._kind
        device = self._roots.device
        if takes(kind.plan, kind.draft_sampling, self._width, device):
            return self._drawn_by_kernels()
        fixed = kind.draft_sampling is DraftSampling.FIXED
        growth = TreeGrowth(self._table, self._roots, None if fixed else self._uniforms)
        self._grow(lambda logits, rows: growth.grow(self._probs(logits, rows)))
        return tuple(growth.finish().tensors.values())

    def _drawn_by_kernels(self) -> tuple[Tensor, ...]:
        plan = self._kind.plan
        ids = self._ids
        paths = DrawnPaths(
            plan, self._roots, self._uniforms, width=self._width, draft_to_target=ids
        )
        settings = cache(self._settings_of)
        self._grow(lambda logits, rows: Frontier(paths.grow(logits, settings(rows))))
        return tuple(paths.finish().tensors.values())

    def _grow(self, grow: Callable[[Tensor, int], Frontier]) -> None:
        """Grow all levels; ``grow`` takes logits of rows, and their number in each request."""
        frontier = grow(self._levels.start(), 1)
        for depth in range(1, self._kind.plan.depth):
            logits = self._levels.step(depth, frontier)
            frontier = grow(logits, frontier.token_ids.shape[1])

    def _probs(self, logits: Tensor, rows: int) -> DraftProbs:
        """Return the distributions of ``rows`` rows per request."""
        width = self._width
        ids = self._ids
        if self._kind.draft_sampling is DraftSampling.FIXED:
            return log_probs(logits, width=width, draft_to_target=ids)
        return draft_probs(logits, self._settings_of(rows), width=width, draft_to_target=ids)

    def _settings_of(self, rows: int) -> WarpSettings:
        """Return the settings of ``rows`` rows per request."""
        if rows == 1:
            return self._settings
        return self._settings.mapped(lambda column: column.repeat_interleave(rows))
