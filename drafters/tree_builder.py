"""Growing one request's draft tree level by level, on the host."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eaglegbv.drafters.draft_law import pick
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
    """

    token_ids: list[int]
    parents: list[int]
    depth: list[int]
    paths: list[list[int]]
    draft_ids: NDArray[np.int64]
    draft_probs: NDArray[np.float64]


class GrowingTree(ABC):
    """A tree in the making. Its nodes are numbered in the order found, the root first."""

    def __init__(self, root: int) -> None:
        """Start from the root, a token id."""
        self._token_ids = [root]
        self._parents = [0]
        self._depth = [0]

    @abstractmethod
    def grow(self, frontier: Sequence[int], ids: Tensor, values: Tensor) -> list[int]:
        """Add children of the nodes ``frontier``; return the new nodes to grow from, in order.

        Args:
            frontier: Nodes of the deepest level.
            ids: ``[frontier, width]`` int64, candidates for each one's children.
            values: ``[frontier, width]`` float64, what the law says of them.
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

    def _add(self, parent: int, token: int) -> int:
        self._token_ids.append(token)
        self._parents.append(parent)
        self._depth.append(self._depth[parent] + 1)
        return len(self._token_ids) - 1


class SampledTree(GrowingTree):
    """The trie of K paths drawn from the draft law, each with random numbers of its own.

    Paths with the same prefix share a node and its law, and go on drawing independently. Every
    path is grown to its full length: none is dropped after its tokens have been seen, which would
    change the law the tokens follow.
    """

    def __init__(self, root: int, uniforms: NDArray[np.float64], width: int) -> None:
        """Start from the root.

        Args:
            root: Token id of the root.
            uniforms: ``[paths, length]`` float64, the number each path draws with at each depth.
            width: Size of the draft laws' support.
        """
        paths, length = uniforms.shape
        super().__init__(root)
        self._paths: list[list[int]] = [[] for _ in range(paths)]
        self._draft_ids = np.zeros((1 + paths * length, width), dtype=np.int64)
        self._draft_probs = np.zeros((1 + paths * length, width))
        self._uniforms = uniforms

    def grow(self, frontier: Sequence[int], ids: Tensor, values: Tensor) -> list[int]:
        """Draw the next token of every path from ``values``, the probabilities of ``ids``."""
        nodes = list(frontier)
        self._draft_ids[nodes], self._draft_probs[nodes] = ids.numpy(), values.numpy()
        depth = self._depth[nodes[0]]
        children: dict[tuple[int, int], int] = {}
        for number, path in enumerate(self._paths):
            parent = path[-1] if path else 0
            choice = pick(self._draft_probs[parent], self._uniforms[number, depth])
            key = parent, int(self._draft_ids[parent, choice])
            if key not in children:
                children[key] = self._add(*key)
            path.append(children[key])
        return list(children.values())

    def finish(self) -> GrownTree:
        """Return the tree with the laws its nodes' children were drawn from."""
        nodes = len(self._token_ids)
        return GrownTree(
            self._token_ids,
            self._parents,
            self._depth,
            self._paths,
            self._draft_ids[:nodes],
            self._draft_probs[:nodes],
        )


class BestFirstTree(GrowingTree):
    """EAGLE-2's dynamic tree: the most probable nodes by the product of draft probabilities.

    Each level's ``beam`` best nodes are expanded by ``beam`` children; of all candidates the best
    ``budget`` are kept. A child's score never exceeds its parent's, so the kept set is a tree
    (EAGLE-2, arXiv 2406.16858, section 4).
    """

    def __init__(self, root: int, *, beam: int, budget: int) -> None:
        super().__init__(root)
        self._beam = beam
        self._budget = budget
        self._scores = [0.0]

    def grow(self, frontier: Sequence[int], ids: Tensor, values: Tensor) -> list[int]:
        """Add every candidate, ``values`` their log-probabilities; return the ``beam`` best."""
        first = len(self._token_ids)
        for parent, tokens, scores in zip(frontier, ids.tolist(), values.tolist(), strict=True):
            for token, score in zip(tokens, scores, strict=True):
                self._add(parent, token)
                self._scores.append(self._scores[parent] + score)
        new = range(first, len(self._token_ids))
        return sorted(sorted(new, key=self._rank)[: self._beam])

    def _rank(self, candidate: int) -> tuple[float, int]:
        score = self._scores[candidate]
        # A broken head's NaN compares with nothing and would tear children from their parents.
        return math.inf if math.isnan(score) else -score, candidate

    def finish(self) -> GrownTree:
        """Keep the best ``budget`` candidates, parents before children; a path for every leaf."""
        best = sorted(range(1, len(self._token_ids)), key=self._rank)[: self._budget]
        kept = [0, *sorted(best)]
        index = {candidate: node for node, candidate in enumerate(kept)}
        parents = [index[self._parents[candidate]] for candidate in kept]
        depth = [self._depth[candidate] for candidate in kept]
        leaves = [node for node in range(1, len(kept)) if node not in parents]
        return GrownTree(
            token_ids=[self._token_ids[candidate] for candidate in kept],
            parents=parents,
            depth=depth,
            paths=[_path_to(leaf, parents, depth[leaf]) for leaf in leaves],
            draft_ids=np.zeros((len(kept), 0), dtype=np.int64),
            draft_probs=np.zeros((len(kept), 0)),
        )


def _path_to(node: int, parents: Sequence[int], depth: int) -> list[int]:
    path = [node]
    while len(path) < depth:
        path.append(parents[path[-1]])
    return path[::-1]


def stack_trees(trees: Sequence[GrownTree], law: Law, *, device: torch.device) -> DraftTree:
    """Pad the trees of a batch to the largest."""
    nodes = max(len(tree.token_ids) for tree in trees)
    paths = max(len(tree.paths) for tree in trees)
    length = max(len(path) for tree in trees for path in tree.paths)

    def tensor(rows: list[list[int]] | list[list[list[int]]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=device)

    def flat(values: list[int]) -> list[int]:
        return values + [0] * (nodes - len(values))

    def square(tree: GrownTree) -> list[list[int]]:
        rows = [path + [path[-1]] * (length - len(path)) for path in tree.paths]
        return rows + [[0] * length] * (paths - len(rows))

    def stack(arrays: list[NDArray[np.int64]] | list[NDArray[np.float64]]) -> Tensor:
        padding = [(0, nodes - len(array)) for array in arrays]
        rows = [np.pad(a, (pad, (0, 0))) for a, pad in zip(arrays, padding, strict=True)]
        return torch.from_numpy(np.stack(rows)).to(device)

    return DraftTree(
        law=law,
        token_ids=tensor([flat(tree.token_ids) for tree in trees]),
        parents=tensor([flat(tree.parents) for tree in trees]),
        depth=tensor([flat(tree.depth) for tree in trees]),
        num_nodes=torch.tensor([len(tree.token_ids) for tree in trees], device=device),
        path_nodes=tensor([square(tree) for tree in trees]),
        path_lengths=tensor(
            [[len(p) for p in tree.paths] + [0] * (paths - len(tree.paths)) for tree in trees]
        ),
        draft_ids=stack([tree.draft_ids for tree in trees]),
        draft_probs=stack([tree.draft_probs for tree in trees]),
    )
