"""The EAGLE drafter: a one-layer head that continues the target's features.

Alignment (EAGLE, arXiv 2401.15077, section 3.1): the head's row at position t reads the target's
feature f_t and the *next* token x_{t+1}, and predicts x_{t+2}. With x_0 ... x_c known and features
f_0 ... f_{c-1}, the root of the tree is x_c:

    position   0    1   ...  c-1 |   c        c+1          true rows | rows of the draft
    feature   f_0  f_1  ... f_c-1|  h_c-1     h_c          (h: the head's own output)
    token     x_1  x_2  ... x_c  |  node at   node at
                            root |  depth 1   depth 2
    predicts                depth 1 depth 2   depth 3

Row t of the head and row t of the target share a KV slot number, so that what the target commits
and frees, the head commits and frees too. Rows on drafted features are scratch: after a commit the
same positions are run again on true features.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eaglegbv.attention.base import PagedAttention, Segment, pack
from eaglegbv.config import Plan
from eaglegbv.drafters.base import RecallingDrafter
from eaglegbv.drafters.draft_law import DraftLaws, draft_laws, log_laws
from eaglegbv.drafters.eagle_head import EagleHead
from eaglegbv.drafters.sampled_trees import (
    GreedyTree,
    HubTree,
    IidTree,
    SampledTree,
    WorTree,
)
from eaglegbv.drafters.tree_builder import BestFirstTree, GrowingTree, stack_trees
from eaglegbv.params import SamplingParams
from eaglegbv.request import DraftSnapshot, DraftState, Request
from eaglegbv.tree import DraftTree, Law
from eaglegbv.uniforms import Purpose
from eaglegbv.warp import WarpSettings

_SAMPLED_TREES: Mapping[Law, type[SampledTree]] = MappingProxyType(
    {Law.IID: IidTree, Law.WOR: WorTree, Law.GREEDY: GreedyTree, Law.HUB: HubTree}
)


@dataclass(slots=True)
class EagleState(DraftState):
    """The head's memory of one request.

    Attributes:
        context: Positions run on true features so far.
        pending: ``[tokens, feature_size]``, true features of the positions that follow, not run
            yet; None where there are none.
        hidden: ``[hidden]``, the head's output at the last true position; the root's children are
            drawn from its logits.
    """

    context: int = 0
    pending: Tensor | None = None
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class EagleSnapshot(DraftSnapshot):
    """A step's root and the tokens that the head has gone on by since, on its own features.

    Attributes:
        context: Positions below the root, which were run on true features and still are.
        rows: ``[tokens]`` int64, KV slots of the head's rows since.
        hidden: ``[hidden]``, the head's output at the last row.
        params: The step's draft settings.
        width: The step's support.
    """

    context: int
    rows: Tensor
    hidden: Tensor
    params: SamplingParams
    width: int


class EagleDrafter(RecallingDrafter):
    """Drafts with an EAGLE-1 or EAGLE-3 head."""

    laws: ClassVar[frozenset[Law]] = frozenset({*_SAMPLED_TREES, Law.FIXED})

    def __init__(self, head: EagleHead, attention: PagedAttention) -> None:
        """Wrap a head.

        Args:
            head: The head, sharing the target's embedding.
            attention: Paged attention over a one-layer pool, whose slots are numbered like the
                target's.
        """
        self.head = head
        self._attention = attention
        self._scale = head.config.head_dim**-0.5

    def observe(self, request: Request, features: Tensor) -> None:
        """Take true features; see :meth:`Drafter.observe`."""
        state = self._state(request)
        waiting = state.pending
        state.pending = features if waiting is None else torch.cat((waiting, features))

    def forget(self, request: Request) -> None:
        """Drop the request's memory; its KV slots are the engine's to free."""
        request.draft_state = None

    @torch.inference_mode()
    def catch_up(self, requests: Sequence[Request]) -> None:
        """Run the pending true features of ``requests`` through the head, in one forward."""
        behind = [(r, s) for r in requests if (s := self._state(r)).pending is not None]
        if not behind:
            return
        segments = [self._true_segment(request, state) for request, state in behind]
        features = torch.cat([s.pending for _, s in behind if s.pending is not None])
        hidden = self._run(segments, self.head.fuse(features))
        ends = np.cumsum([len(segment.token_ids) for segment in segments]) - 1
        for (request, state), end in zip(behind, ends.tolist(), strict=True):
            state.context = request.context
            state.pending = None
            state.hidden = hidden[end]

    @torch.inference_mode()
    def draft(
        self, requests: Sequence[Request], plan: Plan, law: Law, tree_slots: Sequence[Tensor]
    ) -> DraftTree:
        """Propose one tree per request; see :meth:`Drafter.draft`."""
        self.catch_up(requests)
        if law is Law.FIXED:
            return self._draft_fixed(requests, plan, tree_slots)
        return self._draft_sampled(requests, plan, law, tree_slots)

    def snapshot(self, request: Request) -> EagleSnapshot:
        """Remember the last tree's root; see :meth:`RecallingDrafter.snapshot`."""
        return EagleSnapshot(
            context=self._state(request).context,
            rows=request.slots[:0],
            # A row of a whole batch's output, which it would keep alive.
            hidden=self._root_hidden(request).clone(),
            params=_draft_params(request, request.plan),
            width=min(request.plan.draft_width, self.head.config.draft_vocab_size),
        )

    @torch.inference_mode()
    def advance(
        self,
        requests: Sequence[Request],
        snapshots: Sequence[DraftSnapshot],
        tokens: Tensor,
        slots: Tensor,
    ) -> list[DraftSnapshot]:
        """Run one more row of the head each; see :meth:`RecallingDrafter.advance`."""
        own = _eagle_snapshots(snapshots)
        segments = [
            Segment.causal(token, torch.cat((request.slots[: s.context], s.rows)), slot)
            for request, s, token, slot in zip(
                requests, own, tokens.split(1), slots.split(1), strict=True
            )
        ]
        hidden = self._run(segments, torch.stack([s.hidden for s in own]))
        return [
            replace(s, rows=torch.cat((s.rows, slot)), hidden=row)
            for s, slot, row in zip(own, slots.split(1), hidden, strict=True)
        ]

    @torch.inference_mode()
    def laws_at(self, snapshots: Sequence[DraftSnapshot]) -> DraftLaws:
        """Return what would have been drawn from; see :meth:`RecallingDrafter.laws_at`."""
        own = _eagle_snapshots(snapshots)
        logits = self.head.logits(torch.stack([s.hidden for s in own]))
        ids = logits.new_zeros((len(own), max(s.width for s in own)), dtype=torch.int64)
        probs = torch.zeros_like(ids, dtype=torch.float64)
        for width in {s.width for s in own}:
            members = [i for i, s in enumerate(own) if s.width == width]
            settings = WarpSettings.of(
                [own[i].params for i in members], [1] * len(members), device=logits.device
            )
            laws = draft_laws(
                logits[members], settings, width=width, draft_to_target=self.head.draft_to_target
            )
            ids[members, :width], probs[members, :width] = laws.ids, laws.probs
        return DraftLaws(ids, probs)

    def _draft_sampled(
        self, requests: Sequence[Request], plan: Plan, law: Law, tree_slots: Sequence[Tensor]
    ) -> DraftTree:
        width = min(plan.draft_width, self.head.config.draft_vocab_size)
        kind = _SAMPLED_TREES[law]
        trees = [kind(r.token_ids[-1], self._uniforms(r, plan), width) for r in requests]
        params = [_draft_params(request, plan) for request in requests]

        def laws(logits: Tensor, rows_each: list[int]) -> DraftLaws:
            settings = WarpSettings.of(params, rows_each, device=logits.device)
            return draft_laws(
                logits, settings, width=width, draft_to_target=self.head.draft_to_target
            )

        return self._grow(requests, trees, plan, law, tree_slots, laws)

    def _draft_fixed(
        self, requests: Sequence[Request], plan: Plan, tree_slots: Sequence[Tensor]
    ) -> DraftTree:
        budget = plan.paths * plan.depth
        trees = [BestFirstTree(r.token_ids[-1], beam=plan.paths, budget=budget) for r in requests]

        def laws(logits: Tensor, rows_each: list[int]) -> DraftLaws:  # noqa: ARG001
            return log_laws(logits, width=plan.paths, draft_to_target=self.head.draft_to_target)

        return self._grow(requests, trees, plan, Law.FIXED, tree_slots, laws)

    def _grow(
        self,
        requests: Sequence[Request],
        trees: Sequence[GrowingTree],
        plan: Plan,
        law: Law,
        tree_slots: Sequence[Tensor],
        laws: Callable[[Tensor, list[int]], DraftLaws],
    ) -> DraftTree:
        """Grow every tree level by level: laws, new nodes, and a forward of the new nodes."""
        frontiers = [[0] for _ in trees]
        drafted = [
            _DraftedRows(request, slots)
            for request, slots in zip(requests, tree_slots, strict=True)
        ]
        hidden = torch.stack([self._root_hidden(request) for request in requests])
        for level in range(plan.depth):
            counts = [len(frontier) for frontier in frontiers]
            drawn = laws(self.head.logits(hidden), counts)
            ids, values = drawn.ids.cpu().numpy(), drawn.probs.cpu().numpy()
            spans = list(pairwise(accumulate(counts, initial=0)))
            new = [
                tree.grow(frontier, ids[first:end], values[first:end])
                for tree, frontier, (first, end) in zip(trees, frontiers, spans, strict=True)
            ]
            if level + 1 == plan.depth:
                break
            parents = [
                first + frontier.index(tree.parent_of(node))
                for tree, frontier, (first, _), nodes in zip(
                    trees, frontiers, spans, new, strict=True
                )
                for node in nodes
            ]
            segments = [
                rows.segment([(n, tree.token_of(n), tree.parent_of(n)) for n in nodes])
                for rows, tree, nodes in zip(drafted, trees, new, strict=True)
            ]
            hidden = self._run(segments, hidden[parents])
            frontiers = new
        return stack_trees(
            [tree.finish() for tree in trees],
            law,
            paths=trees[0].max_paths,
            length=plan.depth,
            device=self._device,
        )

    def _run(self, segments: Sequence[Segment], hidden: Tensor) -> Tensor:
        """Run the head over packed segments; ``hidden`` ``[tokens, hidden]`` in and out."""
        batch = pack(segments)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._attention.attend(0, q, k, v, batch, scale=self._scale)

        result: Tensor = self.head(batch.token_ids, hidden, batch.positions, attend)
        return result

    def _true_segment(self, request: Request, state: EagleState) -> Segment:
        """Return the rows of positions committed since the head last ran on true features."""
        start, end = state.context, request.context
        tokens = request.tokens_from(start + 1)[: end - start]
        return Segment.causal(torch.tensor(tokens), request.slots[:start], request.slots[start:])

    def _uniforms(self, request: Request, plan: Plan) -> NDArray[np.float64]:
        count = plan.paths * plan.depth
        numbers = request.stream.draw(request.step, Purpose.DRAFT, count)
        return numbers.reshape(plan.paths, plan.depth)

    def _state(self, request: Request) -> EagleState:
        if request.draft_state is None:
            request.draft_state = EagleState()
        if not isinstance(request.draft_state, EagleState):
            raise TypeError(f"request {request.number} belongs to another drafter")
        return request.draft_state

    def _root_hidden(self, request: Request) -> Tensor:
        hidden = self._state(request).hidden
        if hidden is None:
            raise RuntimeError(f"request {request.number} drafts before any feature was observed")
        return hidden

    @property
    def _device(self) -> torch.device:
        return self.head.draft_to_target.device


class _DraftedRows:
    """The drafted rows of one request: their slots, and who sees whom."""

    def __init__(self, request: Request, slots: Tensor) -> None:
        self._context = request.slots
        self._slots = slots
        self._rows: dict[int, int] = {}
        self._visible = np.zeros((len(slots), len(slots)), dtype=bool)
        self._positions = np.zeros(len(slots), dtype=np.int64)

    def segment(self, nodes: Sequence[tuple[int, int, int]]) -> Segment:
        """Add the rows of new nodes, each (node, token, parent), and return their segment."""
        first = len(self._rows)
        for row, (node, _, parent) in enumerate(nodes, start=first):
            self._rows[node] = row
            self._positions[row] = len(self._context)
            if parent in self._rows:
                self._visible[row] = self._visible[self._rows[parent]]
                self._positions[row] = self._positions[self._rows[parent]] + 1
            self._visible[row, row] = True
        end = len(self._rows)
        positions = torch.from_numpy(self._positions[:end])
        return Segment(
            token_ids=torch.tensor([token for _, token, _ in nodes]),
            positions=positions[first:],
            context_slots=self._context,
            tree_slots=self._slots[:end],
            tree_positions=positions,
            visible=torch.from_numpy(self._visible[first:end, :end]),
        )


def _eagle_snapshots(snapshots: Sequence[DraftSnapshot]) -> list[EagleSnapshot]:
    own = [s for s in snapshots if isinstance(s, EagleSnapshot)]
    if len(own) < len(snapshots):
        raise TypeError("a snapshot belongs to another drafter")
    return own


def _draft_params(request: Request, plan: Plan) -> SamplingParams:
    """The request's own warping at the plan's draft temperature."""
    params = request.params
    return SamplingParams(
        temperature=min(100.0, params.temperature * plan.draft_temperature),
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
    )
