"""Drafter logits to draft distributions: short lists of candidates that sum to one."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import NamedTuple, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eaglegbv.attention.base import Segment
from eaglegbv.compiling import EXAMPLE_WIDTH, check_backend, compile_graph, making_graphs
from eaglegbv.config import Plan, Shape
from eaglegbv.devices import fetch, first_place, most_likely_first
from eaglegbv.request import DraftSnapshot, Request
from eaglegbv.rng import Purpose
from eaglegbv.sampling import COLDEST, HOTTEST, SamplingParams, WarpSettings, warp
from eaglegbv.tree import DraftSampling, DraftTree


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """Distributions of the next drafted token, one per row.

    Attributes:
        ids: ``[rows, width]`` int64 target token ids: the most likely ones, in an order that
            depends on the row alone, or the whole draft vocabulary in its order.
        probs: ``[rows, width]`` float64, normalised once; these very numbers are sampled from and
            passed to the verifier.
    """

    ids: Tensor
    probs: Tensor


def draft_dists(
    logits: Tensor, settings: WarpSettings, *, width: int, draft_to_target: Tensor
) -> DraftProbs:
    """Keep the ``width`` most likely tokens, warp and normalise them.

    Args:
        logits: ``[rows, draft_vocab]``.
        settings: One entry per row.
        width: Candidates to keep; a vocabulary no larger is kept whole, and not sorted.
        draft_to_target: ``[draft_vocab]`` int64, the target's id of each draft token.
    """
    if width >= logits.shape[1]:
        ids = draft_to_target.expand(logits.shape)
        return DraftProbs(ids, warp(logits, settings).softmax(dim=1, dtype=torch.float64))
    likely = _most_likely(logits, width)
    probs = warp(logits.gather(1, likely), settings).softmax(dim=1, dtype=torch.float64)
    return DraftProbs(draft_to_target.take(likely), probs)


def _most_likely(logits: Tensor, width: int) -> Tensor:
    """Return the places ``[rows, width]`` of each row's largest logits; NaN counts as largest.

    On a CPU a partition takes a third of the time of PyTorch's top-k.
    """
    if logits.device.type != "cpu":
        return logits.topk(width, dim=1).indices
    others = logits.shape[1] - width
    places = np.argpartition(logits.float().numpy(), others, axis=1)[:, others:]
    places.sort(axis=1)
    return torch.from_numpy(places)


def pick_index(probs: NDArray[np.float64], uniform: float) -> int:
    """Return the index ``uniform`` in [0, 1) selects by inverse CDF; never one of probability 0."""
    return pick_indices(probs, np.array([uniform]))[0]


def pick_indices(probs: NDArray[np.float64], uniforms: NDArray[np.float64]) -> list[int]:
    """Return the index that each of ``uniforms`` selects, as :func:`pick_index` does."""
    cumulative = probs.cumsum()
    indices: list[int] = cumulative.searchsorted(uniforms * cumulative[-1], side="right").tolist()
    if max(indices) < len(probs):
        return indices
    # Rounding can push u * total up to the total itself: take the last positive entry.
    last = int(np.flatnonzero(probs)[-1])
    return [min(index, last) for index in indices]


def log_probs(logits: Tensor, *, width: int, draft_to_target: Tensor) -> DraftProbs:
    """Return the ``width`` best tokens with their log-probabilities (in ``probs``), untempered."""
    values, index = logits.float().log_softmax(dim=1).topk(min(width, logits.shape[1]), dim=1)
    return DraftProbs(draft_to_target[index], values.to(torch.float64))


# One more level of drawn paths as a function of tensors: most of the work of a recorded loop.
#
# Plans affect only the sizes of tensors here, so one compiled function serves all of them. Compiling
# fuses some forty small kernels into a handful.


_LAST = 1 << 40
"""Sorts after every real key."""


class Paths(NamedTuple):
    """The ends of the paths of a batch of trees.

    Attributes:
        node: ``[batch, paths]`` int64, the last node of each.
        leader: ``[batch, paths]`` int64, the first path that ends at the same node.
        alive: ``[batch, paths]`` bool, False where a path has ended.
        nodes: ``[batch]`` int64, nodes of each tree.
    """

    node: Tensor
    leader: Tensor
    alive: Tensor
    nodes: Tensor

    @classmethod
    def at_root(cls, roots: Tensor, paths: int) -> Self:
        """Return ``paths`` paths of each tree, all at its root; ``roots`` ``[batch]``."""
        node = roots.new_zeros((len(roots), paths))
        alive = torch.ones_like(node, dtype=torch.bool)
        return cls(node, torch.zeros_like(node), alive, torch.ones_like(roots))


class Grown(NamedTuple):
    """What a level adds to the paths of a batch of trees.

    Attributes:
        paths: Their new ends; all that were alive still are.
        token_ids: ``[batch, paths]`` int64, the tokens they are extended by.
        leads: ``[batch, paths]`` bool, True where a path is the first at a new node.
        chances: ``[batch, paths]`` float64, the tokens' probabilities.
        ids: ``[batch, paths, width]`` int64, the tokens of the distributions they were drawn from.
        probs: ``[batch, paths, width]`` float64, these distributions.
    """

    paths: Paths
    token_ids: Tensor
    leads: Tensor
    chances: Tensor
    ids: Tensor
    probs: Tensor


Grow: TypeAlias = Callable[[Paths, Tensor, Tensor, Tensor], Grown]
"""See :func:`grow_paths`."""

_SIZES = (1, 1), (1, 3), (7, 1), (7, 3)
"""Numbers of trees and paths to make graphs from, which treat a size of 1 as a constant."""


def grow_paths(paths: Paths, ids: Tensor, probs: Tensor, uniforms: Tensor) -> Grown:
    """Extend paths by tokens drawn from the distributions of their leaders.

    Args:
        paths: Their ends.
        ids: ``[batch * paths, width]`` int64, the tokens of each path's distribution.
        probs: ``[batch * paths, width]`` float64, their probabilities.
        uniforms: ``[batch, paths]`` float64 in [0, 1), the numbers that draw the tokens.
    """
    batch, count = uniforms.shape
    at = paths.leader.unsqueeze(2).expand(-1, -1, ids.shape[1])
    ids, probs = (x.view(batch, count, -1).gather(1, at) for x in (ids, probs))
    return extended(paths, pick_places(probs, uniforms), ids, probs)


@lru_cache(maxsize=8)
def growth(backend: str | None, device: torch.device) -> Grow:
    """Return :func:`grow_paths`, compiled now by a backend of ``torch.compile`` unless it is None.

    It is compiled once for all engines.

    Raises:
        InvalidArgument: There is no such backend.
    """
    if backend is None:
        return grow_paths
    check_backend(backend)
    compiled = compile_graph(grow_paths, backend)

    def grow(paths: Paths, ids: Tensor, probs: Tensor, uniforms: Tensor) -> Grown:
        if ids.shape[1] == 1:  # nothing is drawn, and separate graphs would be needed
            return grow_paths(paths, ids, probs, uniforms)
        if not (ids.is_inference() and ids.is_contiguous()):  # a vocabulary shared by all rows
            ids = ids.clone(memory_format=torch.contiguous_format)
        found: Grown = compiled(paths, ids, probs, uniforms)
        return found

    with torch.inference_mode(), making_graphs():
        for batch, count in _SIZES:
            ids = torch.arange(EXAMPLE_WIDTH, device=device).repeat(batch * count, 1)
            probs = torch.full_like(ids, 1 / EXAMPLE_WIDTH, dtype=torch.float64)
            uniforms = torch.zeros((batch, count), dtype=torch.float64, device=device)
            roots = torch.zeros(batch, dtype=torch.int64, device=device)
            grow(Paths.at_root(roots, count), ids, probs, uniforms)
    return grow


def extended(paths: Paths, places: Tensor, ids: Tensor, probs: Tensor) -> Grown:
    """Extend paths that are alive by the tokens at ``places`` ``[batch, paths]`` of their distributions."""
    at = places.unsqueeze(2)
    tokens, chances = (x.gather(2, at).squeeze(2) for x in (ids, probs))
    alive, parent, number = paths.alive, paths.node, paths.node.shape[1]
    same = (parent.unsqueeze(2) == parent.unsqueeze(1)) & alive.unsqueeze(1)
    first = first_place(same & (tokens.unsqueeze(2) == tokens.unsqueeze(1)))
    numbers = torch.arange(number, device=parent.device)
    leads = alive & (first == numbers)
    # New nodes are numbered by their parents, then by their first paths.
    key = torch.where(leads, parent * number + numbers, _LAST)
    rank = (key.unsqueeze(1) < key.unsqueeze(2)).sum(dim=2)
    node = (paths.nodes.unsqueeze(1) + rank).gather(1, first)
    after = Paths(
        node=torch.where(alive, node, parent),
        leader=torch.where(alive, first, numbers),
        alive=alive,
        nodes=paths.nodes + leads.sum(dim=1),
    )
    return Grown(after, tokens, leads, chances, ids, probs)


def pick_places(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return the places that ``uniforms`` ``[...]`` select in ``probs`` ``[..., width]``.

    By inverse CDF; never a place of probability 0, whatever the rounding of a parallel sum, unless
    there is no other.
    """
    cumulative = probs.cumsum(dim=-1) * (probs > 0)
    total = cumulative.amax(dim=-1)
    threshold = uniforms * total
    limit = torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total)))
    return first_place(cumulative > limit.unsqueeze(-1))


# Growing one request's draft tree level by level, on the host.


@dataclass(frozen=True, slots=True)
class GrownTree:
    """One request's finished tree; see :class:`eaglegbv.tree.DraftTree` for the conventions.

    Attributes:
        token_ids: Token of each node, the root first.
        parents: Parent of each node.
        depth: Depth of each node.
        paths: Nodes of each path below the root.
        draft_ids: ``[nodes, width]`` int64.
        draft_probs: ``[nodes, width]`` float64.
        forks: Nodes that several paths leave; None where they are not counted.
    """

    token_ids: list[int]
    parents: list[int]
    depth: list[int]
    paths: list[list[int]]
    draft_ids: NDArray[np.int64]
    draft_probs: NDArray[np.float64]
    forks: int | None = None


class GrowingTree(ABC):
    """A growing tree. Its nodes are numbered in the order found, the root first."""

    def __init__(self, root: int) -> None:
        """Start from the root, a token id."""
        self._token_ids = [root]
        self._parents = [0]
        self._depth = [0]

    @property
    @abstractmethod
    def max_paths(self) -> int:
        """Most paths a tree of this kind and size can have, whatever is drawn."""

    @abstractmethod
    def grow(
        self, frontier: Sequence[int], ids: NDArray[np.int64], values: NDArray[np.float64]
    ) -> list[int]:
        """Add children of the nodes ``frontier``; return the new nodes to grow from, in order.

        Args:
            frontier: Nodes of the deepest level.
            ids: ``[frontier, width]``, candidates for the children of each.
            values: ``[frontier, width]``, their probabilities, or log-probabilities for ``fixed``.
        """

    @abstractmethod
    def finish(self) -> GrownTree:
        """Return the tree."""

    def token_of(self, node: int) -> int:
        """Return a node's token id."""
        return self._token_ids[node]

    def parent_of(self, node: int) -> int:
        """Return a node's parent."""
        return self._parents[node]

    def tokens_to(self, node: int) -> list[int]:
        """Return the tokens below the root down to ``node``."""
        tokens: list[int] = []
        while node:
            tokens.append(self._token_ids[node])
            node = self._parents[node]
        return tokens[::-1]

    def _add(self, parent: int, token: int) -> int:
        self._token_ids.append(token)
        self._parents.append(parent)
        self._depth.append(self._depth[parent] + 1)
        return len(self._token_ids) - 1


class BestFirstTree(GrowingTree):
    """EAGLE-2's dynamic tree: the most probable nodes by the product of draft probabilities.

    Each level's ``beam`` best nodes are expanded by ``beam`` children; of all candidates the best
    ``budget`` are kept. A child's score never exceeds its parent's, so the kept set is a tree
    (EAGLE-2, arXiv 2406.16858, section 4). Nodes whose product is below ``min_confidence`` may be
    kept, but are not expanded.
    """

    def __init__(self, root: int, *, beam: int, budget: int, min_confidence: float = 0.0) -> None:
        super().__init__(root)
        self._beam = beam
        self._budget = budget
        self._floor = _log(min_confidence)
        self._scores = [0.0]

    @property
    def max_paths(self) -> int:
        """Every node may be a leaf."""
        return self._budget

    def grow(
        self, frontier: Sequence[int], ids: NDArray[np.int64], values: NDArray[np.float64]
    ) -> list[int]:
        """Add every candidate, ``values`` their log-probabilities; return the ``beam`` best."""
        first = len(self._token_ids)
        for parent, tokens, scores in zip(frontier, ids.tolist(), values.tolist(), strict=True):
            for token, score in zip(tokens, scores, strict=True):
                self._add(parent, token)
                self._scores.append(self._scores[parent] + score)
        new = range(first, len(self._token_ids))
        best = sorted(new, key=self._rank)[: self._beam]
        return sorted(node for node in best if not self._scores[node] < self._floor)

    def _rank(self, candidate: int) -> tuple[float, int]:
        score = self._scores[candidate]
        # NaN from a broken head compares with nothing, and would part children from their parents.
        return math.inf if math.isnan(score) else -score, candidate

    def finish(self) -> GrownTree:
        """Keep the best ``budget`` candidates, parents before children; a path for every leaf."""
        best = sorted(range(1, len(self._token_ids)), key=self._rank)[: self._budget]
        kept = [0, *sorted(best)]
        index = {candidate: node for node, candidate in enumerate(kept)}
        return fixed_tree(
            [self._token_ids[candidate] for candidate in kept],
            [index[self._parents[candidate]] for candidate in kept],
            [self._depth[candidate] for candidate in kept],
        )


class StaticTree(GrowingTree):
    """A tree whose shape is given in advance: EAGLE-1's (arXiv 2401.15077, section 3.2).

    A node of the shape is named by the ranks of the children that lead to it: (1, 0) is the most
    likely child of the root's second most likely one. A node whose rank the vocabulary does not
    have is left out, with all below it. So is all below a node where the product of probabilities
    down to it is less than ``min_confidence``.
    """

    def __init__(self, root: int, shape: Shape, *, min_confidence: float = 0.0) -> None:
        super().__init__(root)
        self._shape = shape
        self._floor = _log(min_confidence)
        self._ranks: list[tuple[int, ...]] = [()]
        self._scores = [0.0]
        self._children: dict[tuple[int, ...], list[int]] = {}
        for ranks in shape:
            self._children.setdefault(ranks[:-1], []).append(ranks[-1])

    @property
    def max_paths(self) -> int:
        """A path for every leaf, or for its nearest ancestor that exists."""
        return len(self._shape)

    def grow(
        self, frontier: Sequence[int], ids: NDArray[np.int64], values: NDArray[np.float64]
    ) -> list[int]:
        """Add the children the shape names; ``values`` are their log-probabilities."""
        new = []
        for parent, tokens, scores in zip(frontier, ids.tolist(), values.tolist(), strict=True):
            for rank in self._children[self._ranks[parent]]:
                if rank >= len(tokens):
                    continue
                node = self._add(parent, tokens[rank])
                self._ranks.append((*self._ranks[parent], rank))
                self._scores.append(self._scores[parent] + scores[rank])
                if self._ranks[node] in self._children and not self._scores[node] < self._floor:
                    new.append(node)
        return new

    def finish(self) -> GrownTree:
        """Return the tree; a path for every leaf."""
        return fixed_tree(self._token_ids, self._parents, self._depth)


def fixed_tree(token_ids: Sequence[int], parents: Sequence[int], depth: Sequence[int]) -> GrownTree:
    """Return a tree of distribution ``fixed``: no draft distributions, and a path for every leaf."""
    inner = set(parents)
    leaves = [node for node in range(1, len(token_ids)) if node not in inner]
    return GrownTree(
        token_ids=list(token_ids),
        parents=list(parents),
        depth=list(depth),
        paths=[_path_to(leaf, parents, depth[leaf]) for leaf in leaves],
        draft_ids=np.zeros((len(token_ids), 0), dtype=np.int64),
        draft_probs=np.zeros((len(token_ids), 0)),
    )


def _log(confidence: float) -> float:
    return math.log(confidence) if confidence > 0 else -math.inf


def _path_to(node: int, parents: Sequence[int], depth: int) -> list[int]:
    path = [node]
    while len(path) < depth:
        path.append(parents[path[-1]])
    return path[::-1]


def stack_trees(
    trees: Sequence[GrownTree], draft_sampling: DraftSampling, *, paths: int, length: int
) -> DraftTree:
    """Pad the trees of a batch, on the host: nodes to the largest tree's, paths to a given size.

    Args:
        trees: The trees.
        draft_sampling: How their children arose.
        paths: Number of paths to pad to.
        length: Length of a path to pad to. A verifier finds its random numbers by the place of a
            path, so these two must depend on the plan alone and not on the batch.
    """
    batch, nodes = len(trees), max(len(tree.token_ids) for tree in trees)
    width = trees[0].draft_ids.shape[1]
    lists = np.zeros((3, batch, nodes), dtype=np.int64)
    path_nodes = np.zeros((batch, paths, length), dtype=np.int64)
    path_lengths = np.zeros((batch, paths), dtype=np.int64)
    draft_ids = np.zeros((batch, nodes, width), dtype=np.int64)
    draft_probs = np.zeros((batch, nodes, width))
    for b, tree in enumerate(trees):
        count = len(tree.token_ids)
        lists[:, b, :count] = tree.token_ids, tree.parents, tree.depth
        for k, path in enumerate(tree.paths):
            path_nodes[b, k, : len(path)] = path
            path_nodes[b, k, len(path) :] = path[-1]
            path_lengths[b, k] = len(path)
        draft_ids[b, :count], draft_probs[b, :count] = tree.draft_ids, tree.draft_probs
    token_ids, parents, depth = torch.from_numpy(lists)
    forks = [tree.forks for tree in trees if tree.forks is not None]
    return DraftTree(
        draft_sampling=draft_sampling,
        token_ids=token_ids,
        parents=parents,
        depth=depth,
        num_nodes=torch.tensor([len(tree.token_ids) for tree in trees]),
        path_nodes=torch.from_numpy(path_nodes),
        path_lengths=torch.from_numpy(path_lengths),
        draft_ids=torch.from_numpy(draft_ids),
        draft_probs=torch.from_numpy(draft_probs),
        forks=max(forks) if len(forks) == batch else None,
    )


# Trees whose tokens are drawn from the distributions they carry: one class per draft distribution.
#
# A tree of K paths of length L has its own matrix of uniform numbers ``[K, L]``, by its request and
# step; column d draws the children of nodes of depth d. Which number a draw uses depends on what was
# drawn before, never on its own outcome, and none is used twice.


class SampledTree(GrowingTree):
    """A tree of drawn tokens, with the distributions its nodes' children were drawn from."""

    def __init__(
        self,
        root: int,
        uniforms: NDArray[np.float64],
        width: int,
        *,
        min_confidence: float = 0.0,
    ) -> None:
        """Start from the root.

        Args:
            root: Token id of the root.
            uniforms: ``[paths, length]`` float64 in [0, 1).
            width: Size of the draft distributions' support.
            min_confidence: A path ends where its confidence falls below this, which depends on the
                tokens down to there, before the next is drawn.
        """
        super().__init__(root)
        self._min_confidence = min_confidence
        paths, length = uniforms.shape
        self._uniforms = uniforms
        self._paths: list[list[int]] = [[]]
        self._forks: int | None = None
        self._draft_ids = np.zeros((1 + paths * length, width), dtype=np.int64)
        self._draft_probs = np.zeros((1 + paths * length, width))

    @property
    def max_paths(self) -> int:
        """Most paths: one for each row of numbers."""
        return len(self._uniforms)

    def grow(
        self, frontier: Sequence[int], ids: NDArray[np.int64], values: NDArray[np.float64]
    ) -> list[int]:
        """Draw children of ``frontier`` from ``values``, the probabilities of ``ids``."""
        nodes = list(frontier)
        self._draft_ids[nodes], self._draft_probs[nodes] = ids, values
        new = self._extend(nodes, self._uniforms[:, self._depth[nodes[0]]])
        if self._min_confidence == 0:
            return new
        return [node for node in new if self._confidence(node) >= self._min_confidence]

    def _confidence(self, node: int) -> float:
        """Return the product of the draft probabilities of the tokens down to ``node``."""
        if node == 0:
            return 1.0
        parent = self.parent_of(node)
        own = self._draft_ids[parent] == self.token_of(node)
        return self._confidence(parent) * float(self._draft_probs[parent, own].sum())

    @abstractmethod
    def _extend(self, frontier: Sequence[int], uniforms: NDArray[np.float64]) -> list[int]:
        """Extend the paths that end at ``frontier``; return the new nodes to grow from."""

    def finish(self) -> GrownTree:
        """Return the tree with the distributions its nodes' children were drawn from."""
        nodes = len(self._token_ids)
        return GrownTree(
            self._token_ids,
            self._parents,
            self._depth,
            self._paths,
            self._draft_ids[:nodes],
            self._draft_probs[:nodes],
            self._forks,
        )


class IidTree(SampledTree):
    """Draft sampling ``iid``: the trie of K paths drawn independently, each with its own row of numbers.

    Paths with the same prefix share a node and its distribution, and continue to draw independently. None
    is dropped or cut because of a drawn token, as that would change the distribution of the tokens: a
    path only stops before a token.
    """

    def __init__(
        self,
        root: int,
        uniforms: NDArray[np.float64],
        width: int,
        *,
        min_confidence: float = 0.0,
    ) -> None:
        super().__init__(root, uniforms, width, min_confidence=min_confidence)
        self._paths = [[] for _ in uniforms]
        self._forks: int = 0

    def _extend(self, frontier: Sequence[int], uniforms: NDArray[np.float64]) -> list[int]:
        ending: dict[int, list[int]] = {node: [] for node in frontier}
        for k, path in enumerate(self._paths):
            ending.get(path[-1] if path else 0, []).append(k)
        self._forks += sum(len(paths) > 1 for paths in ending.values())
        new: list[int] = []
        for parent, paths in ending.items():
            children: dict[int, int] = {}
            chosen = pick_indices(self._draft_probs[parent], uniforms[paths])
            for k, token in zip(paths, self._draft_ids[parent, chosen].tolist(), strict=True):
                if token not in children:
                    children[token] = self._add(parent, token)
                self._paths[k].append(children[token])
            new += children.values()
        return new


class BranchingTree(SampledTree):
    """A tree in which siblings are different drafts: one path for each leaf, depth first.

    Siblings are numbered, and their paths listed, in the order drawn.
    """

    def _extend(self, frontier: Sequence[int], uniforms: NDArray[np.float64]) -> list[int]:
        numbers = iter(uniforms)
        first = len(self._token_ids)
        paths = []
        for path in self._paths:
            node = path[-1] if path else 0
            if node not in frontier:
                paths.append(path)
                continue
            tokens = self._draft_ids[node, self._draw(node, numbers)].tolist()
            paths += [[*path, self._add(node, token)] for token in tokens]
        self._paths = paths
        return list(range(first, len(self._token_ids)))

    @abstractmethod
    def _draw(self, node: int, numbers: Iterator[float]) -> list[int]:
        """Draw the children of ``node``: places in its distribution, in draft order, at least one."""

    def _fork(self, node: int) -> int:
        """Return how many drafts a node gets: K at the root, one below, so K paths in all."""
        return 1 if node else len(self._uniforms)

    def _popular(self, node: int) -> list[int]:
        """Return the places of a node's possible tokens: most likely first, ties by token id.

        Verifiers use this order to find the tokens that were not drawn at random.
        """
        probs = self._draft_probs[node]
        order = np.lexsort((self._draft_ids[node], -probs))
        return [place for place in order.tolist() if probs[place] != 0]


class WorTree(BranchingTree):
    """Draft sampling ``wor``: the root's K children are drawn without replacement; each continues as one path.

    This gives K paths with different first tokens, fewer where the root's distribution has a smaller
    support.
    """

    def _draw(self, node: int, numbers: Iterator[float]) -> list[int]:
        left = self._draft_probs[node].copy()
        drawn: list[int] = []
        while len(drawn) < self._fork(node) and left.any():
            drawn.append(pick_index(left, next(numbers)))
            left[drawn[-1]] = 0
        return drawn


class GreedyTree(BranchingTree):
    """Draft sampling ``greedy``: the root's K - 1 most likely tokens, and one drawn from the rest of its distribution.

    Each continues as one path whose tokens are drawn from their whole distributions, which is ``greedy``
    with one child and none fixed. If the root's distribution has a support of K - 1 tokens or fewer, all of
    them are children.
    """

    def _draw(self, node: int, numbers: Iterator[float]) -> list[int]:
        kept = self._popular(node)[: self._fork(node) - 1]
        rest = self._draft_probs[node].copy()
        rest[kept] = 0
        return [*kept, pick_index(rest, next(numbers))] if rest.any() else kept


class HubTree(BranchingTree):
    """Draft sampling ``hub``: pairs below the ``K // 2`` most likely nodes of each level, so K a level.

    A pair is a token drawn from the distribution and the hub, its most likely token; or, where the hub
    itself was drawn, the hub and a token drawn from the rest, if there is any (SpecHub,
    arXiv 2411.05289). Nodes are ranked by the product of draft probabilities along their path. The
    ranking looks at siblings too, but only at what was drawn before a node's own children. So
    whichever nodes go on, their children are such pairs, and a rule that decides node by node from
    the root down needs no more. K is at least 2; an odd K counts as K - 1.
    """

    @property
    def max_paths(self) -> int:
        """A pair turns one path into two."""
        paths, length = self._uniforms.shape
        return 1 + int(paths // 2 * length)

    def _extend(self, frontier: Sequence[int], uniforms: NDArray[np.float64]) -> list[int]:
        nodes = super()._extend(frontier, uniforms)
        scores = {node: self._confidence(node) for node in nodes}
        best = sorted(nodes, key=lambda node: -scores[node])
        return sorted(best[: len(uniforms) // 2])

    def _draw(self, node: int, numbers: Iterator[float]) -> list[int]:
        probs = self._draft_probs[node]
        hub = self._popular(node)[0]
        first = pick_index(probs, next(numbers))
        if first != hub:
            return [first, hub]
        rest = probs.copy()
        rest[hub] = 0
        return [hub, pick_index(rest, next(numbers))] if rest.any() else [hub]


# Which tree a plan and a draft distribution ask for.


_SAMPLED: Mapping[DraftSampling, type[SampledTree]] = MappingProxyType(
    {
        DraftSampling.IID: IidTree,
        DraftSampling.WOR: WorTree,
        DraftSampling.GREEDY: GreedyTree,
        DraftSampling.HUB: HubTree,
    }
)

GROWN_SAMPLINGS = frozenset({*_SAMPLED, DraftSampling.FIXED})
"""Distributions of the trees that are grown from distributions of the next token."""


def start_trees(
    requests: Sequence[Request], plan: Plan, draft_sampling: DraftSampling, vocab: int
) -> Sequence[GrowingTree]:
    """Start a tree at each request's last token.

    Args:
        requests: The requests, for their random numbers.
        plan: The plan they share.
        draft_sampling: How children arise.
        vocab: Tokens that can be drafted.
    """
    return [
        _start(request, plan, draft_sampling, support(plan, draft_sampling, vocab))
        for request in requests
    ]


def support(plan: Plan, draft_sampling: DraftSampling, vocab: int) -> int:
    """Return the number of candidates a level's distributions keep."""
    if draft_sampling is not DraftSampling.FIXED:
        return plan.list_width(vocab)
    if plan.shape:
        return min(1 + max(max(ranks) for ranks in plan.shape), vocab)
    return min(plan.fixed_beam, vocab)


def _start(request: Request, plan: Plan, draft_sampling: DraftSampling, width: int) -> GrowingTree:
    root = request.token_ids[-1]
    if draft_sampling is not DraftSampling.FIXED:
        numbers = request.stream.draw(request.step, Purpose.DRAFT, plan.paths * plan.depth)
        uniforms = numbers.reshape(plan.paths, plan.depth)
        return _SAMPLED[draft_sampling](root, uniforms, width, min_confidence=plan.min_confidence)
    if plan.shape:
        return StaticTree(root, plan.shape, min_confidence=plan.min_confidence)
    return BestFirstTree(
        root,
        beam=plan.fixed_beam,
        budget=plan.fixed_nodes,
        min_confidence=plan.min_confidence,
    )


# Growing the draft trees of a batch level by level: distributions, children, a forward of new nodes.


ProbsOf = Callable[[Tensor, list[int]], DraftProbs]
"""Takes logits ``[rows, draft_vocab]`` and each request's number of rows; returns their distributions."""

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
class ProbsSettings:
    """What turns the logits of a step into its draft distributions.

    Attributes:
        params: The request's own warping at the plan's draft temperature.
        width: Candidates kept.
    """

    params: SamplingParams
    width: int

    @classmethod
    def of(cls, request: Request, vocab: int) -> Self:
        """Return the settings of a request's steps; ``vocab`` tokens can be drafted."""
        return cls(draft_params(request.params, request.plan), request.plan.list_width(vocab))


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
    settings: ProbsSettings


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
    draft_sampling: DraftSampling,
    draft_to_target: Tensor,
    logits: Tensor,
    follow: FollowNodes,
) -> DraftTree:
    """Draft one tree per request.

    Args:
        requests: The requests.
        plan: The plan they share.
        draft_sampling: How children arise.
        draft_to_target: ``[draft_vocab]`` int64, the target's id of each draft token.
        logits: ``[requests, draft_vocab]``, of what follows the roots.
        follow: A forward of new nodes.
    """
    vocab = len(draft_to_target)
    trees = start_trees(requests, plan, draft_sampling, vocab)
    dists = probs_of(
        requests, plan, draft_sampling, support(plan, draft_sampling, vocab), draft_to_target
    )
    grow_trees(trees, plan.depth, logits, dists, follow)
    return stack_trees(
        [tree.finish() for tree in trees],
        draft_sampling,
        paths=trees[0].max_paths,
        length=plan.depth,
    )


def replayed_probs(
    logits: Tensor, settings: Sequence[ProbsSettings], draft_to_target: Tensor
) -> DraftProbs:
    """Return the distributions of rows of different steps, padded with probability 0 to the widest.

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
        dists = draft_dists(logits[members], warping, width=width, draft_to_target=draft_to_target)
        ids[members, :width], probs[members, :width] = dists.ids, dists.probs
    return DraftProbs(ids, probs)


def grow_trees(
    trees: Sequence[GrowingTree], depth: int, logits: Tensor, dists: ProbsOf, follow: FollowNodes
) -> None:
    """Grow every tree to ``depth``, or until no tree grows.

    Args:
        trees: The trees, one per request.
        depth: Levels to grow.
        logits: ``[trees, draft_vocab]``, of what follows the roots.
        dists: The distributions of a level.
        follow: A forward of new nodes.
    """
    frontiers: list[list[int]] = [[0] for _ in trees]
    for level in range(depth):
        counts = [len(frontier) for frontier in frontiers]
        drawn = dists(logits, counts)
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


def probs_of(
    requests: Sequence[Request],
    plan: Plan,
    draft_sampling: DraftSampling,
    width: int,
    draft_to_target: Tensor,
) -> ProbsOf:
    """Return the distributions of a level: what ``draft_sampling`` draws from, or log-probabilities for ``fixed``.

    Args:
        requests: The requests, for their warping.
        plan: Their plan.
        draft_sampling: How children arise.
        width: Candidates to keep.
        draft_to_target: ``[draft_vocab]`` int64, the target's id of each draft token.
    """
    params = [draft_params(request.params, plan) for request in requests]

    def fixed(logits: Tensor, rows_each: list[int]) -> DraftProbs:  # noqa: ARG001
        return log_probs(logits, width=width, draft_to_target=draft_to_target)

    def drawn(logits: Tensor, rows_each: list[int]) -> DraftProbs:
        settings = WarpSettings.of(params, rows_each, device=logits.device)
        return draft_dists(logits, settings, width=width, draft_to_target=draft_to_target)

    return fixed if draft_sampling is DraftSampling.FIXED else drawn


def draft_temperature(params: SamplingParams, plan: Plan) -> float:
    """Return the temperature of a request's draft distributions: the plan's multiple of the request's own.

    Kept between :data:`eaglegbv.sampling.COLDEST` and :data:`eaglegbv.sampling.HOTTEST`, the limits of
    :class:`SamplingParams`. Drafts may follow any distribution, so nothing is lost by it.
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


# Draft trees grown on the device, level by level, in tensors of fixed sizes.
#
# :mod:`eaglegbv.drafters.tree_growth` and :mod:`eaglegbv.drafters.tree_growth` grow trees on the
# host for one request. This module does the same for a batch, with the same numbers and in the same
# order, and reads nothing on the host: paths that have ended continue as meaningless rows, and
# missing nodes are padding. Every path of a sampled tree keeps its own row, even where several share
# a node; the first of them determines the node's distribution.


SAMPLINGS = frozenset(
    {DraftSampling.IID, DraftSampling.WOR, DraftSampling.GREEDY, DraftSampling.FIXED}
)
"""Distributions of the trees that grow here; trees of distribution ``fixed`` must have no given shape."""

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
    def begin(self, dists: DraftProbs) -> Frontier:
        """Give the roots children, by the distributions of what follows them, ``[batch, width]``."""

    @abstractmethod
    def grow(self, dists: DraftProbs) -> Frontier:
        """Give the frontier children; ``dists`` are ``[batch * rows, width]``."""

    @abstractmethod
    def finish(self) -> DraftTree:
        """Return the trees."""


def start_device_trees(
    plan: Plan,
    draft_sampling: DraftSampling,
    roots: Tensor,
    uniforms: Tensor,
    *,
    grow: Grow = grow_paths,
) -> DeviceTrees:
    """Start trees at ``roots`` ``[batch]`` int64.

    Args:
        plan: The plan.
        draft_sampling: How children arise, one of :data:`SAMPLINGS`.
        roots: Token ids.
        uniforms: ``[batch, paths, depth]`` float64, each request's numbers; not read for ``fixed``.
        grow: :func:`grow_paths`, compiled or not; not called for ``fixed``.
    """
    if draft_sampling is DraftSampling.FIXED:
        return BeamTrees(plan, roots)
    return SampledTrees(plan, draft_sampling, roots, uniforms, grow)


class SampledTrees(DeviceTrees):
    """Trees of drawn tokens: distributions ``iid``, ``wor`` and ``greedy``.

    What each level adds is kept, and assembled into trees when all levels have been drawn.
    """

    def __init__(
        self, plan: Plan, draft_sampling: DraftSampling, roots: Tensor, uniforms: Tensor, grow: Grow
    ) -> None:
        """See :func:`start_device_trees`."""
        batch, paths, depth = uniforms.shape
        self.rows = paths
        self._draft_sampling = draft_sampling
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

    def begin(self, dists: DraftProbs) -> Frontier:
        """See :meth:`DeviceTrees.begin`."""
        ids, probs = (x.repeat_interleave(self.rows, dim=0) for x in (dists.ids, dists.probs))
        if self._draft_sampling is DraftSampling.IID:
            return self.grow(DraftProbs(ids, probs))
        places, alive = self._distinct(dists)
        self._paths = self._paths._replace(alive=alive)
        shape = (*places.shape, -1)
        return self._extend(extended(self._paths, places, ids.view(shape), probs.view(shape)))

    def grow(self, dists: DraftProbs) -> Frontier:
        """See :meth:`DeviceTrees.grow`."""
        paths = self._paths
        numbers = self._numbers[len(self._grown)]
        if (
            self._draft_sampling is not DraftSampling.IID
        ):  # paths that are alive take the numbers in order
            numbers = numbers.gather(1, (paths.alive.cumsum(1) - 1).clamp(min=0))
        return self._extend(self._grow(paths, dists.ids, dists.probs, numbers))

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
            draft_sampling=self._draft_sampling,
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

    def _distinct(self, dists: DraftProbs) -> tuple[Tensor, Tensor]:
        """Return the places ``[batch, paths]`` of the roots' distinct children, and which exist."""
        left, paths = dists.probs, self.rows
        places, there = [], []
        popular: Sequence[Tensor] = ()
        if self._draft_sampling is DraftSampling.GREEDY:
            popular = most_likely_first(dists.ids, dists.probs)[:, : paths - 1].unbind(1)
        for path in range(paths):
            there.append((left > 0).any(dim=1))
            if path < len(popular):
                place = popular[path]
            else:
                # ``greedy`` draws once, with its first number; ``wor`` uses one after another.
                number = self._numbers[0][
                    :, 0 if self._draft_sampling is DraftSampling.GREEDY else path
                ]
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
    """Draft sampling ``fixed``: the most probable nodes that a beam finds (EAGLE-2's dynamic tree)."""

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

    def begin(self, dists: DraftProbs) -> Frontier:
        """See :meth:`DeviceTrees.begin`."""
        return self.grow(dists)

    def grow(self, dists: DraftProbs) -> Frontier:
        """See :meth:`DeviceTrees.grow`; ``dists.probs`` are log-probabilities."""
        batch, rows = self._nodes.shape
        width = dists.ids.shape[-1]
        self._level += 1
        shape = (batch, rows, width)
        parents = self._nodes.unsqueeze(2).expand(shape)
        above = self._all.scores.gather(1, self._nodes).unsqueeze(2)
        new = _Candidates(
            token_ids=dists.ids.reshape(batch, -1),
            parents=parents.reshape(batch, -1),
            depth=torch.full_like(parents, self._level).reshape(batch, -1),
            scores=(above + dists.probs.view(shape)).reshape(batch, -1),
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
            draft_sampling=DraftSampling.FIXED,
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
