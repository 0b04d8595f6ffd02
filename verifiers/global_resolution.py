"""Optimal transport at every node of a tree of independent drafts (Thomas & Pal, 2511.15898).

At a node with n drafts select one of them and accept it with min(1, p/b), b the distribution of the
selection; the residual is (p - b)+. The selection is the exact transport of
:mod:`eaglegbv.verifiers.transport`: no tolerance, it cannot fail. The paper's own solver, and those
that its tables compare with it, are in :mod:`eaglegbv.eval.ways.solvers`.
"""

from eaglegbv.config import DraftSampling
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms, numbers_of_children
from eaglegbv.verifiers.paths import first_draws
from eaglegbv.verifiers.proof.chooser import Chooser, Prefix, residual_or_target
from eaglegbv.verifiers.proof.tree import (
    Outcome,
    ReferenceTree,
    Rejected,
    accepts_draft,
    walk_down,
)
from eaglegbv.verifiers.selection import select_iid
from eaglegbv.verifiers.token import verify_tokens
from eaglegbv.verifiers.transport import exact_transport, select_draft


def global_resolution(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Walk down, one transport a node."""
    return walk_down(tree, chooser, _step)


def _step(tree: ReferenceTree, prefix: Prefix, chooser: Chooser) -> int | Rejected:
    p = tree.target_probs(prefix)
    q = tree.draft_probs(prefix)
    drafts = tree.drafts(prefix)
    node = exact_transport(p, q, len(drafts))
    x = select_draft(node, drafts, len(prefix), tree.most_draws, chooser)
    b = node.probs
    h = min(1, p[x] / b[x]) if b[x] > 0 else 1
    if accepts_draft(tree, prefix, tree.children(prefix)[x], h, chooser):
        return x
    return Rejected(residual_or_target(1, p, b))


class GlobalResolutionVerifier(Verifier):
    """Select by exact optimal transport at every node, accept token by token.

    O(N W + F W log W), F forks, and one row of the vocabulary.
    """

    name = "global_resolution"
    draft_samplings = frozenset({DraftSampling.IID})
    any_widths = frozenset({DraftSampling.IID})

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge independent drafts; a child is tested by the number of its first draw."""
        path = select_iid(tree, target, uniforms.selection)
        numbers = numbers_of_children(tree, first_draws(tree), uniforms.acceptance)
        tests = numbers.gather(1, path.nodes[:, 1:])
        return verify_tokens(path, target, tests, uniforms.correction)
