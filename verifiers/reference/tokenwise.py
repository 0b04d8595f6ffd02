"""Token verification: speculative sampling (Leviathan et al. 2023, Chen et al. 2023)."""

from eaglegbv.uniforms import Purpose
from eaglegbv.verifiers.reference.chooser import Chooser, accepts
from eaglegbv.verifiers.reference.probs import residual_or_target
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree


def token(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Accept x with min(1, p/q), stop at the first rejection, correct with (p - q)+."""
    (path,) = tree.paths
    for i, x in enumerate(path):
        p, q = tree.target_law(path[:i]), tree.draft_law(path[:i])
        if not accepts(chooser, min(1, p[x] / q[x]), Purpose.ACCEPTANCE, i):
            correction = chooser.choose(residual_or_target(1, p, q), Purpose.CORRECTION, 0)
            return Outcome(path[:i], correction)
    return Outcome(path, chooser.choose(tree.target_law(path), Purpose.CORRECTION, 0))
