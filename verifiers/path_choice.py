"""Choosing one of a tree's paths by a preference among the children of every node."""

import torch
from torch import Tensor

from eaglegbv.tree import DraftTree


def steps_of(tree: DraftTree) -> Tensor:
    """Return ``[batch, paths, length]`` bool: the path has a node at depth 1, 2, ..."""
    steps = torch.arange(tree.length, device=tree.token_ids.device)
    return steps < tree.path_lengths.unsqueeze(2)


def preferred_path(tree: DraftTree, keys: Tensor) -> Tensor:
    """Return ``[batch]`` int64: the first path that at every node goes on to the preferred child.

    That is the path whose sequence of keys is lexicographically largest.

    Args:
        tree: The draft trees.
        keys: ``[batch, nodes]`` int64, at least 0; among siblings the largest is preferred.
    """
    batch, paths, length = tree.path_nodes.shape
    along = keys.gather(1, tree.path_nodes.flatten(1)).view(batch, paths, length)
    along = torch.where(steps_of(tree), along, -1)
    # With powers of two as weights the first difference outweighs all that follow.
    weights = 2 ** torch.arange(length - 1, -1, -1, device=keys.device)
    signs = (along.unsqueeze(2) - along.unsqueeze(1)).sign()
    margins = (signs * weights).sum(dim=3)
    return margins.amin(dim=2).argmax(dim=1)
