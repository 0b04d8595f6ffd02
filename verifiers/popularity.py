"""Draft laws sorted by probability, for those that fix a node's most likely children."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from eaglegbv.ranking import most_likely_first
from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.drafted_path import places_of_tokens


@dataclass(frozen=True, slots=True)
class PopularTree:
    """Draft trees with every node's law sorted: most likely first, ties by token id.

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
    def of(cls, tree: DraftTree, target: TargetLaw) -> Self:
        """Sort the laws of all nodes."""
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


def tail_law(draft: Tensor, kept: Tensor) -> Tensor:
    """Return q restricted to the tokens outside ``kept``, normalised; all 0 if none has mass."""
    rest = draft.masked_fill(kept, 0.0)
    total = rest.sum(dim=-1, keepdim=True)
    return torch.where(rest == total, (total > 0) & (rest > 0), rest / total).to(draft.dtype)
