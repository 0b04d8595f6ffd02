"""Draft trees with the laws of all nodes ranked by p/q: what gbv and otbv select paths by."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.drafted_path import DraftedPath, place_of, rooted, rows_at
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
        ids, draft = rows_at(laws.ids, tree.parents), rows_at(laws.draft, tree.parents)
        return cls(tree, laws, place_of(tree.token_ids, ids, draft))

    def path(self, number: Tensor, draft: Tensor) -> DraftedPath:
        """Return one path of each tree.

        Args:
            number: ``[batch]`` int64, which.
            draft: ``[batch, nodes, width]`` float64, the law its steps have, over ranked ids.
        """
        lengths = self.tree.path_lengths.gather(1, number.unsqueeze(1)).squeeze(1)
        at = number.view(-1, 1, 1).expand(-1, 1, self.tree.length)
        nodes = rooted(self.tree.path_nodes.gather(1, at).squeeze(1))
        steps = nodes[:, :-1]
        return DraftedPath(
            nodes=nodes,
            lengths=lengths,
            ids=rows_at(self.laws.ids, steps),
            draft=rows_at(draft, steps),
            target=rows_at(self.laws.target, steps),
            chosen=self.ranks.gather(1, nodes[:, 1:]),
        )
