"""Block drafters: a head that gives all levels of a draft in one forward (DFlash, DSpark, DFlash2).

Levels differ in the token before alone, so any number of paths, and trees of any widths, are drawn
from exactly known distributions without a further forward; see
:mod:`eaglegbv.drafters.parallel_model`.

The head's context entries are the keys and values of committed tokens, in all its layers. Those of
position t depend on the target's feature f_t alone, share the number of its KV slot, and are final
once they are written. The rows of a block are written to the slots of the step's tree, which are
anybody's after it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from eaglegbv.attention.base import Attend as AttendBatch
from eaglegbv.attention.base import (
    AttentionCall,
    PackedBatch,
    PagedAttention,
    Segment,
    joined,
    pack,
)
from eaglegbv.attention.static import StaticBatch
from eaglegbv.config import DraftSampling, GraphMode, Plan
from eaglegbv.cuda_graphs import (
    MAX_ROWS,
    Bucket,
    NotRecordable,
    Recorder,
    make_recorder,
)
from eaglegbv.devices import send
from eaglegbv.drafters.base import ReplayingDrafter, own_snapshots
from eaglegbv.drafters.draft_probs import DraftProbs, ProbsSettings, replayed_probs
from eaglegbv.drafters.features import FeatureDrafter, HeadFiles
from eaglegbv.drafters.formats.parallel import is_parallel
from eaglegbv.drafters.formats.read import read_weights
from eaglegbv.drafters.graph_drafting import DeviceDrafting
from eaglegbv.drafters.host_drafting import DraftCall, NewRows, draft_trees
from eaglegbv.drafters.parallel_model import Levels, ParallelHead
from eaglegbv.drafters.tree_growth import Frontier, LevelTable
from eaglegbv.request import DraftSnapshot, DraftState, Request
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftTree


@dataclass(frozen=True, slots=True)
class LevelSnapshot(DraftSnapshot):
    """A step's block, and a level of it."""

    levels: Levels  # what the block says
    level: int  # from 0 on
    token: int  # the token before that level
    settings: ProbsSettings  # the step's draft settings


@dataclass(slots=True)
class BlockState(DraftState):
    """The block of a request's last tree, where later steps replay it."""

    levels: Levels | None = None
    root: int = 0  # the tree's root, the token before its first level


class Root(NamedTuple):
    """Where a request's block begins."""

    context: Tensor  # [entries] int64, slots of its context entries
    anchor: int  # its last token
    slots: Tensor  # [rows or more] int64, slots for the block's rows


class BlockForward:
    """Forwards of a head over a pool with as many layers.

    Attributes:
        head: The head.
        attention: Paged attention over the pool.
        kinds: Whether rows see a block causally, as layers differ in that.
    """

    def __init__(self, head: ParallelHead, attention: PagedAttention) -> None:
        """Take a head on its final device and in its final dtype, and make its products ready."""
        head.prepare_products()
        self.head = head
        self.attention = attention
        sights = head.config.sights
        self.kinds = {sight.causal for sight in sights}
        scale = head.config.head_dim**-0.5
        self._calls = [AttentionCall(n, scale, sight.window) for n, sight in enumerate(sights)]

    def rows(self, depth: int) -> int:
        """Return how many rows a block of so many levels has."""
        return depth + self.head.config.first_row

    def write(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write the context entries of ``[rows]`` committed tokens; ``features`` ``[rows, F]``."""
        keys, values = self.head.context(features, positions)
        for layer in range(len(self._calls)):
            self.attention.pool.write(layer, slots, keys[:, layer], values[:, layer])

    def segments(self, roots: Sequence[Root], rows: int, *, causal: bool) -> list[Segment]:
        """Return the blocks at ``roots``, as layers of a kind see them."""
        masks = [self.head.config.mask_token_id] * (rows - 1)
        visible = None if causal else torch.ones((rows, rows), dtype=torch.bool)
        segments = []
        for root in roots:
            tokens = torch.tensor([root.anchor, *masks])
            segment = Segment.causal(tokens, root.context, root.slots[:rows])
            segments.append(replace(segment, visible=visible))
        return segments

    def run(self, batch: PackedBatch, attends: Mapping[bool, AttendBatch], rows: int) -> Tensor:
        """Run a batch of blocks, and return what they say, ``[blocks, levels, hidden]``.

        ``attends`` attend over it by kind of layer.
        """
        layers = zip(self.head.config.sights, self._calls, strict=True)
        of_layers = [partial(attends[sight.causal], call) for sight, call in layers]
        anchors = batch.token_ids.view(-1, rows)[:, 0]
        return self.head.block(anchors, rows, batch.positions, of_layers)

    def run_once(self, roots: Sequence[Root], rows: int) -> Tensor:
        """Run the blocks at ``roots``; see :meth:`run`."""
        device = self.head.embedding.device
        batches = {
            causal: pack(self.segments(roots, rows, causal=causal), device) for causal in self.kinds
        }
        attends = {
            causal: partial(self.attention.attend, batch=batch) for causal, batch in batches.items()
        }
        return self.run(next(iter(batches.values())), attends, rows)


class ParallelDrafter(FeatureDrafter, ReplayingDrafter):
    """Drafts with a block drafter's head.

    Attributes:
        head: The head.
    """

    at_once: ClassVar[bool] = True

    def __init__(
        self,
        head: ParallelHead,
        attention: PagedAttention,
        *,
        graphs: GraphMode | Recorder = GraphMode.OFF,
        max_context: int | None = None,
        recorder: Recorder | None = None,
        native: bool = True,
    ) -> None:
        """Wrap a head; arguments are those of :class:`eaglegbv.drafters.eagle.EagleDrafter`.

        The pool of ``attention`` has as many layers as the head. The ``native`` library knows no
        such head.
        """
        del native
        pool = attention.pool
        recorder = make_recorder(
            graphs, cuda=pool.keys.is_cuda, recordable=attention.recordable, shared=recorder
        )
        self.head = head
        self.max_depth = head.config.levels
        self._rounds = head.embedding.dtype.itemsize < torch.float32.itemsize
        self._forward = BlockForward(head, attention)
        self._on_device: DeviceDrafting | None = None
        if recorder is not None:
            most = pool.num_slots if max_context is None else max_context
            levels = partial(BlockLevels, self._forward, self._roots, most)
            self._on_device = DeviceDrafting(levels, head.draft_to_target, recorder)
            self.graph_counts = self._on_device.counts

    def record(
        self, requests: int, plan: Plan, draft_sampling: DraftSampling, params: SamplingParams
    ) -> None:
        """See :meth:`Drafter.record`."""
        if self._on_device is not None:
            self._on_device.record(requests, plan, draft_sampling, params)

    def forget(self, request: Request) -> None:
        """See :meth:`Drafter.forget`."""
        super().forget(request)
        request.draft_states.pop(BlockState, None)

    @torch.inference_mode()
    def catch_up(self, requests: Sequence[Request]) -> None:
        """Write the context entries of the pending features of ``requests``, all at once."""
        features: list[Tensor] = []
        positions: list[Tensor] = []
        slots: list[Tensor] = []
        for request in requests:
            state = self._state(request)
            features += state.pending
            positions.append(torch.arange(state.context, request.context) - request.skipped)
            slots.append(request.slots[state.context :])
            state.context, state.pending = request.context, []
        if features:
            places = [joined(part, features[0].device) for part in (positions, slots)]
            self._forward.write(torch.cat(features), *places)

    @torch.inference_mode()
    def draft(self, call: DraftCall) -> DraftTree:
        """Propose one tree per request; see :meth:`Drafter.draft`."""
        self.catch_up(call.requests)
        if self._on_device is not None:
            tree = self._on_device.draft(call)
            if tree is not None:
                return tree
        roots, alone = self._roots(call), call.requests[0].replayed and self._rounds
        hidden = self._forward.run_once(roots, self._forward.rows(call.plan.depth))
        levels = self.head.levels(hidden)
        if call.requests[0].replayed:
            for place, request in enumerate(call.requests):
                own = Levels(*(part[place].clone() for part in levels))
                request.draft_states[BlockState] = BlockState(own, roots[place].anchor)
        depth = 0

        def follow(rows: NewRows) -> Tensor:
            nonlocal depth
            depth += 1
            owners = torch.arange(len(rows.counts)).repeat_interleave(torch.tensor(rows.counts))
            return self._after(levels, owners, depth, rows.token_ids, alone=alone)

        anchors = torch.tensor([root.anchor for root in roots])
        logits = self._after(levels, torch.arange(len(roots)), 0, anchors, alone=alone)
        return draft_trees(call, self.head.draft_to_target, logits, follow)

    def _after(
        self, levels: Levels, owners: Tensor, level: int, tokens: Tensor, *, alone: bool
    ) -> Tensor:
        """Return the logits after ``tokens`` ``[rows]`` of these requests."""
        device = levels.hidden.device
        where, tokens = send(owners, device), send(tokens, device)
        # In half precision a row's numbers depend on what runs beside it.
        size = 1 if alone else len(tokens)
        rows = zip(
            *(part[where, level].split(size) for part in levels), tokens.split(size), strict=True
        )
        return torch.cat([self.head.after(Levels(*row[:2]), row[2]) for row in rows])

    def snapshot(self, request: Request) -> LevelSnapshot:
        """Remember the last tree's block; see :meth:`DraftReplay.snapshot`."""
        settings = ProbsSettings.of(request, self.head.config.draft_vocab_size)
        state = request.draft_state(BlockState, BlockState)
        if state.levels is None:
            raise RuntimeError(f"request {request.number} has drafted no tree that is replayed")
        return LevelSnapshot(state.levels, 0, state.root, settings)

    def advance(
        self,
        requests: Sequence[Request],
        snapshots: Sequence[DraftSnapshot],
        tokens: Tensor,
        slots: Tensor,
    ) -> list[DraftSnapshot]:
        """Go on to the next levels; see :meth:`DraftReplay.advance`."""
        del requests, slots
        pairs = zip(own_snapshots(snapshots, LevelSnapshot), tokens.tolist(), strict=True)
        return [replace(s, level=s.level + 1, token=token) for s, token in pairs]

    @torch.inference_mode()
    def probs_at(self, snapshots: Sequence[DraftSnapshot]) -> DraftProbs:
        """Return the distributions of the snapshots' steps; see :meth:`DraftReplay.probs_at`."""
        own = own_snapshots(snapshots, LevelSnapshot)
        rows = [Levels(*(part[s.level, None] for part in s.levels)) for s in own]
        tokens = torch.tensor([s.token for s in own], device=self.head.embedding.device)
        pairs = zip(rows, tokens.split(1), strict=True)
        logits = torch.cat([self.head.after(row, token) for row, token in pairs])
        return replayed_probs(logits, [s.settings for s in own], self.head.draft_to_target)

    def _roots(self, call: DraftCall) -> list[Root]:
        pairs = zip(call.requests, call.tree_slots, strict=True)
        return [
            Root(self._state(request).rows(request), request.token_ids[-1], slots)
            for request, slots in pairs
        ]


class BlockLevels:
    """Static buffers of a draft's size; see :class:`eaglegbv.drafters.graph_drafting.LevelDrafter`.

    The last slot of the pool of ``forward`` is nobody's: padding writes to it.
    """

    def __init__(
        self,
        forward: BlockForward,
        roots_of: Callable[[DraftCall], list[Root]],
        max_context: int,
        requests: int,
        table: LevelTable,
    ) -> None:
        self._forward = forward
        self._roots_of = roots_of
        self._requests = requests
        self._rows = forward.rows(table.plan.depth)
        # Padding is a block too, so that all rows are those of whole blocks.
        bucket = Bucket(requests, (requests + 1) * self._rows)
        if bucket.rows > MAX_ROWS:
            raise NotRecordable("too many rows")
        scratch = forward.attention.pool.num_slots - 1
        self._batches = {
            causal: StaticBatch(
                bucket, forward.attention, max_context=max_context, scratch_slot=scratch
            )
            for causal in forward.kinds
        }
        self._levels: Levels

    def load(self, call: DraftCall) -> None:
        """Copy a step's numbers, and plan attention; NotRecordable where they are replayed."""
        if any(request.replayed for request in call.requests):
            raise NotRecordable("replayed later", lasting=False)
        roots = self._roots_of(call)
        for causal, batch in self._batches.items():
            batch.load(self._forward.segments(roots, self._rows, causal=causal))

    def start(self) -> Tensor:
        """Run the blocks, and return what follows the roots."""
        attends = {causal: batch.attend for causal, batch in self._batches.items()}
        batch = next(iter(self._batches.values())).batch
        hidden = self._forward.run(batch, attends, self._rows)
        self._levels = self._forward.head.levels(hidden[: self._requests])
        anchors = batch.token_ids.view(-1, self._rows)[: self._requests, :1]
        return self._after(0, anchors)

    def step(self, depth: int, rows: Frontier) -> Tensor:
        """Return what the block says of the next level, after the rows' tokens."""
        return self._after(depth, rows.token_ids)

    def _after(self, level: int, tokens: Tensor) -> Tensor:
        """Return ``[requests * rows, draft_vocab]`` for ``tokens`` ``[requests, rows]``."""
        of_level = Levels(*(part[:, level : level + 1] for part in self._levels))
        return self._forward.head.after(of_level, tokens).flatten(0, 1)


class ParallelFiles(HeadFiles):
    """A block drafter's folder."""

    name = "a DFlash or DSpark head"
    drafter = ParallelDrafter
    head = ParallelHead

    @classmethod
    def recognise(cls, folder: Path, config: Mapping[str, Any]) -> bool:
        """Return whether the tensors are a block drafter's; see :func:`is_parallel`."""
        del config
        return is_parallel(read_weights(folder).tensors)
