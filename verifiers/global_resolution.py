"""Global Resolution: optimal transport at every node of a tree of independent paths.

At a node with n drafts one of them is selected and accepted with min(1, p/b), b the law of the
selection; the residual is (p - b)+. The transport of :mod:`eaglegbv.verifiers.transport` is exact:
it has no tolerance and cannot fail. :mod:`eaglegbv.verifiers.host_resolution` has other solvers.
"""

from typing import ClassVar

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.iid_selection import select_iid
from eaglegbv.verifiers.siblings import first_paths
from eaglegbv.verifiers.token_rule import verify_tokens
from eaglegbv.verifiers.top_down import numbers_of_children


class GlobalResolutionVerifier(Verifier):
    """Select by exact optimal transport at every node, accept token by token."""

    name: ClassVar[str] = "global_resolution"
    source: ClassVar[str] = "Thomas & Pal, Global Resolution (2511.15898), solved exactly"
    cost: ClassVar[str] = "O(N W + F W log W), F forks, and one row of the vocabulary"
    laws: ClassVar[frozenset[Law]] = frozenset({Law.IID})

    def judge(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Verdict:
        """Judge independent paths; a child is tested by the number of its first path."""
        path = select_iid(tree, target, uniforms.selection)
        numbers = numbers_of_children(tree, first_paths(tree), uniforms.acceptance)
        tests = numbers.gather(1, path.nodes[:, 1:])
        return verify_tokens(path, target, tests, uniforms.correction)
