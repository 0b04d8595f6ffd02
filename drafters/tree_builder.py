"""Growing one request's draft tree level by level, on the host."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from eaglegbv.config import Shape
from eaglegbv.tree import DraftTree, Law


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
    """Return a tree of law ``fixed``: no draft laws, and a path for every leaf."""
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


def stack_trees(trees: Sequence[GrownTree], law: Law, *, paths: int, length: int) -> DraftTree:
    """Pad the trees of a batch, on the host: nodes to the largest tree's, paths to a given size.

    Args:
        trees: The trees.
        law: How their children arose.
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
        law=law,
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
