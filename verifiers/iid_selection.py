"""Selecting a path of a tree of independent paths by exact optimal transport at every node."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.constants import counting_down
from eaglegbv.verifiers.drafted_path import DraftedPath
from eaglegbv.verifiers.path_choice import preferred_path, steps_of
from eaglegbv.verifiers.ranked_tree import RankedTree
from eaglegbv.verifiers.transport import Drafts, labels, transport


def select_iid(tree: DraftTree, probs: Tensor, uniforms: Tensor) -> DraftedPath:
    """Return the selected path, with the laws b of the selections along it.

    Args:
        tree: Trees of law ``iid``.
        probs: ``[batch, nodes, width]`` float64, the target law at ``tree.draft_ids``.
        uniforms: ``[batch, length, paths, 2]``: the draft that path k carries below a node of
            depth d finds its partner by number (d, k, 0) and takes its label by (d, k, 1).
    """
    ranked = RankedTree.of(tree, probs)
    steps = PathSteps.of(tree)
    plan = transport(ranked.laws, steps.draft_counts(tree))
    label = labels(
        ranked.laws,
        plan,
        Drafts(nodes=steps.parents, ranks=ranked.ranks.gather(1, steps.children)),
        uniforms.transpose(1, 2).flatten(1, 2),
    )
    # The highest label wins, the first drafted among equals: one number says both.
    first = counting_down(tree.paths, label.device).unsqueeze(1)
    score = torch.add(first, label.view_as(tree.path_nodes), alpha=tree.paths).flatten(1)
    keys = torch.zeros_like(tree.parents).scatter_reduce(
        1, steps.children, score * steps.real, "amax"
    )
    return ranked.path(preferred_path(tree, keys), plan.law)


@dataclass(frozen=True, slots=True)
class PathSteps:
    """Every step of every path, path after path: ``[batch, paths * length]`` each.

    Attributes:
        parents: int64, the node the step leaves.
        children: int64, the node it reaches.
        real: bool, False past a path's end, where the other two mean nothing.
    """

    parents: Tensor
    children: Tensor
    real: Tensor

    @classmethod
    def of(cls, tree: DraftTree) -> "PathSteps":
        """List the steps of ``tree``."""
        children = tree.path_nodes.flatten(1)
        return cls(tree.parents.gather(1, children), children, steps_of(tree).flatten(1))

    def draft_counts(self, tree: DraftTree) -> Tensor:
        """Return ``[batch, nodes]`` int64: the number of drafts n at each node."""
        counts = torch.zeros_like(tree.parents)
        return counts.scatter_add_(1, self.parents, self.real.to(torch.int64))
