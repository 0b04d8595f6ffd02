"""Draft trees with the laws of all nodes ranked by p/q: what gbv prefers paths by."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.drafted_path import DraftedPath, rooted, rows_at
from eaglegbv.verifiers.transport import RankedLaws


@dataclass(frozen=True, slots=True)
class RankedTree:
    """A batch of draft trees and the ranked laws at their nodes.

    Attributes:
        tree: The trees.
        laws: ``[batch, nodes, width]``, the laws each node's children were drawn from.
        ranks: ``[batch, nodes]`` int64, rank of each node's token among its parent's laws.
    """

    tree: DraftTree
    laws: RankedLaws
    ranks: Tensor

    @classmethod
    def of(cls, tree: DraftTree, probs: Tensor) -> Self:
        """Rank the laws of all nodes, given ``probs``: the target law at ``tree.draft_ids``."""
        laws = RankedLaws.of(tree.draft_ids, tree.draft_probs, probs)
        # A token's first place is its own: entries of draft probability zero stand last.
        found = rows_at(laws.ids, tree.parents) == tree.token_ids.unsqueeze(2)
        return cls(tree, laws, found.view(torch.uint8).argmax(dim=2))

    def path(self, number: Tensor, draft: Tensor) -> DraftedPath:
        """Return one path of each tree.

        Args:
            number: ``[batch]`` int64, which.
            draft: ``[batch, nodes, width]`` float64, the law its steps have, over ranked ids.
        """
        lengths = self.tree.path_lengths.gather(1, number.unsqueeze(1)).squeeze(1)
        nodes = rooted(rows_at(self.tree.path_nodes, number.unsqueeze(1)).squeeze(1))
        steps = nodes[:, :-1]
        return DraftedPath(
            nodes=nodes,
            lengths=lengths,
            ids=rows_at(self.laws.ids, steps),
            draft=rows_at(draft, steps),
            target=rows_at(self.laws.target, steps),
            chosen=self.ranks.gather(1, nodes[:, 1:]),
        )
