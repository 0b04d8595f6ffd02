"""A verifier of your own: eaglegbv audit --module examples/my_verifier.py

Token verification of the first drafted path; the other paths are ignored.
"""

from eaglegbv.config import DraftSampling
from eaglegbv.eval.audit.module import ReferenceVerifier
from eaglegbv.rng import Purpose
from eaglegbv.verifiers.proof.chooser import Chooser, residual_or_target
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree


class FirstPath(ReferenceVerifier):
    """Accept a draft with probability min(1, p/q); stop at the first rejection."""

    name = "first_path"
    # The claim under audit. `greedy` would fail: there the first child is not drawn from q.
    draft_samplings = frozenset({DraftSampling.IID, DraftSampling.WOR})

    def decide(self, tree: ReferenceTree, chooser: Chooser) -> Outcome:
        """Judge one tree; every random decision is the chooser's."""
        path = tree.paths[0]
        for depth, token in enumerate(path):
            prefix = path[:depth]
            p, q = tree.target_probs(prefix), tree.draft_probs(prefix)
            accept = min(1, p[token] / q[token])
            if chooser.choose((accept, 1 - accept), Purpose.ACCEPTANCE, depth) == 1:
                # (p - q)+, what the target wants beyond the drafts; p where rounding left nothing.
                weights = residual_or_target(1, p, q)
                return Outcome(prefix, chooser.choose(weights, Purpose.CORRECTION, 0))
        bonus = chooser.choose(tree.target_probs(path), Purpose.CORRECTION, 0)
        return Outcome(path, bonus)
