"""Choosing one of a tree's paths by a preference among the children of every node."""

import torch
from torch import Tensor

from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.constants import counting, powers_of_two


def steps_of(tree: DraftTree) -> Tensor:
    """Return ``[batch, paths, length]`` bool: whether the path has a node at depth 1, 2, ..."""
    return counting(tree.length, tree.path_lengths.device) < tree.path_lengths.unsqueeze(2)


def preferred_path(tree: DraftTree, keys: Tensor) -> Tensor:
    """Return ``[batch]`` int64: the first path that follows the preferred child at every node.

    That is the path whose sequence of keys is lexicographically largest.

    Args:
        tree: The draft trees.
        keys: ``[batch, nodes]`` int64, at least 0; among siblings the largest is preferred.
    """
    along = keys.gather(1, tree.path_nodes.flatten(1)).view_as(tree.path_nodes)
    margins = lexicographic_margins(torch.where(steps_of(tree), along, -1))
    return margins.amin(dim=2).argmax(dim=1)


def lexicographic_margins(keys: Tensor) -> Tensor:
    """Compare the rows of ``keys`` ``[batch, rows, length]`` int64 lexicographically, in pairs.

    Returns:
        ``[batch, rows, rows]`` int64: entry (i, j) has the sign of row i minus row j.
    """
    # With powers of two as weights the first difference outweighs all that follow.
    weights = powers_of_two(keys.shape[2], keys.device)
    signs = (keys.unsqueeze(2) - keys.unsqueeze(1)).sign()
    return (signs * weights).sum(dim=3)
