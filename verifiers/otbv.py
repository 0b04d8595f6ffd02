"""Optimal-transport block verification: this project's own rule, and its default.

At every node one of the drafts is selected by the exact optimal transport of that node; the
selected path is verified as one block, with the laws b of the selections in place of the draft law.
The pair (token, number of drafts left on it) is one symbol of a larger alphabet. Its second part
has the same conditional law under target and draft, so block verification on that alphabet is
lossless, and so is its token part. With one path this is block verification; with one level it
reaches the optimal acceptance alpha*.
"""

from typing import ClassVar

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.block_rule import block_figures, verify_block
from eaglegbv.verifiers.drafted_path import DraftedPath
from eaglegbv.verifiers.figures import NodeFigures
from eaglegbv.verifiers.fixed_selection import select_fixed
from eaglegbv.verifiers.greedy_selection import select_greedy
from eaglegbv.verifiers.iid_selection import select_iid


class OtbvVerifier(Verifier):
    """Select a path by optimal transport at every node, then verify it as one block."""

    name: ClassVar[str] = "otbv"
    source: ClassVar[str] = "eaglegbv: exact optimal transport, then block verification"
    cost: ClassVar[str] = "O(N W + F W log W), F forks, and one row of the vocabulary"
    laws: ClassVar[frozenset[Law]] = frozenset({Law.IID, Law.GREEDY, Law.FIXED})
    one_graph: ClassVar[bool] = True

    def judge(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Verdict:
        """Judge trees of any accepted law."""
        return verify_block(_select(tree, target, uniforms), target, uniforms)

    def figures(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> NodeFigures:
        """Return the laws b of the selections, w and h of the selected path."""
        return block_figures(tree, _select(tree, target, uniforms))


def _select(tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> DraftedPath:
    if tree.law is Law.FIXED:
        return select_fixed(tree, target, uniforms.selection)
    if tree.law is Law.GREEDY:
        return select_greedy(tree, target, uniforms.selection)
    if tree.paths == 1:
        return DraftedPath.only(tree, target)
    return select_iid(tree, target, uniforms.selection)
