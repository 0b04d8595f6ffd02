"""Selecting a path of a tree whose children are not random."""

import torch
from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.drafted_path import DraftedPath, length_of, nodes_along
from eaglegbv.verifiers.path_choice import preferred_path
from eaglegbv.verifiers.siblings import (
    child_counts,
    drafted_nodes,
    drawn_child_keys,
    numbers_at,
    sum_over_siblings,
)


def select_fixed(tree: DraftTree, target: TargetLaw, uniforms: Tensor) -> DraftedPath:
    """Return the selected path, with the law b along it: p restricted to the children.

    Where p has no mass on a node's children, b is uniform on them: no child is accepted then.

    Args:
        tree: Trees of law ``fixed``.
        target: The target's laws.
        uniforms: ``[batch, length, paths, 2]``; number (depth, 0, 0) draws the child of a node of
            that depth, with children in the order of the first path through each.
    """
    drafted = drafted_nodes(tree)
    probs = target_of_tokens(tree, target) * drafted
    mass = sum_over_siblings(tree, probs)
    count = child_counts(tree).gather(1, tree.parents)
    law = torch.where(mass > 0, probs / mass, drafted / count)
    keys = drawn_child_keys(tree, law, numbers_at(tree, uniforms[:, :, 0, 0]))

    number = preferred_path(tree, keys)
    nodes = nodes_along(tree, number)
    children = (tree.parents.unsqueeze(1) == nodes[:, :-1].unsqueeze(2)) & drafted.unsqueeze(1)
    return DraftedPath(
        nodes=nodes,
        lengths=length_of(tree, number),
        ids=tree.token_ids.unsqueeze(1).expand(-1, tree.length, -1),
        draft=law.unsqueeze(1) * children,
        target=probs.unsqueeze(1) * children,
        chosen=nodes[:, 1:],
    )


def target_of_tokens(tree: DraftTree, target: TargetLaw) -> Tensor:
    """Return p of each node's token given its parent, ``[batch, nodes]`` float64."""
    rows = target.rows.gather(1, tree.parents)
    return target.probs_in(rows, tree.token_ids.unsqueeze(2)).squeeze(2)
