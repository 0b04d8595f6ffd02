"""Rules that walk down a tree and stop at the node where they leave it.

What happens at a node does not depend on the nodes above it, so such a rule decides at all nodes at
once, and the walk then follows its decisions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.base import Verdict, VerifyUniforms
from eaglegbv.verifiers.correction import Residual, correction_token
from eaglegbv.verifiers.drafted_path import rooted, rows_at
from eaglegbv.verifiers.path_choice import steps_of


@dataclass(frozen=True, slots=True)
class Decisions:
    """Where the walk goes from each node, and what follows if it stops there.

    Attributes:
        children: ``[batch, nodes]`` int64, the child accepted at each node, 0 where it stops.
        weight: ``[batch, nodes]`` float64; the residual is ``max(weight * p - draft, 0)``.
        draft: ``[batch, nodes, width]`` float64, over ``ids``.
        ids: ``[batch, nodes, width]`` int64.
    """

    children: Tensor
    weight: Tensor
    draft: Tensor
    ids: Tensor


def descend(
    tree: DraftTree, decisions: Decisions, target: TargetLaw, uniforms: VerifyUniforms
) -> Verdict:
    """Follow ``decisions`` from the root and draw the correction token where they stop."""
    node = torch.zeros_like(tree.num_nodes)
    accepted, visited = node, []
    for _ in range(tree.length):
        child = decisions.children.gather(1, node.unsqueeze(1)).squeeze(1)
        accepted = accepted + (child > 0)
        node = torch.where(child > 0, child, node)
        visited.append(node)
    at = node.unsqueeze(1)
    residual = Residual(
        nodes=node,
        weight=decisions.weight.gather(1, at).squeeze(1),
        ids=rows_at(decisions.ids, at).squeeze(1),
        draft=rows_at(decisions.draft, at).squeeze(1),
    )
    return Verdict(
        path_nodes=torch.stack(visited, dim=1),
        accepted=accepted,
        token_ids=correction_token(residual, target, uniforms.correction),
    )


@dataclass(frozen=True, slots=True)
class DraftCopies:
    """The drafts that one path carries, one below each of its nodes, ``[batch, length]`` each.

    Attributes:
        parents: int64, the nodes it was drawn at.
        children: int64, the nodes it leads to.
        real: bool, False past the path's end.
        uniforms: float64, the numbers of their acceptance tests: depth * paths + path.
    """

    parents: Tensor
    children: Tensor
    real: Tensor
    uniforms: Tensor


def draft_copies(tree: DraftTree, uniforms: Tensor) -> list[DraftCopies]:
    """Return the drafts of every path, in the order drawn.

    Args:
        tree: The draft trees.
        uniforms: ``[batch, paths * length]``.
    """
    numbers = uniforms[:, : tree.paths * tree.length].view(tree.batch, tree.length, tree.paths)
    real = steps_of(tree)
    return [
        DraftCopies(
            parents=rooted(tree.path_nodes[:, k])[:, :-1],
            children=tree.path_nodes[:, k],
            real=real[:, k],
            uniforms=numbers[:, :, k],
        )
        for k in range(tree.paths)
    ]


def numbers_of_children(tree: DraftTree, first: Tensor, uniforms: Tensor) -> Tensor:
    """Return ``[batch, nodes]``: the acceptance number of each node as its parent's child.

    Args:
        tree: The draft trees.
        first: ``[batch, nodes]`` int64, the path whose number each node uses.
        uniforms: ``[batch, at least paths * length]``.
    """
    at = (tree.depth - 1).clamp(min=0) * tree.paths + first.clamp(max=tree.paths - 1)
    return uniforms.gather(1, at)
