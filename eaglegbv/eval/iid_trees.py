"""Trees of independent paths, drawn for many requests at once, and uniforms for judging trees."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import VerifyUniforms


@dataclass(frozen=True, slots=True)
class PathTrees:
    """Shapes of trees whose equal prefixes share a node, padded to the largest possible size.

    Attributes:
        token_ids: ``[batch, nodes]`` int64; the root's is 0.
        parents: ``[batch, nodes]`` int64.
        depth: ``[batch, nodes]`` int64.
        num_nodes: ``[batch]`` int64.
        path_nodes: ``[batch, paths, length]`` int64.
        places: ``[batch, nodes]`` int64, the place (see :func:`draw_trees`) of each node; padding
            repeats the root's.
    """

    token_ids: Tensor
    parents: Tensor
    depth: Tensor
    num_nodes: Tensor
    path_nodes: Tensor
    places: Tensor

    def with_laws(self, draft_probs: Tensor) -> DraftTree:
        """Return the trees with the laws from which they were drawn, ``[batch, nodes, vocab]``."""
        size, paths, length = self.path_nodes.shape
        return DraftTree(
            law=Law.IID,
            token_ids=self.token_ids,
            parents=self.parents,
            depth=self.depth,
            num_nodes=self.num_nodes,
            path_nodes=self.path_nodes,
            path_lengths=torch.full((size, paths), length),
            draft_ids=torch.arange(draft_probs.shape[2]).expand_as(draft_probs),
            draft_probs=draft_probs,
        )


def draw_trees(size: int, paths: int, length: int, draw: Callable[[Tensor], Tensor]) -> PathTrees:
    """Draw ``size`` trees of ``paths`` independent paths of ``length`` tokens.

    At first every path has a place at every depth; paths with equal prefixes use the place of the
    first of them. Then the places in use are moved to the front and become the nodes.

    Args:
        size: Number of trees.
        paths: Paths of a tree.
        length: Tokens of a path.
        draw: Draws the next token of every path, ``[size, paths]`` int64, given the places that the
            paths have reached, of the same shape; called once for each depth.
    """
    count = 1 + paths * length
    token_ids = torch.zeros((size, count), dtype=torch.int64)
    parents, depth = torch.zeros_like(token_ids), torch.zeros_like(token_ids)
    used = torch.zeros_like(token_ids, dtype=torch.bool)
    used[:, 0] = True
    chain, here = [], torch.zeros((size, paths), dtype=torch.int64)
    for d in range(length):
        drawn = draw(here)
        same = (here.unsqueeze(2) == here.unsqueeze(1)) & (drawn.unsqueeze(2) == drawn.unsqueeze(1))
        place = 1 + d * paths + same.int().argmax(dim=2)
        token_ids.scatter_(1, place, drawn)
        parents.scatter_(1, place, here)
        depth.scatter_(1, place, d + 1)
        used.scatter_(1, place, value=True)
        chain.append(place)
        here = place
    number = used.cumsum(dim=1) - 1
    order = (~used).int().argsort(dim=1, stable=True)
    real = torch.arange(count) < used.sum(dim=1, keepdim=True)

    def packed(values: Tensor) -> Tensor:
        return values.gather(1, order).where(real, 0)

    path_places = torch.stack(chain, dim=2)
    return PathTrees(
        token_ids=packed(token_ids),
        parents=packed(number.gather(1, parents)),
        depth=packed(depth),
        num_nodes=used.sum(dim=1),
        path_nodes=number.gather(1, path_places.flatten(1)).view_as(path_places),
        places=order.where(real, 0),
    )


def random_uniforms(tree: DraftTree, generator: torch.Generator) -> VerifyUniforms:
    """Return fresh uniform numbers for one verification of ``tree``."""

    def numbers(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    return VerifyUniforms(
        selection=numbers(tree.batch, tree.length, tree.paths, 2),
        acceptance=numbers(tree.batch, max(1, tree.paths * tree.length)),
        correction=numbers(tree.batch),
    )
