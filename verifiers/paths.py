"""Draws from distributions, and the paths, nodes and children of draft trees, in tensors."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from eaglegbv.devices import entry_at, first_true
from eaglegbv.tree import DraftTree, TargetProbs

# Draws from unnormalised distributions by inverse CDF, without reading anything on the host. Large
# vocabularies are searched in two levels, blocks first, so that a draw costs one pass over the
# weights and allocates next to nothing.


_BLOCK = 512
_LARGE = 8192  # entries from which two levels are faster


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first index whose cumulative weight exceeds ``uniform * total``, ``[rows]`` int64.

    An index of weight zero is never returned, whatever the rounding of a parallel cumulative sum,
    unless a row has no positive weight at all: the caller must rule that out.

    Args:
        weights: ``[rows, entries]`` float64 or float32, non-negative; summed in float64.
        uniforms: ``[rows]`` float64 in [0, 1).
    """
    entries = weights.shape[1]
    if entries < _LARGE:
        cumulative = _cumulative(weights.double())
        return _first_above(cumulative, uniforms * cumulative.amax(dim=1))
    sums = _block_sums(weights)
    cumulative = sums.cumsum(dim=1)
    threshold = uniforms * cumulative[:, -1]
    block = _first_above(_cumulative(sums), threshold).unsqueeze(1)
    before = (cumulative.gather(1, block) - sums.gather(1, block)).squeeze(1)
    # The last block starts early enough to be whole; what it shares with the one before counts 0.
    start = (block * _BLOCK).clamp(max=entries - _BLOCK)
    columns = start + torch.arange(_BLOCK, device=weights.device)
    part = weights.gather(1, columns).double() * (columns >= block * _BLOCK)
    return start.squeeze(1) + _first_above(_cumulative(part), (threshold - before).clamp(min=0))


def _block_sums(weights: Tensor) -> Tensor:
    """Return ``[rows, blocks]``: the sums over blocks of ``[rows, entries]``."""
    rows, entries = weights.shape
    blocks, rest = divmod(entries, _BLOCK)
    whole = weights[:, : blocks * _BLOCK].view(rows, blocks, _BLOCK)
    whole = whole.sum(dim=2, dtype=torch.float64)
    if rest == 0:
        return whole
    tail = weights[:, blocks * _BLOCK :].sum(dim=1, keepdim=True, dtype=torch.float64)
    return torch.cat((whole, tail), dim=1)


def _cumulative(weights: Tensor) -> Tensor:
    """Return cumulative sums of ``[rows, entries]``; 0 at weight zero, where scans may round."""
    return weights.cumsum(dim=1).mul_(weights.sign())


def _first_above(cumulative: Tensor, threshold: Tensor) -> Tensor:
    """Return the first entry of ``cumulative`` ``[rows, entries]`` that exceeds ``threshold``.

    Where rounding has lifted that (at least 0) to the total, return the first that reaches it.
    """
    total = cumulative.amax(dim=1)
    least = torch.minimum(torch.nextafter(threshold, total), total)
    return first_true(cumulative >= least.unsqueeze(1))


# The correction or bonus token: the one pass over the whole vocabulary a verification needs.


_TRACE = {torch.float64: 1e-280, torch.float32: 1e-30}
"""What a token keeps of p where the residual leaves it nothing: too little ever to be drawn, unless
no token has any residual left."""


@dataclass(frozen=True, slots=True)
class Residual:
    """The weights ``max(weight * p - draft, 0)`` at one node per request."""

    nodes: Tensor  # [batch] int64, the stop nodes
    weight: Tensor  # [batch] float64
    ids: Tensor  # [batch, width] int64, distinct where ``draft`` is not zero
    draft: Tensor  # [batch, width] float64; all zero at a bonus token, which follows p itself

    @classmethod
    def at(cls, nodes: Tensor, weight: Tensor, ids: Tensor, draft: Tensor) -> Self:
        """Take the rows at ``nodes`` of tables ``[batch, nodes]`` and ``[batch, nodes, width]``."""
        at = nodes.unsqueeze(1)
        rows = (rows_at(table, at).squeeze(1) for table in (ids, draft))
        return cls(nodes, entry_at(weight, nodes), *rows)


def correction_token(residual: Residual, target: TargetProbs, uniforms: Tensor) -> Tensor:
    """Draw one token per request from its residual, ``[batch]`` int64, in vocabulary order.

    Tokens of target probability zero are never drawn. A residual without mass can only be reached
    through rounding (the stop then has probability zero in exact arithmetic); p is its limit and
    takes its place.
    """
    return draw_residual(target.probs_of(residual.nodes), residual, uniforms)


def draw_residual(probs: Tensor, residual: Residual, uniforms: Tensor) -> Tensor:
    """Draw from the residual of ``probs`` ``[batch, vocab]``, which may be overwritten."""
    trace = _TRACE[probs.dtype]
    target = probs.gather(1, residual.ids).double()
    weight = residual.weight.unsqueeze(1)
    left = torch.maximum(weight * target - residual.draft, trace * target)
    weights = probs.mul_(weight.clamp(min=trace))
    # The minimum ignores padding, whose ids are those of other tokens.
    weights.scatter_reduce_(1, residual.ids, left.to(probs.dtype), "amin")
    # A uniform of exactly 0 must not find a trace.
    return draw(weights, uniforms.clamp(min=trace**0.5))


# Rows and places in the lists that nodes have: token ids, and a probability of each.
def rows_at(table: Tensor, nodes: Tensor) -> Tensor:
    """Return the rows of ``table`` ``[batch, nodes, width]`` at ``nodes`` ``[batch, steps]``."""
    return table.gather(1, nodes.unsqueeze(2).expand(-1, -1, table.shape[2]))


def place_of(tokens: Tensor, ids: Tensor, draft: Tensor) -> Tensor:
    """Return the places ``[...]`` int64 of ``tokens`` ``[...]`` in lists, 0 for those not in them.

    The lists are ``ids`` ``[..., width]`` with ``draft``, which is 0 at padding entries.
    """
    return first_true((ids == tokens.unsqueeze(-1)) & (draft > 0))


def places_of_tokens(tree: DraftTree, ids: Tensor, draft: Tensor) -> Tensor:
    """Return the place of each node's token in its parent's list, ``[batch, nodes]`` int64.

    ``ids`` and ``draft`` ``[batch, nodes, width]`` are the lists of all nodes.
    """
    return place_of(tree.token_ids, rows_at(ids, tree.parents), rows_at(draft, tree.parents))


def probs_along(target: TargetProbs, nodes: Tensor, ids: Tensor) -> Tensor:
    """Return p at ``ids`` ``[batch, steps, width]`` of ``nodes`` ``[batch, steps]``, float64."""
    return target.probs_in(target.rows.gather(1, nodes), ids)


def target_of_tokens(tree: DraftTree, target: TargetProbs) -> Tensor:
    """Return p of each node's token given its parent, ``[batch, nodes]`` float64."""
    return probs_along(target, tree.parents, tree.token_ids.unsqueeze(2)).squeeze(2)


# The paths of a tree, and choosing one by a preference among the children of every node.
def rooted(path_nodes: Tensor) -> Tensor:
    """Put the root before the nodes of paths: ``[..., length]`` -> ``[..., length + 1]``."""
    return torch.nn.functional.pad(path_nodes, (1, 0))


def paths_of(tree: DraftTree) -> Tensor:
    """Return the paths of trees by their nodes at depths 1, 2, ..., 0 past their ends.

    The result is ``[batch, paths, length]`` int64. Trees of columns have a path for each, equal
    ones included. Other trees have a path for each leaf, in the order of leaves; 0 is padding.
    """
    if tree.columns:
        return tree.draws.mT
    nodes = torch.arange(tree.nodes, device=tree.parents.device)
    leaf = (tree.depth > 0) & (tree.draft_counts() == 0)
    # Leaves come first. There are no more of them than draws.
    most = min(tree.nodes, tree.drafts * tree.length)
    leaves = torch.where(leaf, nodes, tree.nodes).sort(dim=1).values[:, :most]
    node = leaves * (leaves < tree.nodes)
    columns: list[Tensor] = []
    for depth in range(tree.length, 0, -1):
        here = tree.depth.gather(1, node) == depth
        columns.append(node * here)
        node = torch.where(here, tree.parents.gather(1, node), node)
    return torch.stack(columns[::-1], dim=2)


@dataclass(frozen=True, slots=True)
class Path:
    """One path of each tree."""

    nodes: Tensor  # [batch, length + 1] int64, the root first; 0 past the path's end
    lengths: Tensor  # [batch] int64, number of nodes below the root

    @classmethod
    def of(cls, nodes: Tensor) -> Self:
        """Return the path of ``nodes`` ``[batch, length]`` int64 below the root."""
        return cls(rooted(nodes), (nodes > 0).sum(dim=1))


def preferred_path(tree: DraftTree, keys: Tensor) -> Path:
    """Return the path that follows the preferred child at every node.

    That is the path whose sequence of ``keys`` ``[batch, nodes]``, int64 and at least 0, is
    lexicographically largest: among siblings the largest is preferred.
    """
    paths = paths_of(tree)
    along = keys.gather(1, paths.flatten(1)).view(paths.shape)
    margins = lexicographic_margins(torch.where(paths > 0, along, -1))
    best = margins.amin(dim=2).argmax(dim=1, keepdim=True)
    return Path.of(rows_at(paths, best).squeeze(1))


def lexicographic_margins(keys: Tensor) -> Tensor:
    """Compare the rows of ``keys`` ``[batch, rows, length]`` int64 lexicographically, in pairs.

    Entry (i, j) of the result, ``[batch, rows, rows]`` int64, has the sign of row i minus row j.
    """
    # With powers of two as weights the first difference outweighs all that follow.
    places = torch.arange(keys.shape[2] - 1, -1, -1, device=keys.device)
    signs = (keys.unsqueeze(2) - keys.unsqueeze(1)).sign()
    return (signs * torch.bitwise_left_shift(1, places)).sum(dim=3)


@dataclass(frozen=True, slots=True)
class DraftedPath:
    """A path x_1 ... x_n, n <= length, of each tree, and what its tokens were selected from.

    Step i (counted from 0) goes from the node at depth i to the node at depth i + 1. Entries past a
    path's end carry no meaning.
    """

    nodes: Tensor  # [batch, length + 1] int64, the root first
    lengths: Tensor  # [batch] int64
    ids: Tensor  # [batch, length, width] int64, support of each step's draft distribution
    draft: Tensor  # [batch, length, width] float64, the distribution the step was selected from
    target: Tensor  # [batch, length, width] float64, p at ``ids``
    chosen: Tensor  # [batch, length] int64, the place of the path's own token in the support

    @classmethod
    def drawn(cls, tree: DraftTree, target: TargetProbs, path: Path | None = None) -> Self:
        """Return a ``path``, or the first of a tree of columns, with what it was drawn from."""
        path = path or Path.of(tree.draws[:, :, 0])
        steps = path.nodes[:, :-1]
        tokens = tree.token_ids.gather(1, path.nodes[:, 1:])
        ids = rows_at(tree.draft_ids, steps)
        draft = rows_at(tree.draft_probs, steps)
        probs = probs_along(target, steps, ids)
        chosen = place_of(tokens, ids, draft)
        return cls(path.nodes, path.lengths, ids, draft, probs, chosen)

    def ratios(self) -> Tensor:
        """Return p(x) / draft(x) of the path's own tokens, ``[batch, length]`` float64.

        Where b rounds to 0 at the selected token, return 1 if p is positive there, else 0.
        """
        draft = entry_at(self.draft, self.chosen)
        target = entry_at(self.target, self.chosen)
        return torch.where(draft > 0, target / draft, target > 0)

    def residual(self, accepted: Tensor, weights: Tensor) -> Residual:
        """Return the weights of the token after ``accepted`` ``[batch]`` nodes.

        That is p itself past the last node; ``weights`` ``[batch]`` is p's factor elsewhere.
        """
        bonus = accepted == self.lengths
        step = accepted.clamp(max=self.draft.shape[1] - 1).unsqueeze(1)
        return Residual(
            nodes=entry_at(self.nodes, accepted),
            weight=torch.where(bonus, 1.0, weights),
            ids=rows_at(self.ids, step).squeeze(1),
            # Past a path's end there may be anything, NaN too.
            draft=rows_at(self.draft, step).squeeze(1).masked_fill(bonus.unsqueeze(1), 0.0),
        )


def drafted_nodes(tree: DraftTree) -> Tensor:
    """Return ``[batch, nodes]`` bool: real nodes other than the root."""
    return tree.depth > 0


def child_counts(tree: DraftTree) -> Tensor:
    """Return ``[batch, nodes]`` int64: the number of different children."""
    ones = drafted_nodes(tree).to(torch.int64)
    return torch.zeros_like(tree.parents).scatter_add_(1, tree.parents, ones)


def over_nodes(tree: DraftTree, nodes: Tensor, values: Tensor, reduce: str, start: int) -> Tensor:
    """Return ``[batch, nodes]`` int64: what ``values`` of each node reduce to, with ``start``.

    ``values`` ``[batch, entries]`` belong to ``nodes``; children do to ``tree.parents``.
    """
    return torch.full_like(tree.parents, start).scatter_reduce(1, nodes, values, reduce)


def first_draws(tree: DraftTree) -> Tensor:
    """Return ``[batch, nodes]`` int64: the number of the first draw to each node in its level.

    It is the padded number of draws where none led to a node.
    """
    numbers = torch.arange(tree.drafts, device=tree.parents.device)
    numbers = torch.where(tree.draws > 0, numbers, tree.drafts)
    return over_nodes(tree, tree.draws.flatten(1), numbers.flatten(1), "amin", tree.drafts)


def siblings(tree: DraftTree) -> Tensor:
    """Return ``[batch, nodes, nodes]`` bool: node j is drafted and node i has the same parent."""
    same = tree.parents.unsqueeze(2) == tree.parents.unsqueeze(1)
    return same & drafted_nodes(tree).unsqueeze(1)
