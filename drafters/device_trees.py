"""Draft trees grown on the device, level by level, in tensors of fixed sizes.

:mod:`eaglegbv.drafters.sampled_trees` and :mod:`eaglegbv.drafters.tree_builder` grow trees on the
host for one request. This module does the same for a batch, with the same numbers and in the same
order, and reads nothing on the host: paths that have ended continue as meaningless rows, and
missing nodes are padding. Every path of a sampled tree keeps its own row, even where several share
a node; the first of them determines the node's law.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eaglegbv.config import Plan
from eaglegbv.drafters.draft_law import DraftLaws
from eaglegbv.drafters.path_growth import Grow, Grown, Paths, extended, grow_paths, pick_places
from eaglegbv.ranking import most_likely_first
from eaglegbv.tree import DraftTree, Law

LAWS = frozenset({Law.IID, Law.WOR, Law.GREEDY, Law.FIXED})
"""Laws of the trees that grow here; trees of law ``fixed`` must have no given shape."""

_LOWEST = -1e300
"""Score of candidates of probability 0 or NaN, which ranks them after all others that exist."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """What the drafter continues: a fixed number of rows per request, some of them meaningless.

    Attributes:
        token_ids: ``[batch, rows]`` int64.
        parents: ``[batch, rows]`` int64, the row of the previous frontier that each continues;
            None where each continues the row of its own number.
    """

    token_ids: Tensor
    parents: Tensor | None


class DeviceTrees(ABC):
    """The trees of a batch in the making."""

    rows: int
    """Rows of a frontier."""

    @abstractmethod
    def begin(self, laws: DraftLaws) -> Frontier:
        """Give the roots children, by the laws of what follows them, ``[batch, width]``."""

    @abstractmethod
    def grow(self, laws: DraftLaws) -> Frontier:
        """Give the frontier children; ``laws`` are ``[batch * rows, width]``."""

    @abstractmethod
    def finish(self) -> DraftTree:
        """Return the trees."""


def start_device_trees(
    plan: Plan, law: Law, roots: Tensor, uniforms: Tensor, *, grow: Grow = grow_paths
) -> DeviceTrees:
    """Start trees at ``roots`` ``[batch]`` int64.

    Args:
        plan: The plan.
        law: How children arise, one of :data:`LAWS`.
        roots: Token ids.
        uniforms: ``[batch, paths, depth]`` float64, each request's numbers; not read for ``fixed``.
        grow: :func:`grow_paths`, compiled or not; not called for ``fixed``.
    """
    if law is Law.FIXED:
        return BeamTrees(plan, roots)
    return SampledTrees(plan, law, roots, uniforms, grow)


class SampledTrees(DeviceTrees):
    """Trees of drawn tokens: laws ``iid``, ``wor`` and ``greedy``.

    What each level adds is kept, and assembled into trees when all levels have been drawn.
    """

    def __init__(self, plan: Plan, law: Law, roots: Tensor, uniforms: Tensor, grow: Grow) -> None:
        """See :func:`start_device_trees`."""
        batch, paths, depth = uniforms.shape
        self.rows = paths
        self._law = law
        # Each level's numbers are contiguous, as graphs are made for strides.
        levels = uniforms.permute(2, 0, 1).clone(memory_format=torch.contiguous_format)
        self._numbers = levels.unbind(0)
        self._min_confidence = plan.min_confidence
        self._most = 1 + paths * depth
        self._grow = grow
        self._root = roots
        self._paths = Paths.at_root(roots, paths)
        self._confidence = torch.ones((batch, paths), dtype=torch.float64, device=roots.device)
        self._grown: list[tuple[Paths, Grown]] = []

    def begin(self, laws: DraftLaws) -> Frontier:
        """See :meth:`DeviceTrees.begin`."""
        ids, probs = (x.repeat_interleave(self.rows, dim=0) for x in (laws.ids, laws.probs))
        if self._law is Law.IID:
            return self.grow(DraftLaws(ids, probs))
        places, alive = self._distinct(laws)
        self._paths = self._paths._replace(alive=alive)
        shape = (*places.shape, -1)
        return self._extend(extended(self._paths, places, ids.view(shape), probs.view(shape)))

    def grow(self, laws: DraftLaws) -> Frontier:
        """See :meth:`DeviceTrees.grow`."""
        paths = self._paths
        numbers = self._numbers[len(self._grown)]
        if self._law is not Law.IID:  # paths that are alive take the numbers in order
            numbers = numbers.gather(1, (paths.alive.cumsum(1) - 1).clamp(min=0))
        return self._extend(self._grow(paths, laws.ids, laws.probs, numbers))

    def finish(self) -> DraftTree:
        """See :meth:`DeviceTrees.finish`."""
        above = [paths for paths, _ in self._grown]
        grown = [own for _, own in self._grown]
        after = [own.paths for own in grown]
        # One node more than there can be: what is written there is discarded.
        spare, rows = self._most, torch.cat([paths.node for paths in above], dim=1)
        going = torch.cat([paths.alive for paths in above], dim=1)
        leading = torch.cat([own.leads for own in grown], dim=1)
        nodes = torch.cat([paths.node for paths in after], dim=1)
        levels = torch.arange(1, len(grown) + 1, device=rows.device).repeat_interleave(self.rows)
        new = torch.where(leading, nodes, spare)
        token_ids = self._at(new, torch.cat([own.token_ids for own in grown], dim=1))
        token_ids[:, 0] = self._root
        known = torch.where(going, rows, spare)
        return DraftTree(
            law=self._law,
            token_ids=token_ids,
            parents=self._at(new, rows),
            depth=self._at(new, levels.expand_as(new)),
            num_nodes=after[-1].nodes,
            path_nodes=torch.stack([paths.node for paths in after], dim=2),
            path_lengths=torch.stack([paths.alive for paths in above], dim=2).sum(dim=2),
            draft_ids=self._at(known, torch.cat([own.ids for own in grown], dim=1)),
            draft_probs=self._at(known, torch.cat([own.probs for own in grown], dim=1)),
        )

    def _at(self, places: Tensor, values: Tensor) -> Tensor:
        """Return ``[batch, nodes, ...]`` with ``values`` ``[batch, n, ...]`` at ``places``."""
        batch, _, *shape = values.shape
        room = values.new_zeros((batch, self._most + 1, *shape))
        index = places.view(*places.shape, *(1 for _ in shape)).expand_as(values)
        return room.scatter_(1, index, values)[:, : self._most]

    def _distinct(self, laws: DraftLaws) -> tuple[Tensor, Tensor]:
        """Return the places ``[batch, paths]`` of the roots' distinct children, and which exist."""
        left, paths = laws.probs, self.rows
        places, there = [], []
        popular: Sequence[Tensor] = ()
        if self._law is Law.GREEDY:
            popular = most_likely_first(laws.ids, laws.probs)[:, : paths - 1].unbind(1)
        for path in range(paths):
            there.append((left > 0).any(dim=1))
            if path < len(popular):
                place = popular[path]
            else:
                # ``greedy`` draws once, with its first number; ``wor`` uses one after another.
                number = self._numbers[0][:, 0 if self._law is Law.GREEDY else path]
                place = pick_places(left, number)
            places.append(place)
            left = left.scatter(1, place.unsqueeze(1), 0.0)
        return torch.stack(places, dim=1), torch.stack(there, dim=1)

    def _extend(self, grown: Grown) -> Frontier:
        """Keep what a level adds to the paths; those that are not likely enough end there."""
        self._grown.append((self._paths, grown))
        self._paths = grown.paths
        if self._min_confidence > 0:
            self._confidence = self._confidence * grown.chances
            alive = self._paths.alive & (self._confidence >= self._min_confidence)
            self._paths = self._paths._replace(alive=alive)
        return Frontier(grown.token_ids, None)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Nodes that may be kept, ``[batch, candidates]`` each, in the order found.

    Attributes:
        token_ids: int64.
        parents: int64, numbers of candidates; the root is 0.
        depth: int64.
        scores: float64, sums of log-probabilities.
        real: bool, False where there is no such node.
    """

    token_ids: Tensor
    parents: Tensor
    depth: Tensor
    scores: Tensor
    real: Tensor

    @property
    def keys(self) -> Tensor:
        """What they are ranked by, the largest first; those that are not real come last."""
        known = self.scores.nan_to_num(nan=_LOWEST, neginf=_LOWEST)
        return torch.where(self.real, known, -torch.inf)

    def best(self, count: int) -> Tensor:
        """Return the places of the best ``count``, in the order found: ``[batch, count]``."""
        order = self.keys.sort(dim=1, descending=True, stable=True).indices
        return order[:, :count].sort(dim=1).values

    def joined(self, other: "_Candidates") -> "_Candidates":
        """Return these and then the others."""
        return _Candidates(
            torch.cat((self.token_ids, other.token_ids), dim=1),
            torch.cat((self.parents, other.parents), dim=1),
            torch.cat((self.depth, other.depth), dim=1),
            torch.cat((self.scores, other.scores), dim=1),
            torch.cat((self.real, other.real), dim=1),
        )


class BeamTrees(DeviceTrees):
    """Law ``fixed``: the most probable nodes that a beam finds (EAGLE-2's dynamic tree)."""

    def __init__(self, plan: Plan, roots: Tensor) -> None:
        """See :func:`start_device_trees`."""
        self.rows = plan.fixed_beam
        self._budget = plan.fixed_nodes
        self._depth = plan.depth
        self._floor = math.log(plan.min_confidence) if plan.min_confidence > 0 else -math.inf
        root = roots.unsqueeze(1)
        zero = torch.zeros_like(root)
        scores = torch.zeros_like(root, dtype=torch.float64)
        self._all = _Candidates(root, zero, zero, scores, torch.ones_like(root, dtype=torch.bool))
        # The frontier: candidates, and whether each goes on.
        self._nodes = zero
        self._goes_on = self._all.real
        self._level = 0

    def begin(self, laws: DraftLaws) -> Frontier:
        """See :meth:`DeviceTrees.begin`."""
        return self.grow(laws)

    def grow(self, laws: DraftLaws) -> Frontier:
        """See :meth:`DeviceTrees.grow`; ``laws.probs`` are log-probabilities."""
        batch, rows = self._nodes.shape
        width = laws.ids.shape[-1]
        self._level += 1
        shape = (batch, rows, width)
        parents = self._nodes.unsqueeze(2).expand(shape)
        above = self._all.scores.gather(1, self._nodes).unsqueeze(2)
        new = _Candidates(
            token_ids=laws.ids.reshape(batch, -1),
            parents=parents.reshape(batch, -1),
            depth=torch.full_like(parents, self._level).reshape(batch, -1),
            scores=(above + laws.probs.view(shape)).reshape(batch, -1),
            real=self._goes_on.unsqueeze(2).expand(shape).reshape(batch, -1),
        )
        first = self._all.token_ids.shape[1]
        self._all = self._all.joined(new)
        best = new.best(self.rows)
        missing = self.rows - best.shape[1]
        goes_on = new.real.gather(1, best) & ~(new.scores.gather(1, best) < self._floor)
        if missing:  # fewer candidates than the beam is wide
            best = torch.nn.functional.pad(best, (0, missing))
            goes_on = torch.nn.functional.pad(goes_on, (0, missing))
        self._nodes, self._goes_on = first + best, goes_on
        return Frontier(new.token_ids.gather(1, best), best // width)

    def finish(self) -> DraftTree:
        """Keep the best nodes, parents before children, with a path for every leaf."""
        everything = self._all
        batch = everything.token_ids.shape[0]
        found = _Candidates(*(x[:, 1:] for x in _columns(everything)))
        best = 1 + found.best(self._budget)
        real = everything.real.gather(1, best)
        # Those that do not exist go last; a stable sort leaves the others in the order found.
        best = best.gather(1, (~real).to(torch.uint8).sort(dim=1, stable=True).indices)
        kept = torch.nn.functional.pad(best, (1, 0))
        real = everything.real.gather(1, kept)
        places = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        number = torch.zeros_like(everything.parents).scatter(1, kept, places * real)
        parents = number.gather(1, everything.parents.gather(1, kept)) * real
        depth = everything.depth.gather(1, kept) * real
        path_nodes, path_lengths = self._paths(parents, depth, real)
        empty = kept.new_zeros((batch, kept.shape[1], 0))
        return DraftTree(
            law=Law.FIXED,
            token_ids=everything.token_ids.gather(1, kept) * real,
            parents=parents,
            depth=depth,
            num_nodes=real.sum(dim=1),
            path_nodes=path_nodes,
            path_lengths=path_lengths,
            draft_ids=empty,
            draft_probs=empty.to(torch.float64),
        )

    def _paths(self, parents: Tensor, depth: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Return the paths to all leaves, in the order of the leaves, and their lengths."""
        batch, count = parents.shape
        inner = torch.zeros_like(parents).scatter_add(1, parents, real.to(torch.int64)) > 0
        leaf = real & ~inner
        leaf[:, 0] = False
        at = torch.where(leaf, leaf.cumsum(dim=1) - 1, self._budget)
        node = torch.arange(count, device=parents.device).expand_as(parents)
        columns: list[Tensor] = []
        for level in range(self._depth, 0, -1):  # a path repeats its last node past its end
            columns.insert(0, node)
            node = torch.where(depth.gather(1, node) == level, parents.gather(1, node), node)
        chains = torch.stack(columns, dim=2)
        nodes = chains.new_zeros((batch, self._budget + 1, self._depth))
        nodes.scatter_(1, at.unsqueeze(2).expand_as(chains), chains)
        lengths = depth.new_zeros((batch, self._budget + 1)).scatter_(1, at, depth)
        return nodes[:, : self._budget], lengths[:, : self._budget]


def _columns(candidates: _Candidates) -> tuple[Tensor, ...]:
    return (
        candidates.token_ids,
        candidates.parents,
        candidates.depth,
        candidates.scores,
        candidates.real,
    )
