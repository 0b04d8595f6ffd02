"""The numbers by which rules decide, node by node, to show them; no verdict depends on them."""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.drafted_path import DraftedPath

NodeFigures: TypeAlias = Mapping[str, Tensor]
"""Numbers by their letter in the documentation, ``[batch, nodes]`` float64 each; NaN at nodes for
which the rule had none."""


def along_path(tree: DraftTree, path: DraftedPath, values: Tensor) -> Tensor:
    """Return the numbers along a path at the places of its nodes in the tree.

    Args:
        tree: The draft trees.
        path: A path of each.
        values: ``[batch, length]`` float64, at depths 1 ... length; those past a path's end are
            ignored.

    Returns:
        ``[batch, nodes]`` float64, NaN at all other nodes.
    """
    placed = torch.full_like(tree.depth, torch.nan, dtype=torch.float64)
    for step, real in enumerate(_steps(path)):
        here = path.nodes[:, step + 1].unsqueeze(1)
        value = torch.where(real, values[:, step : step + 1], placed.gather(1, here))
        placed = placed.scatter(1, here, value)
    return placed


def at_children(tree: DraftTree, path: DraftedPath, laws: Tensor) -> Tensor:
    """Return the probability of every child of a path's nodes, by the law at that node.

    Args:
        tree: The draft trees.
        path: A path of each.
        laws: ``[batch, length, width]`` float64, over the path's support.

    Returns:
        ``[batch, nodes]`` float64, NaN at all other nodes.
    """
    placed = torch.full_like(tree.depth, torch.nan, dtype=torch.float64)
    for step, real in enumerate(_steps(path)):
        child = (tree.parents == path.nodes[:, step : step + 1]) & (tree.depth == step + 1) & real
        same = path.ids[:, step].unsqueeze(1) == tree.token_ids.unsqueeze(2)
        probs = torch.where(same, laws[:, step].unsqueeze(1), 0.0).sum(dim=2)
        placed = torch.where(child, probs, placed)
    return placed


def _steps(path: DraftedPath) -> list[Tensor]:
    """Return for each step ``[batch, 1]`` bool: whether the path takes it."""
    return [(path.lengths > step).unsqueeze(1) for step in range(path.draft.shape[1])]
