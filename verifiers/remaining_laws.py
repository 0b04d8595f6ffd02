"""Target and draft laws that rejections change, at all nodes of a batch of trees."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.drafted_path import places_of_tokens, rows_at


@dataclass(slots=True)
class RemainingLaws:
    """What is left of p at each node, on the support of its draft law and off it, and of q.

    Attributes:
        ids: ``[batch, nodes, width]`` int64.
        probs: ``[batch, nodes, width]`` float64, p at ``ids`` as it was.
        left: ``[batch, nodes, width]`` float64, what is left of p at ``ids``, normalised.
        beside: ``[batch, nodes]`` float64, the mass left off the support.
        scale: ``[batch, nodes]`` float64, what is left of a token off the support, over its p.
        draft: ``[batch, nodes, width]`` float64, q given the tokens lost.
        places: ``[batch, nodes]`` int64, the place of each node's token in its parent's ids.
    """

    ids: Tensor
    probs: Tensor
    left: Tensor
    beside: Tensor
    scale: Tensor
    draft: Tensor
    places: Tensor

    @classmethod
    def of(cls, tree: DraftTree, target: TargetLaw) -> Self:
        """Start with p and q themselves."""
        probs = target.probs_at(tree.draft_ids) * (tree.draft_probs > 0)
        beside = (1 - probs.sum(dim=2)).clamp(min=0)
        return cls(
            ids=tree.draft_ids,
            probs=probs,
            left=probs,
            beside=beside,
            scale=torch.ones_like(beside),
            draft=tree.draft_probs,
            places=places_of_tokens(tree, tree.draft_ids, tree.draft_probs),
        )

    @property
    def taken(self) -> Tensor:
        """``[batch, nodes, width]``: what is left of p is ``scale * p`` minus this."""
        return self.scale.unsqueeze(2) * self.probs - self.left

    def ratios(self, parents: Tensor, children: Tensor) -> Tensor:
        """Return (what is left of p) / q of the tokens of ``children``, ``[batch, steps]``."""
        at = parents * self.left.shape[2] + self.places.gather(1, children)
        return self.left.flatten(1).gather(1, at) / self.draft.flatten(1).gather(1, at)

    def subtract(self, nodes: Tensor, weights: Tensor, where: Tensor) -> Tensor:
        """Replace what is left of p by ``(w left - q)+``, normalised, at some nodes.

        Args:
            nodes: ``[batch, steps]`` int64, different where ``where`` holds.
            weights: ``[batch, steps]`` float64, w.
            where: ``[batch, steps]`` bool: which to change. Nodes at which nothing would be left
                stay as they are.

        Returns:
            ``[batch, steps]`` float64, the mass before normalising.
        """
        left, draft = rows_at(self.left, nodes), rows_at(self.draft, nodes)
        beside, scale = self.beside.gather(1, nodes), self.scale.gather(1, nodes)
        rest = (weights.unsqueeze(2) * left - draft).clamp(min=0)
        mass = rest.sum(dim=2) + weights * beside
        changed = where & (mass > 0)
        rows = torch.where(changed.unsqueeze(2), rest / mass.unsqueeze(2), left)
        self.left = _replaced(self.left, nodes, rows)
        beside = torch.where(changed, weights * beside / mass, beside)
        self.beside = self.beside.scatter(1, nodes, beside)
        scale = torch.where(changed, weights * scale / mass, scale)
        self.scale = self.scale.scatter(1, nodes, scale)
        return mass

    def lose(self, parents: Tensor, children: Tensor, where: Tensor) -> None:
        """Restrict q to the tokens other than those of ``children``, at some ``parents``."""
        draft = rows_at(self.draft, parents)
        rest = draft.scatter(2, self.places.gather(1, children).unsqueeze(2), 0.0)
        total = rest.sum(dim=2, keepdim=True)
        rest = torch.where(total > 0, rest / total, rest)
        rows = torch.where(where.unsqueeze(2), rest, draft)
        self.draft = _replaced(self.draft, parents, rows)


def _replaced(table: Tensor, nodes: Tensor, rows: Tensor) -> Tensor:
    return table.scatter(1, nodes.unsqueeze(2).expand_as(rows), rows)
