"""Sampling from the target and following it down the tree (naive speculative sampling).

Optimal where the tree is not random, and lossless for every tree (SpecInfer, 2305.09781, section
4).
"""

import torch
from torch import Tensor

from eaglegbv.config import DraftSampling
from eaglegbv.devices import entry_at
from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms, walk
from eaglegbv.verifiers.paths import child_counts, draw
from eaglegbv.verifiers.proof.chooser import Chooser, Prefix
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree


def target_only(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Sample from p; continue while the sample is a child.

    A sample at an inner node of depth d uses ``ACCEPTANCE`` d, also where it leaves the tree and
    so ends the step; the bonus token after a leaf uses ``CORRECTION`` 0.
    """
    prefix: Prefix = ()
    while children := tree.children(prefix):
        x = chooser.choose(tree.target_probs(prefix), Purpose.ACCEPTANCE, len(prefix))
        if x not in children:
            return Outcome(prefix, x)
        prefix = (*prefix, x)
    return Outcome(prefix, chooser.choose(tree.target_probs(prefix), Purpose.CORRECTION, 0))


# The same for batches, and at temperature 0.
class TargetOnlyVerifier(Verifier):
    """Sample from p; descend while the sample is a child. L + 1 rows of the vocabulary."""

    name = "target_only"
    draft_samplings = frozenset(DraftSampling)
    any_widths = frozenset({DraftSampling.IID, DraftSampling.WOR, DraftSampling.GREEDY})
    default_sampling = DraftSampling.FIXED

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge any tree; inner nodes of depth d sample with acceptance number d."""
        children = child_counts(tree)

        def sample(nodes: Tensor, depth: int) -> Tensor:
            number = uniforms.correction
            if depth < tree.length:
                inner = entry_at(children, nodes) > 0
                number = torch.where(inner, uniforms.acceptance[:, depth], number)
            return draw(target.probs_of(nodes), number)

        return walk(tree, sample)


class GreedyWalkVerifier(Verifier):
    """Follow the target's most likely tokens while they are children; commit the first that is not.

    The text is the target's own greedy text. At any other temperature it is no sample of the
    target's distribution, and the engine uses it at temperature 0 only. Stern et al., Blockwise
    Parallel Decoding (1811.03115). L + 1 rows of the vocabulary.
    """

    name = "greedy"
    draft_samplings = frozenset(DraftSampling)
    default_sampling = DraftSampling.FIXED

    def verify(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge any tree, a root alone too; p need not be normalised."""
        if tree.length > 0:
            return super().verify(tree, target, uniforms)
        roots = torch.zeros_like(tree.num_nodes)
        token_ids = target.most_likely(roots)
        return Verdict(tree.token_ids.new_zeros((tree.batch, 0)), roots, token_ids)

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:  # noqa: ARG002
        """Judge any tree; of equal largest logits the first counts."""
        return walk(tree, lambda nodes, _: target.most_likely(nodes))
