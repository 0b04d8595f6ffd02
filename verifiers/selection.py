"""Selecting a path of a tree by optimal transport at every node, with the distributions b along it.

Independent drafts: a fork is a node with several drafts. At any other node the only draft is
selected, and b is the draft distribution, so nothing has to be ranked there. Where K paths fork at
the root alone by intent, there are at most half as many forks as paths at each depth below it,
which bounds the work without looking at the tree:

    2 paths of length 3:   root -- a -- b -- c     forks: the root; and a, if both paths begin
                              \\             \\           with it; and so on: 3 of 7 nodes at most
                               a' - b' - c'
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from eaglegbv.devices import first_true, most_likely_first
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.paths import (
    DraftedPath,
    Path,
    child_counts,
    drafted_nodes,
    first_draws,
    over_nodes,
    places_of_tokens,
    preferred_path,
    probs_along,
    rows_at,
    siblings,
    target_of_tokens,
)
from eaglegbv.verifiers.transport import RankedProbs, Transport, labels, transport


def select_iid(tree: DraftTree, target: TargetProbs, uniforms: Tensor) -> DraftedPath:
    """Return the path selected among independent drafts.

    Draw k below a node of depth d finds its partner by number (d, k, 0) of ``uniforms`` ``[batch,
    length, drafts, 2]`` and takes its label by (d, k, 1).
    """
    forks = Forks.of(tree, target, tree.draft_counts())
    children = tree.draws.flatten(1)
    parents = forks.at(tree.parents.gather(1, children))
    tokens = tree.token_ids.gather(1, children)
    # A token's first place is its own: entries of draft probability zero come last.
    ranks = first_true(rows_at(forks.plan.ids, parents) == tokens.unsqueeze(2))
    label = labels(forks.plan, parents, ranks, uniforms.flatten(1, 2))
    # The highest label wins, the first drafted among equals: one number encodes both. An only child
    # wins with any number.
    first = torch.arange(tree.drafts - 1, -1, -1, device=label.device)
    score = torch.add(first, label.view_as(tree.draws), alpha=tree.drafts)
    keys = over_nodes(tree, children, (score * (tree.draws > 0)).flatten(1), "amax", 0)
    return forks.path(tree, target, preferred_path(tree, keys))


def bounded_forks(tree: DraftTree) -> int:
    """Return how many nodes to rank where forks are not counted: as many as there may be."""
    if not tree.columns:
        return tree.nodes
    return min(1 + (tree.length - 1) * (tree.drafts // 2), tree.nodes)


def _room_for_forks(tree: DraftTree, drafts: Tensor) -> int:
    """Return how many nodes to rank: the number of forks, at least 1, or a bound on it."""
    if tree.forks is not None:
        return max(1, tree.forks)
    if drafts.device.type == "cpu":  # where reading waits for nothing
        return max(1, int((drafts > 1).sum(dim=1).amax()))
    return bounded_forks(tree)


@dataclass(frozen=True, slots=True)
class Forks:
    """The forks of a batch of trees, and other nodes where a tree has fewer."""

    # [batch, nodes] int64, the place of each node in ``plan``; the number of its nodes for
    # those it does not have
    places: Tensor
    plan: Transport  # [batch, forks, width], their transport

    @classmethod
    def of(cls, tree: DraftTree, target: TargetProbs, drafts: Tensor) -> Self:
        """Take the nodes with the most ``drafts``, ``[batch, nodes]`` int64."""
        number = _room_for_forks(tree, drafts)
        counts, nodes = drafts.topk(number, dim=1)
        ids = rows_at(tree.draft_ids, nodes)
        probs = RankedProbs.of(
            ids, rows_at(tree.draft_probs, nodes), probs_along(target, nodes, ids)
        )
        numbers = torch.arange(number, device=nodes.device).expand_as(nodes)
        places = torch.full_like(drafts, number).scatter_(1, nodes, numbers)
        return cls(places, transport(probs, counts))

    def path(self, tree: DraftTree, target: TargetProbs, path: Path) -> DraftedPath:
        """Return a path of each tree with b along it."""
        steps = path.nodes[:, :-1]
        tokens = tree.token_ids.gather(1, path.nodes[:, 1:])
        places = self.at(steps)
        forked = (self.places.gather(1, steps) < self.plan.ids.shape[1]).unsqueeze(2)
        ids = torch.where(forked, rows_at(self.plan.ids, places), rows_at(tree.draft_ids, steps))
        draft = rows_at(tree.draft_probs, steps)
        draft = torch.where(forked, rows_at(self.plan.selected, places), draft)
        # A probability b may round to 0 at the token selected.
        matching = (ids == tokens.unsqueeze(2)) & (forked | (draft > 0))
        probs = probs_along(target, steps, ids)
        chosen = first_true(matching)
        return DraftedPath(path.nodes, path.lengths, ids, draft, probs, chosen)

    def at(self, nodes: Tensor) -> Tensor:
        """Return the places of ``nodes`` ``[batch, ...]``.

        For nodes that are not forks, it is an arbitrary fork's place, which callers mask.
        """
        return self.places.gather(1, nodes).clamp_(max=self.plan.ids.shape[1] - 1)


def select_fixed(tree: DraftTree, target: TargetProbs, uniforms: Tensor) -> DraftedPath:
    """Return the path selected where children are not random; b is p restricted to them.

    Where p has no mass on a node's children, b is uniform on them: no child is accepted then.
    Number (d, 0, 0) of ``uniforms`` ``[batch, length, drafts, 2]`` draws the child of a node of
    depth d, with children in the order of their first draws.
    """
    drafted = drafted_nodes(tree)
    probs = target_of_tokens(tree, target) * drafted
    mass = torch.zeros_like(probs).scatter_add_(1, tree.parents, probs).gather(1, tree.parents)
    count = child_counts(tree).gather(1, tree.parents)
    b = torch.where(mass > 0, probs / mass, drafted / count)
    keys = _drawn_child_keys(tree, b, _numbers_at(tree, uniforms[:, :, 0, 0]))

    path = preferred_path(tree, keys)
    steps = path.nodes[:, :-1]
    children = (tree.parents.unsqueeze(1) == steps.unsqueeze(2)) & drafted.unsqueeze(1)
    return DraftedPath(
        nodes=path.nodes,
        lengths=path.lengths,
        ids=tree.token_ids.unsqueeze(1).expand(-1, tree.length, -1),
        draft=b.unsqueeze(1) * children,
        target=probs.unsqueeze(1) * children,
        chosen=path.nodes[:, 1:],
    )


def select_greedy(tree: DraftTree, target: TargetProbs, uniforms: Tensor) -> DraftedPath:
    """Return the path selected among the most likely children, and one drawn, at every node.

    The drawn child t keeps what the target wants of it, b = min(p, r), r the tail it was drawn
    from; the kept children share the rest in proportion to p. At a node of depth d, t is taken with
    probability b(t) / r(t) by number (d, 0, 1) of ``uniforms`` ``[batch, length, drafts, 2]``; else
    (d, 0, 0) draws one of the others, in the order of first draws.
    """
    popular = PopularTree.of(tree, target)
    kept = popular.most_likely(child_counts(tree) - 1)
    tail = tail_probs(popular.draft, kept)
    overlap = torch.minimum(popular.target, tail).masked_fill(kept, 0.0)
    rest = 1 - overlap.sum(dim=2, keepdim=True)
    wanted = popular.target * kept
    mass = wanted.sum(dim=2, keepdim=True)
    b = torch.where(mass > 0, overlap + rest * (wanted / mass), tail)

    is_kept = popular.at_tokens(kept.to(torch.int64)) > 0
    drafted = drafted_nodes(tree)
    take = popular.at_tokens(b) / popular.at_tokens(tail)
    taken = drafted & ~is_kept & (_numbers_at(tree, uniforms[:, :, 0, 1]) < take)
    weights = popular.at_tokens(popular.target) * (is_kept & drafted)
    keys = _drawn_child_keys(tree, weights, _numbers_at(tree, uniforms[:, :, 0, 0]))
    keys = torch.where(taken, tree.drafts + 1, keys)

    path = preferred_path(tree, keys)
    steps = path.nodes[:, :-1]
    return DraftedPath(
        nodes=path.nodes,
        lengths=path.lengths,
        ids=rows_at(popular.ids, steps),
        draft=rows_at(b, steps),
        target=rows_at(popular.target, steps),
        chosen=popular.places.gather(1, path.nodes[:, 1:]),
    )


def _drawn_child_keys(tree: DraftTree, weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one child of every node by inverse CDF, in the order of their first draws.

    ``weights`` of each node as a child, 0 at padding nodes, and ``uniforms``, one number for all
    siblings, are ``[batch, nodes]``. Return keys likewise: the largest among siblings, 1 ... K, is
    the child drawn; 0 is never drawn.
    """
    first = first_draws(tree)
    others = siblings(tree)
    earlier = others & (first.unsqueeze(1) <= first.unsqueeze(2))
    cumulative = (earlier * weights.unsqueeze(1)).sum(dim=2)
    total = (others * cumulative.unsqueeze(1)).amax(dim=2)
    threshold = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.where((cumulative > threshold) & (weights > 0), tree.drafts - first, 0)


def _numbers_at(tree: DraftTree, uniforms: Tensor) -> Tensor:
    """Return for each node the number of its parent's depth; ``uniforms``: ``[batch, length]``."""
    return uniforms.gather(1, (tree.depth - 1).clamp(min=0))


@dataclass(frozen=True, slots=True)
class PopularTree:
    """Draft trees with sorted lists, for samplings that fix a node's most likely children."""

    tree: DraftTree  # the trees
    ids: Tensor  # [batch, nodes, width] int64, most likely first, ties by token id
    draft: Tensor  # [batch, nodes, width] float64, q
    target: Tensor  # [batch, nodes, width] float64, p at ``ids``
    # [batch, nodes] int64, the place of each node's token among its parent's ids
    places: Tensor

    @classmethod
    def of(cls, tree: DraftTree, target: TargetProbs) -> Self:
        """Sort the lists of all nodes."""
        order = most_likely_first(tree.draft_ids, tree.draft_probs)
        ids = tree.draft_ids.gather(2, order)
        draft = tree.draft_probs.gather(2, order)
        probs = target.probs_in(target.rows, ids) * (draft > 0)
        return cls(tree, ids, draft, probs, places_of_tokens(tree, ids, draft))

    def most_likely(self, count: Tensor) -> Tensor:
        """Return ``[batch, nodes, width]`` bool: the ``count`` ``[batch, nodes]`` most likely."""
        places = torch.arange(self.ids.shape[2], device=self.ids.device)
        return (places < count.unsqueeze(2)) & (self.draft > 0)

    def at_tokens(self, values: Tensor) -> Tensor:
        """Return ``values`` ``[batch, nodes, width]`` of the parent at each node's own token."""
        at = self.tree.parents * self.ids.shape[2] + self.places
        return values.flatten(1).gather(1, at)


def tail_probs(draft: Tensor, kept: Tensor) -> Tensor:
    """Return q restricted to the tokens outside ``kept``, normalised; all 0 if none has mass."""
    rest = draft.masked_fill(kept, 0.0)
    total = rest.sum(dim=-1, keepdim=True)
    return torch.where(rest == total, (total > 0) & (rest > 0), rest / total).to(draft.dtype)
