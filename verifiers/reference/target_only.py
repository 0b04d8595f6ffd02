"""Sampling from the target and following it down the tree (naive speculative sampling).

Optimal where the tree is not random, and lossless for every tree.
"""

from eaglegbv.uniforms import Purpose
from eaglegbv.verifiers.reference.chooser import Chooser
from eaglegbv.verifiers.reference.probs import Prefix
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree


def target_only(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Sample from p; continue while the sample is a child.

    A sample at an inner node of depth d uses ``ACCEPTANCE`` d, also where it leaves the tree and
    so ends the step; the bonus token after a leaf uses ``CORRECTION`` 0.
    """
    prefix: Prefix = ()
    while children := tree.children(prefix):
        x = chooser.choose(tree.target_law(prefix), Purpose.ACCEPTANCE, len(prefix))
        if x not in children:
            return Outcome(prefix, x)
        prefix = (*prefix, x)
    return Outcome(prefix, chooser.choose(tree.target_law(prefix), Purpose.CORRECTION, 0))
