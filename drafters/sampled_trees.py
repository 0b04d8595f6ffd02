"""Trees whose tokens are drawn from the laws they carry: one class per draft law.

A tree of K paths of length L has its own matrix of uniform numbers ``[K, L]``, by its request and
step; column d draws the children of nodes of depth d. Which number a draw uses depends on what was
drawn before, never on its own outcome, and none is used twice.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from eaglegbv.drafters.draft_law import pick_index, pick_indices
from eaglegbv.drafters.tree_builder import GrowingTree, GrownTree


class SampledTree(GrowingTree):
    """A tree of drawn tokens, with the laws its nodes' children were drawn from."""

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
            width: Size of the draft laws' support.
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
        """Return the tree with the laws its nodes' children were drawn from."""
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
    """Law ``iid``: the trie of K paths drawn independently, each with its own row of numbers.

    Paths with the same prefix share a node and its law, and continue to draw independently. None
    is dropped or cut because of a drawn token, as that would change the law of the tokens: a
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
        """Draw the children of ``node``: places in its law, in draft order, at least one."""

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
    """Law ``wor``: the root's K children are drawn without replacement; each continues as one path.

    This gives K paths with different first tokens, fewer where the root's law has a smaller
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
    """Law ``greedy``: the root's K - 1 most likely tokens, and one drawn from the rest of its law.

    Each continues as one path whose tokens are drawn from their whole laws, which is ``greedy``
    with one child and none fixed. If the root's law has a support of K - 1 tokens or fewer, all of
    them are children.
    """

    def _draw(self, node: int, numbers: Iterator[float]) -> list[int]:
        kept = self._popular(node)[: self._fork(node) - 1]
        rest = self._draft_probs[node].copy()
        rest[kept] = 0
        return [*kept, pick_index(rest, next(numbers))] if rest.any() else kept


class HubTree(BranchingTree):
    """Law ``hub``: pairs below the ``K // 2`` most likely nodes of each level, so K a level.

    A pair is a token drawn from the law and the hub, its most likely token; or, where the hub
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
