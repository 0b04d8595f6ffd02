"""Selecting a path of a tree of independent paths by exact optimal transport at every fork.

A fork is a node with several drafts. At any other node the only draft is selected, with the draft
law as the law of the selection, so nothing has to be ranked there. At each depth below the root
there are at most half as many forks as paths, which bounds the work without looking at the tree:

    2 paths of length 3:   root -- a -- b -- c     forks: the root; and a, if both paths begin
                              \\             \\           with it; and so on: 3 of 7 nodes at most
                               a' - b' - c'
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from eaglegbv.first_place import first_place
from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.constants import counting, counting_down
from eaglegbv.verifiers.correction import probs_along
from eaglegbv.verifiers.drafted_path import DraftedPath, length_of, nodes_along, rows_at
from eaglegbv.verifiers.path_choice import preferred_path, steps_of
from eaglegbv.verifiers.transport import Drafts, RankedLaws, Transport, labels, transport


def select_iid(tree: DraftTree, target: TargetLaw, uniforms: Tensor) -> DraftedPath:
    """Return the selected path, with the laws b of the selections along it.

    Args:
        tree: Trees of law ``iid``.
        target: The target's laws.
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
        places: ``[batch, nodes]`` int64, the place of each node among ``laws``; the number of laws
            at nodes that have none.
        laws: ``[batch, forks, width]``, ranked.
        plan: Their transport.
    """

    places: Tensor
    laws: RankedLaws
    plan: Transport

    @classmethod
    def of(cls, tree: DraftTree, target: TargetLaw, drafts: Tensor) -> Self:
        """Take the nodes with the most ``drafts``, ``[batch, nodes]`` int64."""
        number = _room_for_forks(tree, drafts)
        counts, nodes = drafts.topk(number, dim=1)
        ids = rows_at(tree.draft_ids, nodes)
        laws = RankedLaws.of(ids, rows_at(tree.draft_probs, nodes), probs_along(target, nodes, ids))
        numbers = counting(number, nodes.device).expand_as(nodes)
        places = torch.full_like(drafts, number).scatter_(1, nodes, numbers)
        return cls(places, laws, transport(laws, counts))

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
        ranks = first_place(rows_at(self.laws.ids, parents) == tokens.unsqueeze(2))
        return labels(self.laws, self.plan, Drafts(parents, ranks), uniforms)

    def path(self, tree: DraftTree, target: TargetLaw, number: Tensor) -> DraftedPath:
        """Return one path of each tree, ``number`` ``[batch]`` int64, with the laws along it."""
        nodes = nodes_along(tree, number)
        steps, tokens = nodes[:, :-1], tree.token_ids.gather(1, nodes[:, 1:])
        places = self._at(steps)
        forked = (self.places.gather(1, steps) < self.laws.ids.shape[1]).unsqueeze(2)
        ids = torch.where(forked, rows_at(self.laws.ids, places), rows_at(tree.draft_ids, steps))
        draft = rows_at(tree.draft_probs, steps)
        draft = torch.where(forked, rows_at(self.plan.law, places), draft)
        # A law b may round to 0 at the token selected.
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
        return self.places.gather(1, nodes).clamp_(max=self.laws.ids.shape[1] - 1)
