"""Selecting a path of a tree whose children are not random."""

import torch
from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.drafted_path import DraftedPath, rooted
from eaglegbv.verifiers.path_choice import preferred_path, steps_of


def select_fixed(tree: DraftTree, target: TargetLaw, uniforms: Tensor) -> DraftedPath:
    """Return the selected path, with the law b along it: p restricted to the children.

    Where p has no mass on a node's children, b is uniform on them: no child is accepted then.

    Args:
        tree: Trees of law ``fixed``.
        target: The target's laws.
        uniforms: ``[batch, length, paths, 2]``; number (depth, 0, 0) draws the child of a node of
            that depth, children in the order of the first path through each.
    """
    index = torch.arange(tree.nodes, device=tree.token_ids.device)
    drafted = (index > 0) & (index < tree.num_nodes.unsqueeze(1))
    probs = target_of_tokens(tree, target) * drafted
    # [batch, parent, child]: which nodes are a node's children.
    below = (tree.parents.unsqueeze(1) == index.unsqueeze(1)) & drafted.unsqueeze(1)
    law = _restricted(probs, below)
    keys = _drawn_children(tree, law, below, uniforms[:, :, 0, 0])

    number = preferred_path(tree, keys)
    at = number.view(-1, 1, 1).expand(-1, 1, tree.length)
    nodes = rooted(tree.path_nodes.gather(1, at).squeeze(1))
    rows = nodes[:, :-1].unsqueeze(2).expand(-1, -1, tree.nodes)
    return DraftedPath(
        nodes=nodes,
        lengths=tree.path_lengths.gather(1, number.unsqueeze(1)).squeeze(1),
        ids=tree.token_ids.unsqueeze(1).expand(-1, tree.length, -1),
        draft=law.gather(1, rows),
        target=probs.unsqueeze(1) * below.gather(1, rows),
        chosen=nodes[:, 1:],
    )


def target_of_tokens(tree: DraftTree, target: TargetLaw) -> Tensor:
    """Return p of each node's token given its parent, ``[batch, nodes]`` float64."""
    rows = target.rows.gather(1, tree.parents)
    logits = target.logits[rows, tree.token_ids].to(torch.float64)
    return torch.exp(logits - target.log_normaliser[rows])


def _restricted(probs: Tensor, below: Tensor) -> Tensor:
    """Return ``[batch, parent, child]``: p(child) / p(children), or 1 / number of children."""
    weights = probs.unsqueeze(1) * below
    total = weights.sum(dim=2, keepdim=True)
    count = below.sum(dim=2, keepdim=True).clamp(min=1)
    return torch.where(total > 0, weights / total, below / count)


def _drawn_children(tree: DraftTree, law: Tensor, below: Tensor, uniforms: Tensor) -> Tensor:
    """Return keys ``[batch, nodes]``: the largest among siblings is the child drawn."""
    paths = torch.arange(tree.paths, device=law.device).view(1, -1, 1).expand_as(tree.path_nodes)
    paths = torch.where(steps_of(tree), paths, tree.paths)
    first = torch.full_like(tree.parents, tree.paths).scatter_reduce(
        1, tree.path_nodes.flatten(1), paths.flatten(1), "amin"
    )
    earlier = (first.unsqueeze(1) <= first.unsqueeze(2)).to(law.dtype)
    cumulative = torch.einsum("bvc,bdc->bvd", law, earlier) * below
    total = cumulative.amax(dim=2)
    # Leaves draw nothing; the index of their number is clamped into range.
    at = tree.depth.clamp(max=tree.length - 1)
    threshold = torch.minimum(
        uniforms.gather(1, at) * total, torch.nextafter(total, torch.zeros_like(total))
    )
    eligible = ((cumulative > threshold.unsqueeze(2)) & (law > 0)).any(dim=1)
    return torch.where(eligible, tree.paths + 1 - first, 0)
