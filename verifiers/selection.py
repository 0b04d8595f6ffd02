"""Selecting a path of a tree of independent paths by exact optimal transport at every fork.

A fork is a node with several drafts. At any other node the only draft is selected, with the draft
distribution as the distribution of the selection, so nothing has to be ranked there. At each depth below the root
there are at most half as many forks as paths, which bounds the work without looking at the tree:

    2 paths of length 3:   root -- a -- b -- c     forks: the root; and a, if both paths begin
                              \\             \\           with it; and so on: 3 of 7 nodes at most
                               a' - b' - c'
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from eaglegbv.devices import first_place
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.paths import (
    DraftedPath,
    PopularTree,
    child_counts,
    counting,
    counting_down,
    drafted_nodes,
    drawn_child_keys,
    length_of,
    nodes_along,
    numbers_at,
    preferred_path,
    probs_along,
    rows_at,
    steps_of,
    sum_over_siblings,
    tail_probs,
)
from eaglegbv.verifiers.transport import Drafts, RankedProbs, Transport, labels, transport


def select_iid(tree: DraftTree, target: TargetProbs, uniforms: Tensor) -> DraftedPath:
    """Return the selected path, with the distributions b of the selections along it.

    Args:
        tree: Trees of distribution ``iid``.
        target: The target's distributions.
        uniforms: ``[batch, length, paths, 2]``: the draft that path k carries below a node of
            depth d finds its partner by number (d, k, 0) and takes its label by (d, k, 1).
    """
    steps = PathSteps.of(tree)
    forks = Forks.of(tree, target, steps.draft_counts(tree))
    label = forks.labels(tree, steps, uniforms.transpose(1, 2).flatten(1, 2))
    # The highest label wins, the first drafted among equals: one number encodes both. An only child
    # wins with any number.
    first = counting_down(tree.paths, label.device).unsqueeze(1)
    score = torch.add(first, label.view_as(tree.path_nodes), alpha=tree.paths).flatten(1)
    keys = torch.zeros_like(tree.parents).scatter_reduce(
        1, steps.children, score * steps.real, "amax"
    )
    return forks.path(tree, target, preferred_path(tree, keys))


def most_forks(paths: int, length: int) -> int:
    """Return how many forks trees of ``paths`` paths of up to ``length`` nodes may have."""
    return 1 + (length - 1) * (paths // 2)


def bounded_forks(tree: DraftTree) -> int:
    """Return how many nodes to rank where forks are not counted."""
    return min(most_forks(tree.paths, tree.length), tree.nodes)


def _room_for_forks(tree: DraftTree, drafts: Tensor) -> int:
    """Return how many nodes to rank: the number of forks, at least 1, or a bound on it."""
    if tree.forks is not None:
        return max(1, tree.forks)
    if drafts.device.type == "cpu":  # where reading waits for nothing
        return max(1, int((drafts > 1).sum(dim=1).amax()))
    return bounded_forks(tree)


@dataclass(frozen=True, slots=True)
class PathSteps:
    """Every step of every path, path after path: ``[batch, paths * length]`` each.

    Attributes:
        parents: int64, the node the step leaves.
        children: int64, the node it reaches.
        real: bool, False past a path's end, where the other two are meaningless.
    """

    parents: Tensor
    children: Tensor
    real: Tensor

    @classmethod
    def of(cls, tree: DraftTree) -> Self:
        """List the steps of ``tree``."""
        children = tree.path_nodes.flatten(1)
        return cls(tree.parents.gather(1, children), children, steps_of(tree).flatten(1))

    def draft_counts(self, tree: DraftTree) -> Tensor:
        """Return ``[batch, nodes]`` int64: the number of drafts n at each node."""
        counts = torch.zeros_like(tree.parents)
        return counts.scatter_add_(1, self.parents, self.real.to(torch.int64))


@dataclass(frozen=True, slots=True)
class Forks:
    """The forks of a batch of trees, and other nodes where a tree has fewer.

    Attributes:
        places: ``[batch, nodes]`` int64, the place of each node among ``dists``; the number of distributions
            at nodes that have none.
        dists: ``[batch, forks, width]``, ranked.
        plan: Their transport.
    """

    places: Tensor
    dists: RankedProbs
    plan: Transport

    @classmethod
    def of(cls, tree: DraftTree, target: TargetProbs, drafts: Tensor) -> Self:
        """Take the nodes with the most ``drafts``, ``[batch, nodes]`` int64."""
        number = _room_for_forks(tree, drafts)
        counts, nodes = drafts.topk(number, dim=1)
        ids = rows_at(tree.draft_ids, nodes)
        dists = RankedProbs.of(
            ids, rows_at(tree.draft_probs, nodes), probs_along(target, nodes, ids)
        )
        numbers = counting(number, nodes.device).expand_as(nodes)
        places = torch.full_like(drafts, number).scatter_(1, nodes, numbers)
        return cls(places, dists, transport(dists, counts))

    def labels(self, tree: DraftTree, steps: PathSteps, uniforms: Tensor) -> Tensor:
        """Return ``[batch, paths * length]`` int64: the label of each draft.

        Drafts of nodes that are not forks get an arbitrary number, at least 0.

        Args:
            tree: The trees.
            steps: Their paths' steps.
            uniforms: ``[batch, paths * length, 2]``.
        """
        parents = self._at(steps.parents)
        tokens = tree.token_ids.gather(1, steps.children)
        # A token's first place is its own: entries of draft probability zero come last.
        ranks = first_place(rows_at(self.dists.ids, parents) == tokens.unsqueeze(2))
        return labels(self.dists, self.plan, Drafts(parents, ranks), uniforms)

    def path(self, tree: DraftTree, target: TargetProbs, number: Tensor) -> DraftedPath:
        """Return one path of each tree, ``number`` ``[batch]`` int64, with the distributions along it."""
        nodes = nodes_along(tree, number)
        steps, tokens = nodes[:, :-1], tree.token_ids.gather(1, nodes[:, 1:])
        places = self._at(steps)
        forked = (self.places.gather(1, steps) < self.dists.ids.shape[1]).unsqueeze(2)
        ids = torch.where(forked, rows_at(self.dists.ids, places), rows_at(tree.draft_ids, steps))
        draft = rows_at(tree.draft_probs, steps)
        draft = torch.where(forked, rows_at(self.plan.dist, places), draft)
        # A distribution b may round to 0 at the token selected.
        found = (ids == tokens.unsqueeze(2)) & (forked | (draft > 0))
        return DraftedPath(
            nodes=nodes,
            lengths=length_of(tree, number),
            ids=ids,
            draft=draft,
            target=probs_along(target, steps, ids),
            chosen=first_place(found),
        )

    def _at(self, nodes: Tensor) -> Tensor:
        """Return the places of ``nodes`` ``[batch, ...]``.

        For nodes that are not forks, it is an arbitrary fork's place, which callers mask.
        """
        return self.places.gather(1, nodes).clamp_(max=self.dists.ids.shape[1] - 1)


# Selecting a path of a tree whose children are not random.


def select_fixed(tree: DraftTree, target: TargetProbs, uniforms: Tensor) -> DraftedPath:
    """Return the selected path, with the distribution b along it: p restricted to the children.

    Where p has no mass on a node's children, b is uniform on them: no child is accepted then.

    Args:
        tree: Trees of distribution ``fixed``.
        target: The target's distributions.
        uniforms: ``[batch, length, paths, 2]``; number (depth, 0, 0) draws the child of a node of
            that depth, with children in the order of the first path through each.
    """
    drafted = drafted_nodes(tree)
    probs = target_of_tokens(tree, target) * drafted
    mass = sum_over_siblings(tree, probs)
    count = child_counts(tree).gather(1, tree.parents)
    dist = torch.where(mass > 0, probs / mass, drafted / count)
    keys = drawn_child_keys(tree, dist, numbers_at(tree, uniforms[:, :, 0, 0]))

    number = preferred_path(tree, keys)
    nodes = nodes_along(tree, number)
    children = (tree.parents.unsqueeze(1) == nodes[:, :-1].unsqueeze(2)) & drafted.unsqueeze(1)
    return DraftedPath(
        nodes=nodes,
        lengths=length_of(tree, number),
        ids=tree.token_ids.unsqueeze(1).expand(-1, tree.length, -1),
        draft=dist.unsqueeze(1) * children,
        target=probs.unsqueeze(1) * children,
        chosen=nodes[:, 1:],
    )


def target_of_tokens(tree: DraftTree, target: TargetProbs) -> Tensor:
    """Return p of each node's token given its parent, ``[batch, nodes]`` float64."""
    rows = target.rows.gather(1, tree.parents)
    return target.probs_in(rows, tree.token_ids.unsqueeze(2)).squeeze(2)


# Selecting a path of a tree of greedy drafts: the most likely children, and one drawn.


def select_greedy(tree: DraftTree, target: TargetProbs, uniforms: Tensor) -> DraftedPath:
    """Return the selected path, with the distribution b along it.

    The drawn child t keeps what the target wants of it, b = min(p, r) on the tail distribution r; the kept
    children share the rest in proportion to p. t is taken with probability b(t) / r(t).

    Args:
        tree: Trees of distribution ``greedy``.
        target: The target's distributions.
        uniforms: ``[batch, length, paths, 2]``; at a node of depth d number (d, 0, 1) decides
            whether t is taken, (d, 0, 0) draws one of the others, in the order of first paths.
    """
    popular = PopularTree.of(tree, target)
    kept = popular.first_places(child_counts(tree) - 1)
    tail = tail_probs(popular.draft, kept)
    dist = _dist(popular, kept, tail)

    is_kept = popular.at_tokens(kept.to(torch.int64)) > 0
    drafted = drafted_nodes(tree)
    take = popular.at_tokens(dist) / popular.at_tokens(tail)
    taken = drafted & ~is_kept & (numbers_at(tree, uniforms[:, :, 0, 1]) < take)
    weights = popular.at_tokens(popular.target) * (is_kept & drafted)
    keys = drawn_child_keys(tree, weights, numbers_at(tree, uniforms[:, :, 0, 0]))
    keys = torch.where(taken, tree.paths + 1, keys)

    number = preferred_path(tree, keys)
    nodes = nodes_along(tree, number)
    steps = nodes[:, :-1]
    return DraftedPath(
        nodes=nodes,
        lengths=length_of(tree, number),
        ids=rows_at(popular.ids, steps),
        draft=rows_at(dist, steps),
        target=rows_at(popular.target, steps),
        chosen=popular.places.gather(1, nodes[:, 1:]),
    )


def _dist(popular: PopularTree, kept: Tensor, tail: Tensor) -> Tensor:
    """Return b, ``[batch, nodes, width]``."""
    overlap = torch.minimum(popular.target, tail).masked_fill(kept, 0.0)
    rest = 1 - overlap.sum(dim=2, keepdim=True)
    wanted = popular.target * kept
    mass = wanted.sum(dim=2, keepdim=True)
    return torch.where(mass > 0, overlap + rest * (wanted / mass), tail)
