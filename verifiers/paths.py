"""Short ranges of numbers that every step needs, made once for each size and device.

They are shared, so nobody may write to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from eaglegbv.devices import first_place, most_likely_first
from eaglegbv.tree import DraftTree, TargetProbs


@lru_cache(maxsize=256)
def counting(count: int, device: torch.device) -> Tensor:
    """Return ``0 ... count - 1``, int64."""
    return torch.arange(count, device=device)


@lru_cache(maxsize=256)
def counting_from_one(count: int, device: torch.device) -> Tensor:
    """Return ``1 ... count``, int64."""
    return torch.arange(1, count + 1, device=device)


@lru_cache(maxsize=256)
def counting_down(count: int, device: torch.device) -> Tensor:
    """Return ``count - 1 ... 0``, int64."""
    return torch.arange(count - 1, -1, -1, device=device)


@lru_cache(maxsize=256)
def powers_of_two(count: int, device: torch.device) -> Tensor:
    """Return ``2 ** (count - 1) ... 1``, int64."""
    return torch.bitwise_left_shift(1, counting_down(count, device))


@lru_cache(maxsize=256)
def numbered_rows(count: int, device: torch.device) -> Tensor:
    """Return ``0 ... count - 1`` as a column ``[count, 1]``, int64: the first index of each row."""
    return torch.arange(count, device=device).unsqueeze(1)


# Picking one of several records of tensors per request.


Record = TypeVar("Record")


def pick_record(records: Sequence[Record], numbers: Tensor) -> Record:
    """Return the record whose tensors are, for request b, those of ``records[numbers[b]]``.

    Args:
        records: Dataclasses of one type, of tensors ``[batch, ...]`` of equal shapes, of such
            dataclasses, and of values that are equal in all of them.
        numbers: ``[batch]`` int64.
    """
    return _pick(records, numbers)  # type: ignore[no-any-return]


def _pick(values: Sequence[Any], numbers: Tensor) -> Any:  # noqa: ANN401
    first = values[0]
    if isinstance(first, Tensor):
        stacked = torch.stack(tuple(values), dim=1)
        at = numbers.view(-1, *(1,) * (stacked.dim() - 1))
        return stacked.gather(1, at.expand(-1, 1, *stacked.shape[2:])).squeeze(1)
    if is_dataclass(first) and not isinstance(first, type):
        return type(first)(
            **{f.name: _pick([getattr(v, f.name) for v in values], numbers) for f in fields(first)}
        )
    return first


# Draws from unnormalised distributions by inverse CDF, without reading anything on the host.
#
# Large vocabularies are searched in two levels, blocks first, so that a draw costs one pass over the
# weights and allocates next to nothing.


_BLOCK = 512
_LARGE = 8192
"""Entries from which two levels are faster."""


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first index whose cumulative weight exceeds ``uniform * total``.

    An index of weight zero is never returned, whatever the rounding of a parallel cumulative sum,
    unless a row has no positive weight at all: the caller must rule that out.

    Args:
        weights: ``[rows, entries]`` float64, non-negative.
        uniforms: ``[rows]`` float64 in [0, 1).

    Returns:
        ``[rows]`` int64.
    """
    entries = weights.shape[1]
    if entries < _LARGE:
        cumulative = _cumulative(weights)
        return _first_above(cumulative, uniforms * cumulative.amax(dim=1))
    sums = _block_sums(weights)
    cumulative = sums.cumsum(dim=1)
    threshold = uniforms * cumulative[:, -1]
    block = _first_above(_cumulative(sums), threshold).unsqueeze(1)
    before = (cumulative.gather(1, block) - sums.gather(1, block)).squeeze(1)
    # The last block starts early enough to be whole; what it shares with the one before counts 0.
    start = (block * _BLOCK).clamp(max=entries - _BLOCK)
    columns = start + torch.arange(_BLOCK, device=weights.device)
    part = weights.gather(1, columns) * (columns >= block * _BLOCK)
    return start.squeeze(1) + _first_above(_cumulative(part), (threshold - before).clamp(min=0))


def _block_sums(weights: Tensor) -> Tensor:
    """Return ``[rows, blocks]``: the sums over blocks of ``weights`` ``[rows, entries]``."""
    rows, entries = weights.shape
    blocks, rest = entries // _BLOCK, entries % _BLOCK  # compilable, unlike divmod
    whole = weights[:, : blocks * _BLOCK].view(rows, blocks, _BLOCK).sum(dim=2)
    if rest == 0:
        return whole
    return torch.cat((whole, weights[:, blocks * _BLOCK :].sum(dim=1, keepdim=True)), dim=1)


def _cumulative(weights: Tensor) -> Tensor:
    """Return the cumulative sums of ``weights`` ``[rows, entries]``; 0 at entries of weight zero.

    Parallel scans may round so that a sum changes there.
    """
    return weights.cumsum(dim=1).mul_(weights.sign())


def _first_above(cumulative: Tensor, threshold: Tensor) -> Tensor:
    """Return the first entry of ``cumulative`` ``[rows, entries]`` that exceeds ``threshold``.

    Where rounding has lifted the threshold (at least 0) to the total or above, return the first
    entry that reaches the total.
    """
    total = cumulative.amax(dim=1)
    least = torch.minimum(torch.nextafter(threshold, total), total)
    return first_place(cumulative >= least.unsqueeze(1))


# The correction or bonus token: the one pass over the whole vocabulary a verification needs.


_TRACE = 1e-280
"""What a token keeps of p where the residual leaves it nothing: too little ever to be drawn, unless
no token has any residual left."""


@dataclass(frozen=True, slots=True)
class Residual:
    """The distribution ``max(weight * p - draft, 0)``, up to its normaliser, at one node per request.

    Attributes:
        nodes: ``[batch]`` int64, the stop nodes.
        weight: ``[batch]`` float64.
        ids: ``[batch, width]`` int64, tokens of ``draft``, distinct where ``draft`` is not zero.
        draft: ``[batch, width]`` float64; all zero at a bonus token, where the distribution is p itself.
    """

    nodes: Tensor
    weight: Tensor
    ids: Tensor
    draft: Tensor


def correction_token(residual: Residual, target: TargetProbs, uniforms: Tensor) -> Tensor:
    """Draw one token per request from its residual, in float64 and vocabulary order.

    Tokens of target probability zero are never drawn. A residual without mass can only be reached
    through rounding (the stop then has probability zero in exact arithmetic); p is its limit and
    takes its place.

    Args:
        residual: The residual distributions.
        target: The target's distributions.
        uniforms: ``[batch]`` float64 in [0, 1).

    Returns:
        ``[batch]`` int64.
    """
    return draw_residual(target.probs_of(residual.nodes), residual, uniforms)


def draw_residual(probs: Tensor, residual: Residual, uniforms: Tensor) -> Tensor:
    """Draw from the residual of ``probs`` ``[batch, vocab]``, which may be overwritten."""
    # A uniform of exactly 0 must not find a trace.
    return draw(_residual_weights(probs, residual), uniforms.clamp(min=_TRACE**0.5))


def _residual_weights(probs: Tensor, residual: Residual) -> Tensor:
    """Return the residual of ``probs`` ``[batch, vocab]``, which may be overwritten."""
    own = probs.gather(1, residual.ids)
    weight = residual.weight.unsqueeze(1)
    left = torch.maximum(weight * own - residual.draft, _TRACE * own)
    weights = probs.mul_(weight.clamp(min=_TRACE))
    # The minimum ignores padding, whose ids are those of other tokens.
    return weights.scatter_reduce_(1, residual.ids, left, "amin")


def probs_along(target: TargetProbs, nodes: Tensor, ids: Tensor) -> Tensor:
    """Return p at ``ids`` ``[batch, steps, width]`` of ``nodes`` ``[batch, steps]``, float64."""
    return target.probs_in(target.rows.gather(1, nodes), ids)


# Choosing one of a tree's paths by a preference among the children of every node.


def steps_of(tree: DraftTree) -> Tensor:
    """Return ``[batch, paths, length]`` bool: whether the path has a node at depth 1, 2, ..."""
    return counting(tree.length, tree.path_lengths.device) < tree.path_lengths.unsqueeze(2)


def preferred_path(tree: DraftTree, keys: Tensor) -> Tensor:
    """Return ``[batch]`` int64: the first path that follows the preferred child at every node.

    That is the path whose sequence of keys is lexicographically largest.

    Args:
        tree: The draft trees.
        keys: ``[batch, nodes]`` int64, at least 0; among siblings the largest is preferred.
    """
    along = keys.gather(1, tree.path_nodes.flatten(1)).view_as(tree.path_nodes)
    margins = lexicographic_margins(torch.where(steps_of(tree), along, -1))
    return margins.amin(dim=2).argmax(dim=1)


def lexicographic_margins(keys: Tensor) -> Tensor:
    """Compare the rows of ``keys`` ``[batch, rows, length]`` int64 lexicographically, in pairs.

    Returns:
        ``[batch, rows, rows]`` int64: entry (i, j) has the sign of row i minus row j.
    """
    # With powers of two as weights the first difference outweighs all that follow.
    weights = powers_of_two(keys.shape[2], keys.device)
    signs = (keys.unsqueeze(2) - keys.unsqueeze(1)).sign()
    return (signs * weights).sum(dim=3)


# One root-to-leaf path of a draft tree per request, with the distributions along it.


@dataclass(frozen=True, slots=True)
class DraftedPath:
    """A path x_1 ... x_n, n <= length, and the distributions of the next token at each step.

    Step i (counted from 0) goes from the node at depth i to the node at depth i + 1. Entries past a
    path's end repeat its last node and carry no meaning.

    Attributes:
        nodes: ``[batch, length + 1]`` int64, the root first.
        lengths: ``[batch]`` int64.
        ids: ``[batch, length, width]`` int64, support of each step's draft distribution.
        draft: ``[batch, length, width]`` float64, the distribution the path was selected from.
        target: ``[batch, length, width]`` float64, p at ``ids``.
        chosen: ``[batch, length]`` int64, the place of the path's own token in the support.
    """

    nodes: Tensor
    lengths: Tensor
    ids: Tensor
    draft: Tensor
    target: Tensor
    chosen: Tensor

    @classmethod
    def only(cls, tree: DraftTree, target: TargetProbs) -> Self:
        """Return the path of trees of one path, with the distribution it was drawn from."""
        nodes = rooted(tree.path_nodes[:, 0])
        steps = nodes[:, :-1]
        draft = rows_at(tree.draft_probs, steps)
        tokens = tree.token_ids.gather(1, nodes[:, 1:])
        ids = rows_at(tree.draft_ids, steps)
        return cls(
            nodes=nodes,
            lengths=tree.path_lengths[:, 0],
            ids=ids,
            draft=draft,
            target=probs_along(target, steps, ids),
            chosen=place_of(tokens, ids, draft),
        )

    def with_draft(self, draft: Tensor) -> Self:
        """Return the same path with another distribution over the same ``ids``."""
        return replace(self, draft=draft)

    def ratios(self) -> Tensor:
        """Return p(x) / draft(x) of the path's own tokens, ``[batch, length]`` float64.

        Where the distribution b of a selection rounds to 0 at the selected token, return 1 if p is positive
        there, else 0.
        """
        at = self.chosen.unsqueeze(2)
        draft = self.draft.gather(2, at).squeeze(2)
        target = self.target.gather(2, at).squeeze(2)
        return torch.where(draft > 0, target / draft, target > 0)

    def residual(self, accepted: Tensor, weights: Tensor) -> Residual:
        """Return the distribution of the token after ``accepted`` nodes; p itself past the last one.

        Args:
            accepted: ``[batch]`` int64.
            weights: ``[batch]`` float64, the weight of p in the residual at the stop node.
        """
        bonus = accepted == self.lengths
        step = accepted.clamp(max=self.draft.shape[1] - 1).unsqueeze(1)
        return Residual(
            nodes=self.nodes.gather(1, accepted.unsqueeze(1)).squeeze(1),
            weight=torch.where(bonus, 1.0, weights),
            ids=rows_at(self.ids, step).squeeze(1),
            # Distributions past a path's end may be anything, NaN too.
            draft=rows_at(self.draft, step).squeeze(1).masked_fill(bonus.unsqueeze(1), 0.0),
        )


def rooted(path_nodes: Tensor) -> Tensor:
    """Put the root before the nodes of paths: ``[..., length]`` -> ``[..., length + 1]``."""
    return torch.nn.functional.pad(path_nodes, (1, 0))


def nodes_along(tree: DraftTree, number: Tensor) -> Tensor:
    """Return the nodes of path ``number`` ``[batch]`` int64 of each tree, the root first.

    Returns:
        ``[batch, length + 1]`` int64.
    """
    return rooted(rows_at(tree.path_nodes, number.unsqueeze(1)).squeeze(1))


def length_of(tree: DraftTree, number: Tensor) -> Tensor:
    """Return ``[batch]`` int64, the length of path ``number`` ``[batch]`` int64 of each tree."""
    return tree.path_lengths.gather(1, number.unsqueeze(1)).squeeze(1)


def rows_at(table: Tensor, nodes: Tensor) -> Tensor:
    """Return the rows of ``table`` ``[batch, nodes, width]`` at ``nodes`` ``[batch, steps]``."""
    return table[numbered_rows(len(table), table.device), nodes]


def place_of(tokens: Tensor, ids: Tensor, draft: Tensor) -> Tensor:
    """Return the places ``[...]`` int64 of tokens in the supports of distributions, 0 for those outside.

    Args:
        tokens: ``[...]`` int64.
        ids: ``[..., width]`` int64.
        draft: ``[..., width]`` float64, 0 at padding entries.
    """
    found = (ids == tokens.unsqueeze(-1)) & (draft > 0)
    return first_place(found)


def places_of_tokens(tree: DraftTree, ids: Tensor, draft: Tensor) -> Tensor:
    """Return the place of each node's token in its parent's distribution, ``[batch, nodes]`` int64.

    Args:
        tree: The draft trees.
        ids: ``[batch, nodes, width]`` int64, the support of each node's distribution.
        draft: ``[batch, nodes, width]`` float64, its probabilities.
    """
    return place_of(tree.token_ids, rows_at(ids, tree.parents), rows_at(draft, tree.parents))


# The children of the nodes of a draft tree: which come first, how many, which one is drawn.


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


# Draft samplings sorted by probability, for those that fix a node's most likely children.


@dataclass(frozen=True, slots=True)
class PopularTree:
    """Draft trees with every node's distribution sorted: most likely first, ties by token id.

    Attributes:
        tree: The trees.
        ids: ``[batch, nodes, width]`` int64.
        draft: ``[batch, nodes, width]`` float64, q.
        target: ``[batch, nodes, width]`` float64, p at ``ids``.
        places: ``[batch, nodes]`` int64, the place of each node's token among its parent's ids.
    """

    tree: DraftTree
    ids: Tensor
    draft: Tensor
    target: Tensor
    places: Tensor

    @classmethod
    def of(cls, tree: DraftTree, target: TargetProbs) -> Self:
        """Sort the distributions of all nodes."""
        order = most_likely_first(tree.draft_ids, tree.draft_probs)
        ids, draft = tree.draft_ids.gather(2, order), tree.draft_probs.gather(2, order)
        probs = target.probs_at(ids) * (draft > 0)
        return cls(tree, ids, draft, probs, places_of_tokens(tree, ids, draft))

    def first_places(self, count: Tensor) -> Tensor:
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
