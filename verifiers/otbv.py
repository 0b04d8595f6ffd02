"""Optimal-transport block verification: this project's own rule, and its default.

At every node one of the drafts is selected by the exact optimal transport of that node; the
selected path is verified as one block, with the laws b of the selections in place of the draft law.
(Token, number of drafts left on it) is one symbol of a larger alphabet whose second part has the
same conditional law under target and draft, so block verification on that alphabet is lossless, and
so is its token part. One path: block verification. One level: the optimal acceptance alpha*.
"""

from typing import ClassVar

import torch
from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.block_rule import verify_block
from eaglegbv.verifiers.drafted_path import DraftedPath, rooted
from eaglegbv.verifiers.fixed_choice import select_fixed
from eaglegbv.verifiers.path_choice import preferred_path, steps_of
from eaglegbv.verifiers.ranked_tree import RankedTree
from eaglegbv.verifiers.transport import Drafts, labels, transport


class OtbvVerifier(Verifier):
    """Select a path by optimal transport at every node, then verify it as one block."""

    name: ClassVar[str] = "otbv"
    source: ClassVar[str] = "eaglegbv: exact optimal transport, then block verification"
    laws: ClassVar[frozenset[Law]] = frozenset({Law.IID, Law.FIXED})

    def judge(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Verdict:
        """Judge trees of any accepted law."""
        select = select_fixed if tree.law is Law.FIXED else select_iid
        return verify_block(select(tree, target, uniforms.selection), target, uniforms)


def select_iid(tree: DraftTree, target: TargetLaw, uniforms: Tensor) -> DraftedPath:
    """Return the selected path of trees of independent paths, with the laws b along it.

    Args:
        tree: Trees of law ``iid``.
        target: The target's laws.
        uniforms: ``[batch, length, paths, 2]``.
    """
    ranked = RankedTree.of(tree, target)
    real = steps_of(tree)
    children = tree.path_nodes.flatten(1)
    parents = rooted(tree.path_nodes)[:, :, :-1].flatten(1)
    counts = torch.zeros_like(tree.parents)
    counts.scatter_add_(1, parents, real.flatten(1).to(torch.int64))
    plan = transport(ranked.laws, counts)
    label = labels(
        ranked.laws,
        plan,
        Drafts(nodes=parents, ranks=ranked.ranks.gather(1, children)),
        uniforms.transpose(1, 2).flatten(1, 2),
    )
    # The highest label wins, the first drafted among equals: one number says both.
    first = torch.arange(tree.paths - 1, -1, -1, device=label.device).unsqueeze(1)
    score = label.view_as(real) * tree.paths + first
    keys = torch.zeros_like(tree.parents).scatter_reduce(
        1, children, torch.where(real, score, 0).flatten(1), "amax"
    )
    return ranked.path(preferred_path(tree, keys), plan.law)
