"""One root-to-leaf path of a draft tree per request, with the laws along it."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from eaglegbv.first_place import first_place
from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.constants import numbered_rows
from eaglegbv.verifiers.correction import Residual, probs_along


@dataclass(frozen=True, slots=True)
class DraftedPath:
    """A path x_1 ... x_n, n <= length, and the laws of the next token at each step.

    Step i (counted from 0) goes from the node at depth i to the node at depth i + 1. Entries past a
    path's end repeat its last node and carry no meaning.

    Attributes:
        nodes: ``[batch, length + 1]`` int64, the root first.
        lengths: ``[batch]`` int64.
        ids: ``[batch, length, width]`` int64, support of each step's draft law.
        draft: ``[batch, length, width]`` float64, the law the path was selected from.
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
    def only(cls, tree: DraftTree, target: TargetLaw) -> Self:
        """Return the path of trees of one path, with the law it was drawn from."""
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
        """Return the same path with another law over the same ``ids``."""
        return replace(self, draft=draft)

    def ratios(self) -> Tensor:
        """Return p(x) / draft(x) of the path's own tokens, ``[batch, length]`` float64.

        Where the law b of a selection rounds to 0 at the selected token, return 1 if p is positive
        there, else 0.
        """
        at = self.chosen.unsqueeze(2)
        draft = self.draft.gather(2, at).squeeze(2)
        target = self.target.gather(2, at).squeeze(2)
        return torch.where(draft > 0, target / draft, target > 0)

    def residual(self, accepted: Tensor, weights: Tensor) -> Residual:
        """Return the law of the token after ``accepted`` nodes; p itself past the last one.

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
            # Laws past a path's end may be anything, NaN too.
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
    """Return the places ``[...]`` int64 of tokens in the supports of laws, 0 for those outside.

    Args:
        tokens: ``[...]`` int64.
        ids: ``[..., width]`` int64.
        draft: ``[..., width]`` float64, 0 at padding entries.
    """
    found = (ids == tokens.unsqueeze(-1)) & (draft > 0)
    return first_place(found)


def places_of_tokens(tree: DraftTree, ids: Tensor, draft: Tensor) -> Tensor:
    """Return the place of each node's token in its parent's law, ``[batch, nodes]`` int64.

    Args:
        tree: The draft trees.
        ids: ``[batch, nodes, width]`` int64, the support of each node's law.
        draft: ``[batch, nodes, width]`` float64, its probabilities.
    """
    return place_of(tree.token_ids, rows_at(ids, tree.parents), rows_at(draft, tree.parents))
