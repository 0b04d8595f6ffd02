"""Block verification: the optimal rule for one path."""

from typing import ClassVar

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.block_rule import block_figures, verify_block
from eaglegbv.verifiers.drafted_path import DraftedPath
from eaglegbv.verifiers.figures import NodeFigures


class BlockVerifier(Verifier):
    """Test every prefix of the path against the mass its residual needs; keep the longest."""

    name: ClassVar[str] = "block"
    source: ClassVar[str] = "Sun et al., Block Verification, ICLR 2025 (2403.10444), Algorithm 2"
    cost: ClassVar[str] = "O(L W) and one row of the vocabulary"
    laws: ClassVar[frozenset[Law]] = frozenset({Law.IID})
    max_paths: ClassVar[int | None] = 1
    one_graph: ClassVar[bool] = True

    def judge(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Verdict:
        """Judge one path per request."""
        return verify_block(DraftedPath.only(tree, target), target, uniforms)

    def figures(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> NodeFigures:  # noqa: ARG002
        """Return b = q, w and h of the path."""
        return block_figures(tree, DraftedPath.only(tree, target))
