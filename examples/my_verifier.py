"""A verifier of your own: eaglegbv audit --module examples/my_verifier.py

Token verification of the first drafted path; the other paths are ignored.
"""

from eaglegbv.eval.audit_module import ReferenceVerifier
from eaglegbv.tree import Law
from eaglegbv.uniforms import Purpose
from eaglegbv.verifiers.reference.chooser import Chooser
from eaglegbv.verifiers.reference.probs import residual_or_target
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree


class FirstPath(ReferenceVerifier):
    """Accept a draft with probability min(1, p/q); stop at the first rejection."""

    name = "first_path"
    source = "an example"
    cost = "O(L) and one row of the vocabulary"
    # The claim under audit. `greedy` would fail: there the first child is not drawn from q.
    laws = frozenset({Law.IID, Law.WOR})

    def decide(self, tree: ReferenceTree, chooser: Chooser) -> Outcome:
        """Judge one tree; every random decision is the chooser's."""
        path = tree.paths[0]
        for depth, token in enumerate(path):
            prefix = path[:depth]
            p, q = tree.target_law(prefix), tree.draft_law(prefix)
            accept = min(1, p[token] / q[token])
            if chooser.choose((accept, 1 - accept), Purpose.ACCEPTANCE, depth) == 1:
                # (p - q)+, what the target wants beyond the drafts; p where rounding left nothing.
                weights = residual_or_target(1, p, q)
                return Outcome(prefix, chooser.choose(weights, Purpose.CORRECTION, 0))
        bonus = chooser.choose(tree.target_law(path), Purpose.CORRECTION, 0)
        return Outcome(path, bonus)
