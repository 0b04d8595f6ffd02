"""Selecting a path of a tree of independent paths by exact optimal transport at every node."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.drafted_path import DraftedPath, rooted
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
    first = torch.arange(tree.paths - 1, -1, -1, device=label.device)
    score = label * tree.paths + first.repeat_interleave(tree.length)
    keys = torch.zeros_like(tree.parents).scatter_reduce(
        1, steps.children, torch.where(steps.real, score, 0), "amax"
    )
    return ranked.path(preferred_path(tree, keys), plan.law)


@dataclass(frozen=True, slots=True)
class PathSteps:
    """Every step of every path, path after path: ``[batch, paths * length]`` each.

    Attributes:
        parents: int64, the node the step leaves.
        children: int64, the node it reaches.
        real: bool, False past a path's end.
    """

    parents: Tensor
    children: Tensor
    real: Tensor

    @classmethod
    def of(cls, tree: DraftTree) -> "PathSteps":
        """List the steps of ``tree``."""
        return cls(
            parents=rooted(tree.path_nodes)[:, :, :-1].flatten(1),
            children=tree.path_nodes.flatten(1),
            real=steps_of(tree).flatten(1),
        )

    def draft_counts(self, tree: DraftTree) -> Tensor:
        """Return ``[batch, nodes]`` int64: the number of drafts n at each node."""
        counts = torch.zeros_like(tree.parents)
        return counts.scatter_add_(1, self.parents, self.real.to(torch.int64))
