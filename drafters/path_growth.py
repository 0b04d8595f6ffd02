"""One more level of drawn paths as a function of tensors: most of the work of a recorded loop.

Plans affect only the sizes of tensors here, so one compiled function serves all of them. Compiling
fuses some forty small kernels into a handful.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from eaglegbv.compiling import EXAMPLE_WIDTH, check_backend, compile_graph, making_graphs
from eaglegbv.first_place import first_place

_LAST = 1 << 40
"""Sorts after every real key."""


class Paths(NamedTuple):
    """The ends of the paths of a batch of trees.

    Attributes:
        node: ``[batch, paths]`` int64, the last node of each.
        leader: ``[batch, paths]`` int64, the first path that ends at the same node.
        alive: ``[batch, paths]`` bool, False where a path has ended.
        nodes: ``[batch]`` int64, nodes of each tree.
    """

    node: Tensor
    leader: Tensor
    alive: Tensor
    nodes: Tensor

    @classmethod
    def at_root(cls, roots: Tensor, paths: int) -> Self:
        """Return ``paths`` paths of each tree, all at its root; ``roots`` ``[batch]``."""
        node = roots.new_zeros((len(roots), paths))
        alive = torch.ones_like(node, dtype=torch.bool)
        return cls(node, torch.zeros_like(node), alive, torch.ones_like(roots))


class Grown(NamedTuple):
    """What a level adds to the paths of a batch of trees.

    Attributes:
        paths: Their new ends; all that were alive still are.
        token_ids: ``[batch, paths]`` int64, the tokens they are extended by.
        leads: ``[batch, paths]`` bool, True where a path is the first at a new node.
        chances: ``[batch, paths]`` float64, the tokens' probabilities.
        ids: ``[batch, paths, width]`` int64, the tokens of the laws they were drawn from.
        probs: ``[batch, paths, width]`` float64, these laws.
    """

    paths: Paths
    token_ids: Tensor
    leads: Tensor
    chances: Tensor
    ids: Tensor
    probs: Tensor


Grow: TypeAlias = Callable[[Paths, Tensor, Tensor, Tensor], Grown]
"""See :func:`grow_paths`."""

_SIZES = (1, 1), (1, 3), (7, 1), (7, 3)
"""Numbers of trees and paths to make graphs from, which treat a size of 1 as a constant."""


def grow_paths(paths: Paths, ids: Tensor, probs: Tensor, uniforms: Tensor) -> Grown:
    """Extend paths by tokens drawn from the laws of their leaders.

    Args:
        paths: Their ends.
        ids: ``[batch * paths, width]`` int64, the tokens of each path's law.
        probs: ``[batch * paths, width]`` float64, their probabilities.
        uniforms: ``[batch, paths]`` float64 in [0, 1), the numbers that draw the tokens.
    """
    batch, count = uniforms.shape
    at = paths.leader.unsqueeze(2).expand(-1, -1, ids.shape[1])
    ids, probs = (x.view(batch, count, -1).gather(1, at) for x in (ids, probs))
    return extended(paths, pick_places(probs, uniforms), ids, probs)


@lru_cache(maxsize=8)
def growth(backend: str | None, device: torch.device) -> Grow:
    """Return :func:`grow_paths`, compiled now by a backend of ``torch.compile`` unless it is None.

    It is compiled once for all engines.

    Raises:
        InvalidArgument: There is no such backend.
    """
    if backend is None:
        return grow_paths
    check_backend(backend)
    compiled = compile_graph(grow_paths, backend)

    def grow(paths: Paths, ids: Tensor, probs: Tensor, uniforms: Tensor) -> Grown:
        if ids.shape[1] == 1:  # nothing is drawn, and separate graphs would be needed
            return grow_paths(paths, ids, probs, uniforms)
        if not (ids.is_inference() and ids.is_contiguous()):  # a vocabulary shared by all rows
            ids = ids.clone(memory_format=torch.contiguous_format)
        found: Grown = compiled(paths, ids, probs, uniforms)
        return found

    with torch.inference_mode(), making_graphs():
        for batch, count in _SIZES:
            ids = torch.arange(EXAMPLE_WIDTH, device=device).repeat(batch * count, 1)
            probs = torch.full_like(ids, 1 / EXAMPLE_WIDTH, dtype=torch.float64)
            uniforms = torch.zeros((batch, count), dtype=torch.float64, device=device)
            roots = torch.zeros(batch, dtype=torch.int64, device=device)
            grow(Paths.at_root(roots, count), ids, probs, uniforms)
    return grow


def extended(paths: Paths, places: Tensor, ids: Tensor, probs: Tensor) -> Grown:
    """Extend paths that are alive by the tokens at ``places`` ``[batch, paths]`` of their laws."""
    at = places.unsqueeze(2)
    tokens, chances = (x.gather(2, at).squeeze(2) for x in (ids, probs))
    alive, parent, number = paths.alive, paths.node, paths.node.shape[1]
    same = (parent.unsqueeze(2) == parent.unsqueeze(1)) & alive.unsqueeze(1)
    first = first_place(same & (tokens.unsqueeze(2) == tokens.unsqueeze(1)))
    numbers = torch.arange(number, device=parent.device)
    leads = alive & (first == numbers)
    # New nodes are numbered by their parents, then by their first paths.
    key = torch.where(leads, parent * number + numbers, _LAST)
    rank = (key.unsqueeze(1) < key.unsqueeze(2)).sum(dim=2)
    node = (paths.nodes.unsqueeze(1) + rank).gather(1, first)
    after = Paths(
        node=torch.where(alive, node, parent),
        leader=torch.where(alive, first, numbers),
        alive=alive,
        nodes=paths.nodes + leads.sum(dim=1),
    )
    return Grown(after, tokens, leads, chances, ids, probs)


def pick_places(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return the places that ``uniforms`` ``[...]`` select in ``probs`` ``[..., width]``.

    By inverse CDF; never a place of probability 0, whatever the rounding of a parallel sum, unless
    there is no other.
    """
    cumulative = probs.cumsum(dim=-1) * (probs > 0)
    total = cumulative.amax(dim=-1)
    threshold = uniforms * total
    limit = torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total)))
    return first_place(cumulative > limit.unsqueeze(-1))
