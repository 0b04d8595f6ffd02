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
from typing import Any, ClassVar

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
from eaglegbv.cuda_graphs import MAX_ROWS, Bucket, NotRecordable
from eaglegbv.devices import send
from eaglegbv.drafters.base import ReplayingDrafter, own_snapshots
from eaglegbv.drafters.checkpoint import is_block_head
from eaglegbv.drafters.draft_probs import DraftProbs, ProbsSettings, replayed_probs
from eaglegbv.drafters.eagle import FeatureDrafter, HeadFiles
from eaglegbv.drafters.host_drafting import DraftCall, NewRows, draft_trees
from eaglegbv.drafters.parallel_model import Levels, ParallelHead
from eaglegbv.drafters.tree_growth import Frontier, LevelTable
from eaglegbv.request import DraftSnapshot, Request
from eaglegbv.tree import DraftTree


@dataclass(frozen=True, slots=True)
class LevelSnapshot(DraftSnapshot):
    """A step's block, and a level of it."""

    hidden: Tensor  # [levels, hidden], the head's output
    level: int  # from 0 on
    token: int  # the token before that level
    settings: ProbsSettings  # the step's draft settings


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
        self._sights = head.config.sights
        self.kinds = {sight.causal for sight in self._sights}

    def rows(self, depth: int) -> int:
        """Return how many rows a block of so many levels has."""
        return depth + self.head.config.first_row

    def write(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write the context entries of ``[rows]`` committed tokens; ``features`` ``[rows, F]``."""
        keys, values = self.head.context(features, positions)
        for layer in range(len(self._sights)):
            self.attention.pool.write(layer, slots, keys[:, layer], values[:, layer])

    def seen(self, blocks: Sequence[Segment], *, causal: bool) -> Sequence[Segment]:
        """Return ``blocks``, each row seeing those before it, as layers of a kind see them."""
        if causal:
            return blocks
        return [
            replace(block, visible=torch.ones((block.num_new,) * 2, dtype=torch.bool))
            for block in blocks
        ]

    def run(self, batch: PackedBatch, attends: Mapping[bool, AttendBatch], rows: int) -> Tensor:
        """Run a batch of blocks, and return what they say, ``[blocks, levels, hidden]``.

        ``attends`` attend over it by kind of layer.
        """
        scale = self.head.config.head_dim**-0.5

        def attend_in(layer: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
            sight = self._sights[layer]
            call = AttentionCall(layer, scale, sight.window)

            def attend(*parts: Tensor) -> Tensor:
                packed = attends[sight.causal](call, *(part.flatten(0, 1) for part in parts))
                attended: Tensor = packed.unflatten(0, (-1, rows))
                return attended

            return attend

        layers = [attend_in(layer) for layer in range(len(self._sights))]
        token_ids, positions = (part.view(-1, rows) for part in (batch.token_ids, batch.positions))
        return self.head.block(token_ids, positions, layers)

    def run_once(self, blocks: Sequence[Segment]) -> Tensor:
        """Run ``blocks``; see :meth:`run`."""
        device = self.head.embedding.device
        attends: dict[bool, AttendBatch] = {}
        for causal in self.kinds:
            batch = pack(self.seen(blocks, causal=causal), device)
            attends[causal] = partial(self.attention.attend, batch=batch)
        return self.run(batch, attends, blocks[0].num_new)


class ParallelDrafter(FeatureDrafter, ReplayingDrafter):
    """Drafts with a block drafter's head.

    Attributes:
        head: The head.
    """

    at_once: ClassVar[bool] = True

    head: ParallelHead

    def __init__(
        self,
        head: ParallelHead,
        attention: PagedAttention,
        **how: Any,  # noqa: ANN401  further arguments of FeatureDrafter
    ) -> None:
        """Wrap a head; see :class:`FeatureDrafter`. The native library knows no such head."""
        super().__init__(head, attention, **how)
        self.max_depth = head.config.levels
        self._forward = BlockForward(head, attention)

    def _make_levels(self, requests: int, table: LevelTable) -> "BlockLevels":
        """See :meth:`FeatureDrafter._make_levels`."""
        return BlockLevels(self._forward, self._blocks, self._max_context, requests, table)

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
            state.context = request.context
            state.pending = []
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
        blocks = self._blocks(call)
        hidden = self._forward.run_once(blocks)
        levels = self.head.levels(hidden)
        replayed = call.requests[0].replayed
        depth = 0
        if replayed:
            for request, block in zip(call.requests, hidden.clone(), strict=True):
                self._state(request).hidden = block

        def after(owners: Tensor, tokens: Tensor) -> Tensor:
            at = send(owners, hidden.device)
            tokens = send(tokens, hidden.device)
            if replayed:
                return self._after_each(hidden[at, depth], tokens)
            return self.head.after(Levels(*(part[at, depth] for part in levels)), tokens)

        def follow(rows: NewRows) -> Tensor:
            nonlocal depth
            depth += 1
            counts = torch.tensor(rows.counts)
            return after(torch.repeat_interleave(counts), rows.token_ids)

        anchors = torch.stack([block.token_ids[0] for block in blocks])
        logits = after(torch.arange(len(blocks)), anchors)
        return draft_trees(call, self.head.draft_to_target, logits, follow)

    def _after_each(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits after rows ``[rows, hidden]``, found again to the last bit.

        A row's numbers depend on what runs beside it.
        """
        pairs = zip(hidden.split(1), tokens.split(1), strict=True)
        return torch.cat([self.head.after(self.head.levels(row), token) for row, token in pairs])

    def snapshot(self, request: Request) -> LevelSnapshot:
        """Remember the last tree's block; see :meth:`DraftReplay.snapshot`."""
        settings = ProbsSettings.of(request, self.head.config.draft_vocab_size)
        state = self._state(request)
        if state.hidden is None:
            raise RuntimeError(f"request {request.number} has drafted no tree that is replayed")
        root = next(iter(request.tokens_from(state.context)))
        return LevelSnapshot(state.hidden, 0, root, settings)

    def advance(
        self,
        requests: Sequence[Request],  # noqa: ARG002
        snapshots: Sequence[DraftSnapshot],
        tokens: Tensor,
        slots: Tensor,  # noqa: ARG002
    ) -> list[DraftSnapshot]:
        """Go on to the next levels; see :meth:`DraftReplay.advance`."""
        pairs = zip(own_snapshots(snapshots, LevelSnapshot), tokens.tolist(), strict=True)
        return [replace(s, level=s.level + 1, token=token) for s, token in pairs]

    @torch.inference_mode()
    def probs_at(self, snapshots: Sequence[DraftSnapshot]) -> DraftProbs:
        """Return the distributions of the snapshots' steps; see :meth:`DraftReplay.probs_at`."""
        levels = own_snapshots(snapshots, LevelSnapshot)
        hidden = torch.stack([level.hidden[level.level] for level in levels])
        tokens = torch.tensor([level.token for level in levels], device=hidden.device)
        logits = self._after_each(hidden, tokens)
        return replayed_probs(logits, [s.settings for s in levels], self.head.draft_to_target)

    def _blocks(self, call: DraftCall) -> list[Segment]:
        """Return the requests' blocks: the last token and mask tokens, in the trees' slots."""
        rows = self._forward.rows(call.plan.depth)
        masks = [self.head.config.mask_token_id] * (rows - 1)
        blocks = []
        for request, slots in zip(call.requests, call.tree_slots, strict=True):
            tokens = torch.tensor([request.token_ids[-1], *masks])
            context = self._state(request).rows(request)
            blocks.append(Segment.causal(tokens, context, slots[:rows]))
        return blocks


class BlockLevels:
    """Static buffers of a draft's size; see :class:`eaglegbv.drafters.graph_drafting.LevelDrafter`.

    The last slot of the pool of ``forward`` is nobody's: padding writes to it.
    """

    def __init__(
        self,
        forward: BlockForward,
        blocks_of: Callable[[DraftCall], list[Segment]],
        max_context: int,
        requests: int,
        table: LevelTable,
    ) -> None:
        self._forward = forward
        self._blocks_of = blocks_of
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
        blocks = self._blocks_of(call)
        for causal, batch in self._batches.items():
            batch.load(self._forward.seen(blocks, causal=causal))

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

    @classmethod
    def recognise(cls, folder: Path, config: Mapping[str, Any]) -> bool:
        """Return whether the tensors are a block drafter's; see :func:`is_block_head`."""
        return is_block_head(folder, config)
