"""Draft trees with the target's laws at their nodes, and the smaller trees they contain."""

from dataclasses import dataclass
from typing import Self

import torch

from eaglegbv.errors import LawMismatch
from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law


@dataclass(frozen=True, slots=True)
class Offer:
    """Draft trees to be judged.

    Attributes:
        tree: The draft trees of a batch.
        target: The target's laws at their nodes.
    """

    tree: DraftTree
    target: TargetLaw

    def part(self, paths: int, length: int) -> Self:
        """Return the trees of the first ``paths`` paths, each cut after ``length`` tokens.

        Independent paths are drawn without regard to each other, token by token. So the part has
        the same distribution as trees drawn with that many paths of that length, and it keeps the
        order of its nodes.

        Raises:
            LawMismatch: The paths are not independent, so a part of the tree is not a tree of its
                law.
        """
        tree = self.tree
        if (paths, length) == (tree.paths, tree.length):
            return self
        if tree.law is not Law.IID:
            raise LawMismatch("law", str(tree.law), "iid, to take a part of a tree")
        path_nodes = tree.path_nodes[:, :paths, :length]
        used = torch.zeros_like(tree.token_ids, dtype=torch.bool)
        used[:, 0] = True
        used.scatter_(1, path_nodes.flatten(1), value=True)
        count = used.sum(dim=1)
        number = used.cumsum(dim=1) - 1
        order = (~used).int().argsort(dim=1, stable=True)[:, : int(count.max())]
        real = torch.arange(order.shape[1], device=order.device) < count.unsqueeze(1)
        places = order.where(real, 0)
        depth = tree.depth.gather(1, places)
        # Nothing is drafted below the last level.
        inner = (depth < length).unsqueeze(2)
        wide = places.unsqueeze(2).expand(-1, -1, tree.width)
        part = DraftTree(
            law=tree.law,
            token_ids=tree.token_ids.gather(1, places).where(real, 0),
            parents=number.gather(1, tree.parents.gather(1, places)),
            depth=depth,
            num_nodes=count,
            path_nodes=number.gather(1, path_nodes.flatten(1)).view_as(path_nodes),
            path_lengths=tree.path_lengths[:, :paths].clamp(max=length),
            draft_ids=tree.draft_ids.gather(1, wide).where(inner, 0),
            draft_probs=tree.draft_probs.gather(1, wide).where(inner, 0),
        )
        target = TargetLaw(
            self.target.logits, self.target.log_normaliser, self.target.rows.gather(1, places)
        )
        return type(self)(part, target)
