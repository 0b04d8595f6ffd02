"""Token verification: the first lossless rule for one path."""

from typing import ClassVar

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.drafted_path import DraftedPath
from eaglegbv.verifiers.token_rule import verify_tokens


class TokenVerifier(Verifier):
    """Accept x_i with chance min(1, p/q), stop at the first rejection, correct from (p - q)+."""

    name: ClassVar[str] = "token"
    source: ClassVar[str] = "Leviathan et al. 2211.17192; Chen et al. 2302.01318"
    cost: ClassVar[str] = "O(L) and one row of the vocabulary"
    laws: ClassVar[frozenset[Law]] = frozenset({Law.IID})
    max_paths: ClassVar[int | None] = 1
    one_graph: ClassVar[bool] = True

    def judge(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Verdict:
        """Judge one path per request; the test of depth i uses acceptance number i - 1."""
        tests = uniforms.acceptance[:, : tree.length]
        path = DraftedPath.only(tree, target)
        return verify_tokens(path, target, tests, uniforms.correction)
