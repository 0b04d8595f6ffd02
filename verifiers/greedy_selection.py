"""Selecting a path of a tree of greedy drafts: the most likely children, and one drawn."""

import torch
from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.drafted_path import DraftedPath, length_of, nodes_along, rows_at
from eaglegbv.verifiers.path_choice import preferred_path
from eaglegbv.verifiers.popularity import PopularTree, tail_law
from eaglegbv.verifiers.siblings import (
    child_counts,
    drafted_nodes,
    drawn_child_keys,
    numbers_at,
)


def select_greedy(tree: DraftTree, target: TargetLaw, uniforms: Tensor) -> DraftedPath:
    """Return the selected path, with the law b along it.

    The drawn child t keeps what the target wants of it, b = min(p, r) on the tail law r; the kept
    children share the rest in proportion to p. t is taken with probability b(t) / r(t).

    Args:
        tree: Trees of law ``greedy``.
        target: The target's laws.
        uniforms: ``[batch, length, paths, 2]``; at a node of depth d number (d, 0, 1) decides
            whether t is taken, (d, 0, 0) draws one of the others, in the order of first paths.
    """
    popular = PopularTree.of(tree, target)
    kept = popular.first_places(child_counts(tree) - 1)
    tail = tail_law(popular.draft, kept)
    law = _law(popular, kept, tail)

    is_kept = popular.at_tokens(kept.to(torch.int64)) > 0
    drafted = drafted_nodes(tree)
    take = popular.at_tokens(law) / popular.at_tokens(tail)
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
        draft=rows_at(law, steps),
        target=rows_at(popular.target, steps),
        chosen=popular.places.gather(1, nodes[:, 1:]),
    )


def _law(popular: PopularTree, kept: Tensor, tail: Tensor) -> Tensor:
    """Return b, ``[batch, nodes, width]``."""
    overlap = torch.minimum(popular.target, tail).masked_fill(kept, 0.0)
    rest = 1 - overlap.sum(dim=2, keepdim=True)
    wanted = popular.target * kept
    mass = wanted.sum(dim=2, keepdim=True)
    return torch.where(mass > 0, overlap + rest * (wanted / mass), tail)
