"""Growing the draft trees of a batch level by level: laws, children, a forward of new nodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor

from eaglegbv.attention.base import Segment
from eaglegbv.config import Plan
from eaglegbv.drafters.draft_law import DraftLaws, draft_laws, log_laws
from eaglegbv.drafters.tree_builder import GrowingTree, stack_trees
from eaglegbv.drafters.tree_choice import start_trees, support
from eaglegbv.params import COLDEST, HOTTEST, SamplingParams
from eaglegbv.request import DraftSnapshot, Request
from eaglegbv.transfer import fetch
from eaglegbv.tree import DraftTree, Law
from eaglegbv.warp import WarpSettings

Laws = Callable[[Tensor, list[int]], DraftLaws]
"""Takes logits ``[rows, draft_vocab]`` and each request's number of rows; returns their laws."""

FollowNodes = Callable[[Sequence[GrowingTree], Sequence[Sequence[int]], list[int]], Tensor]
"""Takes the trees, the new nodes of each, and the rows of their parents among the last logits;
returns the logits ``[nodes, draft_vocab]`` of what follows the new nodes."""


@dataclass(frozen=True, slots=True)
class Roots:
    """What the drafts of some requests continue.

    Attributes:
        contexts: For each request ``[rows]`` int64, the slots of its true rows.
        hidden: ``[requests, hidden]``, the drafter's output at the last of them.
        tree_slots: For each request, KV slots it may overwrite.
    """

    contexts: Sequence[Tensor]
    hidden: Tensor
    tree_slots: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class LawSettings:
    """What turns the logits of a step into its draft laws.

    Attributes:
        params: The request's own warping at the plan's draft temperature.
        width: Candidates kept.
    """

    params: SamplingParams
    width: int

    @classmethod
    def of(cls, request: Request, vocab: int) -> Self:
        """Return the settings of a request's steps; ``vocab`` tokens can be drafted."""
        return cls(draft_params(request.params, request.plan), request.plan.law_width(vocab))


@dataclass(frozen=True, slots=True)
class RowSnapshot(DraftSnapshot):
    """A step of a drafter with KV rows: its root, and the tokens appended since.

    Attributes:
        context: Positions whose rows are in the request's own slots.
        rows: ``[tokens]`` int64, KV slots of the rows appended since.
        settings: The step's draft settings.
    """

    context: int
    rows: Tensor
    settings: LawSettings


def next_rows(
    requests: Sequence[Request], snapshots: Sequence[RowSnapshot], tokens: Tensor, slots: Tensor
) -> list[Segment]:
    """Return segments that append one token each, for :meth:`RecallingDrafter.advance`."""
    return [
        Segment.causal(token, torch.cat((request.slots[: s.context], s.rows)), slot)
        for request, s, token, slot in zip(
            requests, snapshots, tokens.split(1), slots.split(1), strict=True
        )
    ]


def draft_trees(
    requests: Sequence[Request],
    plan: Plan,
    law: Law,
    draft_to_target: Tensor,
    logits: Tensor,
    follow: FollowNodes,
) -> DraftTree:
    """Draft one tree per request.

    Args:
        requests: The requests.
        plan: The plan they share.
        law: How children arise.
        draft_to_target: ``[draft_vocab]`` int64, the target's id of each draft token.
        logits: ``[requests, draft_vocab]``, of what follows the roots.
        follow: A forward of new nodes.
    """
    vocab = len(draft_to_target)
    trees = start_trees(requests, plan, law, vocab)
    laws = laws_of(requests, plan, law, support(plan, law, vocab), draft_to_target)
    grow_trees(trees, plan.depth, logits, laws, follow)
    return stack_trees(
        [tree.finish() for tree in trees], law, paths=trees[0].max_paths, length=plan.depth
    )


def recalled_laws(
    logits: Tensor, settings: Sequence[LawSettings], draft_to_target: Tensor
) -> DraftLaws:
    """Return the laws of rows of different steps, padded with probability 0 to the widest.

    Args:
        logits: ``[rows, draft_vocab]``.
        settings: The settings of each row's step.
        draft_to_target: ``[draft_vocab]`` int64.
    """
    widest = max(s.width for s in settings)
    ids = logits.new_zeros((len(settings), widest), dtype=torch.int64)
    probs = torch.zeros_like(ids, dtype=torch.float64)
    for width in {s.width for s in settings}:
        members = [i for i, s in enumerate(settings) if s.width == width]
        warping = WarpSettings.of(
            [settings[i].params for i in members], [1] * len(members), device=logits.device
        )
        laws = draft_laws(logits[members], warping, width=width, draft_to_target=draft_to_target)
        ids[members, :width], probs[members, :width] = laws.ids, laws.probs
    return DraftLaws(ids, probs)


def grow_trees(
    trees: Sequence[GrowingTree], depth: int, logits: Tensor, laws: Laws, follow: FollowNodes
) -> None:
    """Grow every tree to ``depth``, or until no tree grows.

    Args:
        trees: The trees, one per request.
        depth: Levels to grow.
        logits: ``[trees, draft_vocab]``, of what follows the roots.
        laws: The laws of a level.
        follow: A forward of new nodes.
    """
    frontiers: list[list[int]] = [[0] for _ in trees]
    for level in range(depth):
        counts = [len(frontier) for frontier in frontiers]
        drawn = laws(logits, counts)
        ids, values = (part.numpy() for part in fetch(drawn.ids, drawn.probs))
        spans = list(pairwise(accumulate(counts, initial=0)))
        new = [
            tree.grow(frontier, ids[first:end], values[first:end]) if frontier else []
            for tree, frontier, (first, end) in zip(trees, frontiers, spans, strict=True)
        ]
        if level + 1 == depth or not any(new):
            return
        parents = [
            first + frontier.index(tree.parent_of(node))
            for tree, frontier, (first, _), nodes in zip(trees, frontiers, spans, new, strict=True)
            for node in nodes
        ]
        logits = follow(trees, new, parents)
        frontiers = new


def laws_of(
    requests: Sequence[Request], plan: Plan, law: Law, width: int, draft_to_target: Tensor
) -> Laws:
    """Return the laws of a level: what ``law`` draws from, or log-probabilities for ``fixed``.

    Args:
        requests: The requests, for their warping.
        plan: Their plan.
        law: How children arise.
        width: Candidates to keep.
        draft_to_target: ``[draft_vocab]`` int64, the target's id of each draft token.
    """
    params = [draft_params(request.params, plan) for request in requests]

    def fixed(logits: Tensor, rows_each: list[int]) -> DraftLaws:  # noqa: ARG001
        return log_laws(logits, width=width, draft_to_target=draft_to_target)

    def drawn(logits: Tensor, rows_each: list[int]) -> DraftLaws:
        settings = WarpSettings.of(params, rows_each, device=logits.device)
        return draft_laws(logits, settings, width=width, draft_to_target=draft_to_target)

    return fixed if law is Law.FIXED else drawn


def draft_temperature(params: SamplingParams, plan: Plan) -> float:
    """Return the temperature of a request's draft laws: the plan's multiple of the request's own.

    Kept between :data:`eaglegbv.params.COLDEST` and :data:`eaglegbv.params.HOTTEST`, the limits of
    :class:`SamplingParams`. Drafts may follow any law, so nothing is lost by it.
    """
    return min(HOTTEST, max(COLDEST, params.temperature * plan.draft_temperature))


def draft_params(params: SamplingParams, plan: Plan) -> SamplingParams:
    """Return a request's own warping at the plan's draft temperature."""
    return SamplingParams(
        temperature=draft_temperature(params, plan),
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
    )


class DraftedRows:
    """The drafted rows of one request: their slots, and which rows each one sees."""

    def __init__(self, context: Tensor, slots: Tensor) -> None:
        """Start without rows.

        Args:
            context: ``[c]`` int64, slots of what every row sees, positions 0 ... c - 1.
            slots: Slots the rows take, in order.
        """
        self._context = context
        self._slots = slots
        self._rows: dict[int, int] = {}
        self._visible = np.zeros((len(slots), len(slots)), dtype=bool)
        self._positions = np.zeros(len(slots), dtype=np.int64)

    @staticmethod
    def segments(
        rows: "Sequence[DraftedRows]",
        trees: Sequence[GrowingTree],
        nodes: Sequence[Sequence[int]],
    ) -> list[Segment]:
        """Add each tree's new nodes to its rows; return the segments of those that have any."""
        return [
            own.segment(tree, new) for own, tree, new in zip(rows, trees, nodes, strict=True) if new
        ]

    def segment(self, tree: GrowingTree, nodes: Sequence[int]) -> Segment:
        """Add the rows of new nodes of ``tree`` and return their segment."""
        first = len(self._rows)
        for row, node in enumerate(nodes, start=first):
            parent = tree.parent_of(node)
            self._rows[node] = row
            self._positions[row] = len(self._context)
            if parent in self._rows:
                self._visible[row] = self._visible[self._rows[parent]]
                self._positions[row] = self._positions[self._rows[parent]] + 1
            self._visible[row, row] = True
        end = len(self._rows)
        positions = torch.from_numpy(self._positions[:end])
        return Segment(
            token_ids=torch.tensor([tree.token_of(node) for node in nodes]),
            positions=positions[first:],
            context_slots=self._context,
            tree_slots=self._slots[:end],
            tree_positions=positions,
            visible=torch.from_numpy(self._visible[first:end, :end]),
        )
