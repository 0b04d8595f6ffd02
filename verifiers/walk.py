"""Walks down a draft tree along tokens that do not depend on the drafts."""

from collections.abc import Callable

import torch
from torch import Tensor

from eaglegbv.first_place import first_place
from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.base import Verdict
from eaglegbv.verifiers.siblings import drafted_nodes


def walk(tree: DraftTree, next_token: Callable[[Tensor, int], Tensor]) -> Verdict:
    """Follow ``next_token`` from the root for as long as it names a child.

    Args:
        tree: The draft trees.
        next_token: Takes the nodes ``[batch]`` reached and their depth; returns a token for each.
    """
    drafted = drafted_nodes(tree)
    node = torch.zeros_like(tree.num_nodes)
    going = torch.ones_like(node, dtype=torch.bool)
    accepted, token, visited = node, node, []
    for depth in range(tree.length + 1):
        token = torch.where(going, next_token(node, depth), token)
        if depth == tree.length:
            break
        child = (tree.parents == node.unsqueeze(1)) & (tree.token_ids == token.unsqueeze(1))
        found = child & drafted
        going = going & found.any(dim=1)
        node = torch.where(going, first_place(found), node)
        accepted = accepted + going
        visited.append(node)
    return Verdict(path_nodes=torch.stack(visited, dim=1), accepted=accepted, token_ids=token)
