"""The children of the nodes of a draft tree: which come first, how many, which one is drawn."""

import torch
from torch import Tensor

from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.constants import counting
from eaglegbv.verifiers.path_choice import steps_of


def drafted_nodes(tree: DraftTree) -> Tensor:
    """Return ``[batch, nodes]`` bool: real nodes other than the root."""
    return tree.depth > 0


def child_counts(tree: DraftTree) -> Tensor:
    """Return ``[batch, nodes]`` int64: the number of different children."""
    ones = drafted_nodes(tree).to(torch.int64)
    return torch.zeros_like(tree.parents).scatter_add_(1, tree.parents, ones)


def first_paths(tree: DraftTree) -> Tensor:
    """Return ``[batch, nodes]`` int64: number of the first path through each node, else K."""
    paths = counting(tree.paths, tree.parents.device).view(1, -1, 1)
    paths = torch.where(steps_of(tree), paths, tree.paths)
    return torch.full_like(tree.parents, tree.paths).scatter_reduce(
        1, tree.path_nodes.flatten(1), paths.flatten(1), "amin"
    )


def sum_over_siblings(tree: DraftTree, values: Tensor) -> Tensor:
    """Return, for each node, the sum of ``values`` ``[batch, nodes]`` over its parent's children.

    ``values`` must be 0 at the root and at padding nodes.
    """
    sums = torch.zeros_like(values).scatter_add_(1, tree.parents, values)
    return sums.gather(1, tree.parents)


def sibling_ranks(tree: DraftTree, values: Tensor) -> Tensor:
    """Return, for each node, how many of its siblings rank below it.

    Args:
        tree: The draft trees.
        values: ``[batch, nodes]`` float64; the smaller one ranks below, and among equals the one
            of the smaller token id.

    Returns:
        ``[batch, nodes]`` int64.
    """
    own, other = values.unsqueeze(2), values.unsqueeze(1)
    earlier = tree.token_ids.unsqueeze(1) < tree.token_ids.unsqueeze(2)
    below = (other < own) | ((other == own) & earlier)
    return (below & _siblings(tree)).sum(dim=2)


def drawn_child_keys(tree: DraftTree, weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one child of every node by inverse CDF, in the order of the first path through each.

    Args:
        tree: The draft trees.
        weights: ``[batch, nodes]`` float64 of each node as a child, 0 at padding nodes.
        uniforms: ``[batch, nodes]`` float64: the number that draws among a node's siblings, the
            same for all of them.

    Returns:
        ``[batch, nodes]`` int64 keys: the largest among siblings, 1 ... K, is the child drawn; 0 is
        never drawn.
    """
    first = first_paths(tree)
    siblings = _siblings(tree)
    earlier = siblings & (first.unsqueeze(1) <= first.unsqueeze(2))
    cumulative = (earlier * weights.unsqueeze(1)).sum(dim=2)
    total = (siblings * cumulative.unsqueeze(1)).amax(dim=2)
    threshold = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.where((cumulative > threshold) & (weights > 0), tree.paths - first, 0)


def numbers_at(tree: DraftTree, uniforms: Tensor) -> Tensor:
    """Return ``[batch, nodes]``: for each node, the number of its parent's depth.

    Args:
        tree: The draft trees.
        uniforms: ``[batch, length]``, one number for each depth.
    """
    return uniforms.gather(1, (tree.depth - 1).clamp(min=0))


def _siblings(tree: DraftTree) -> Tensor:
    """Return ``[batch, nodes, nodes]`` bool: node j is drafted and node i has the same parent."""
    same = tree.parents.unsqueeze(2) == tree.parents.unsqueeze(1)
    return same & drafted_nodes(tree).unsqueeze(1)
