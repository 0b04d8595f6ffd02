"""Draft trees grown on the device, level by level, in tensors of fixed sizes.

What :mod:`eaglegbv.drafters.sampled_trees` and :mod:`eaglegbv.drafters.tree_builder` do on the host
for one request, with the same numbers and in the same order, is done here for a batch, and nothing
is read on the host: paths that end go on as rows without meaning, and nodes that are not there are
padding. Every path of a sampled tree keeps a row of its own, also where several share a node; the
first of them says what the node's law is.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eaglegbv.config import Plan
from eaglegbv.drafters.draft_law import DraftLaws
from eaglegbv.first_place import first_place
from eaglegbv.tree import DraftTree, Law

LAWS = frozenset({Law.IID, Law.WOR, Law.GREEDY, Law.FIXED})
"""Laws of the trees that grow here; of ``fixed`` ones those without a shape."""

_LOWEST = -1e300
"""Ranks candidates of probability 0, and broken ones, behind all others that exist."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """What the drafter goes on from: a fixed number of rows a request, some without meaning.

    Attributes:
        token_ids: ``[batch, rows]`` int64.
        parents: ``[batch, rows]`` int64, the row each goes on from, of the frontier before.
    """

    token_ids: Tensor
    parents: Tensor


class DeviceTrees(ABC):
    """The trees of a batch in the making."""

    rows: int
    """Rows of a frontier."""

    @abstractmethod
    def begin(self, laws: DraftLaws) -> Frontier:
        """Give the roots children; ``laws`` ``[batch, width]`` say what follows them."""

    @abstractmethod
    def grow(self, laws: DraftLaws) -> Frontier:
        """Give the frontier children; ``laws`` are ``[batch * rows, width]``."""

    @abstractmethod
    def finish(self) -> DraftTree:
        """Return the trees."""


def start_device_trees(plan: Plan, law: Law, roots: Tensor, uniforms: Tensor) -> DeviceTrees:
    """Start trees at ``roots`` ``[batch]`` int64.

    Args:
        plan: The plan.
        law: How children arise, one of :data:`LAWS`.
        roots: Token ids.
        uniforms: ``[batch, paths, depth]`` float64, each request's numbers; not read for ``fixed``.
    """
    if law is Law.FIXED:
        return BeamTrees(plan, roots)
    return SampledTrees(plan, law, roots, uniforms)


def pick(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return the places that ``uniforms`` ``[...]`` select in ``probs`` ``[..., width]``.

    By inverse CDF; never a place of probability 0, whatever the rounding of a parallel sum, unless
    there is no other.
    """
    cumulative = probs.cumsum(dim=-1) * (probs > 0)
    total = cumulative.amax(dim=-1)
    threshold = uniforms * total
    limit = torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total)))
    return first_place(cumulative > limit.unsqueeze(-1))


class SampledTrees(DeviceTrees):
    """Trees of drawn tokens: laws ``iid``, ``wor`` and ``greedy``."""

    def __init__(self, plan: Plan, law: Law, roots: Tensor, uniforms: Tensor) -> None:
        """See :func:`start_device_trees`."""
        batch, paths, depth = uniforms.shape
        self.rows = paths
        self._law = law
        self._uniforms = uniforms
        self._min_confidence = plan.min_confidence
        self._most = 1 + paths * depth
        # One column more: what is written there is thrown away.
        self._token_ids = roots.new_zeros((batch, self._most + 1))
        self._token_ids[:, 0] = roots
        self._parents = torch.zeros_like(self._token_ids)
        self._depth = torch.zeros_like(self._token_ids)
        self._count = torch.ones_like(roots)
        self._numbers = torch.arange(paths, device=roots.device)
        self._node = roots.new_zeros((batch, paths))
        self._leader = torch.zeros_like(self._node)
        self._alive = torch.ones_like(self._node, dtype=torch.bool)
        self._confidence = torch.ones_like(self._node, dtype=torch.float64)
        self._lengths = torch.zeros_like(self._node)
        self._path_nodes: list[Tensor] = []
        self._laws: tuple[Tensor, Tensor] | None = None

    def begin(self, laws: DraftLaws) -> Frontier:
        """See :meth:`DeviceTrees.begin`."""
        shape = (*self._node.shape, laws.ids.shape[-1])
        ids, probs = (x.unsqueeze(1).expand(shape) for x in (laws.ids, laws.probs))
        self._note_laws(ids, probs)
        if self._law is Law.IID:
            places = pick(probs, self._uniforms[:, :, 0])
        else:
            places, self._alive = self._distinct(laws)
        return self._extend(places, ids, probs)

    def grow(self, laws: DraftLaws) -> Frontier:
        """See :meth:`DeviceTrees.grow`."""
        shape = (*self._node.shape, laws.ids.shape[-1])
        at = self._leader.unsqueeze(2).expand(shape)
        ids, probs = (x.view(shape).gather(1, at) for x in (laws.ids, laws.probs))
        self._note_laws(ids, probs)
        numbers = self._uniforms[:, :, len(self._path_nodes)]
        if self._law is not Law.IID:  # paths that go on take the numbers in order
            numbers = numbers.gather(1, (self._alive.cumsum(1) - 1).clamp(min=0))
        return self._extend(pick(probs, numbers), ids, probs)

    def finish(self) -> DraftTree:
        """See :meth:`DeviceTrees.finish`."""
        assert self._laws is not None  # trees have a level at least
        most = self._most
        return DraftTree(
            law=self._law,
            token_ids=self._token_ids[:, :most],
            parents=self._parents[:, :most],
            depth=self._depth[:, :most],
            num_nodes=self._count,
            path_nodes=torch.stack(self._path_nodes, dim=2),
            path_lengths=self._lengths,
            draft_ids=self._laws[0][:, :most],
            draft_probs=self._laws[1][:, :most],
        )

    def _distinct(self, laws: DraftLaws) -> tuple[Tensor, Tensor]:
        """Return the places ``[batch, paths]`` of a root's different children, and which exist."""
        left, paths = laws.probs, self.rows
        places, there = [], []
        popular: Sequence[Tensor] = ()
        if self._law is Law.GREEDY:
            popular = _by_popularity(laws)[:, : paths - 1].unbind(1)
        for path in range(paths):
            there.append((left > 0).any(dim=1))
            if path < len(popular):
                place = popular[path]
            else:
                # ``greedy`` draws once, by its first number; ``wor`` by one after the other.
                number = self._uniforms[:, 0 if self._law is Law.GREEDY else path, 0]
                place = pick(left, number)
            places.append(place)
            left = left.scatter(1, place.unsqueeze(1), 0.0)
        return torch.stack(places, dim=1), torch.stack(there, dim=1)

    def _note_laws(self, ids: Tensor, probs: Tensor) -> None:
        """Keep the laws of the nodes that the paths stand at."""
        if self._laws is None:
            shape = (ids.shape[0], self._most + 1, ids.shape[2])
            self._laws = ids.new_zeros(shape), probs.new_zeros(shape)
        at = torch.where(self._alive, self._node, self._most).unsqueeze(2).expand_as(ids)
        self._laws[0].scatter_(1, at, ids)
        self._laws[1].scatter_(1, at, probs)

    def _extend(self, places: Tensor, ids: Tensor, probs: Tensor) -> Frontier:
        """Extend the paths that go on by the tokens at ``places`` ``[batch, paths]``."""
        at = places.unsqueeze(2)
        tokens, chances = (x.gather(2, at).squeeze(2) for x in (ids, probs))
        alive, parent = self._alive, self._node
        same = (parent.unsqueeze(2) == parent.unsqueeze(1)) & alive.unsqueeze(1)
        same = same & (tokens.unsqueeze(2) == tokens.unsqueeze(1))
        first = same.to(torch.uint8).argmax(dim=2)
        leads = alive & (first == self._numbers)
        # New nodes are numbered by their parents, then by their first paths.
        key = torch.where(leads, parent * self.rows + self._numbers, self._most * self.rows)
        rank = (key.unsqueeze(1) < key.unsqueeze(2)).sum(dim=2)
        node = (self._count.unsqueeze(1) + rank).gather(1, first)
        self._node = torch.where(alive, node, parent)
        self._leader = torch.where(alive, first, self._numbers)
        self._count = self._count + leads.sum(dim=1)
        self._path_nodes.append(self._node)
        self._lengths = self._lengths + alive
        places = torch.where(leads, node, self._most)
        self._token_ids.scatter_(1, places, tokens)
        self._parents.scatter_(1, places, parent)
        self._depth.scatter_(1, places, torch.full_like(places, len(self._path_nodes)))
        if self._min_confidence > 0:
            self._confidence = self._confidence * chances
            self._alive = alive & (self._confidence >= self._min_confidence)
        return Frontier(tokens, self._numbers.expand_as(tokens))


def _by_popularity(laws: DraftLaws) -> Tensor:
    """Return the places of ``laws`` ``[batch, width]``, most likely first, ties by token id."""
    by_id = laws.ids.argsort(dim=1)
    by_probability = laws.probs.gather(1, by_id).sort(dim=1, descending=True, stable=True).indices
    return by_id.gather(1, by_probability)


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
        """What they are ranked by: the best first, those that are not real last."""
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
        # The frontier: candidates, and which of them go on.
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
        """Keep the best; parents come before children, and there is a path for every leaf."""
        everything = self._all
        batch = everything.token_ids.shape[0]
        found = _Candidates(*(x[:, 1:] for x in _columns(everything)))
        best = 1 + found.best(self._budget)
        real = everything.real.gather(1, best)
        # Those that are not there go last; a stable sort leaves the others in the order found.
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
