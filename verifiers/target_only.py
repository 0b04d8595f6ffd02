"""Sampling from the target and following the sample down the tree."""

from typing import ClassVar

import torch
from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.categorical import draw
from eaglegbv.verifiers.siblings import child_counts
from eaglegbv.verifiers.walk import walk


class TargetOnlyVerifier(Verifier):
    """Sample from p; descend while the sample is a child. Optimal where the tree is not random."""

    name: ClassVar[str] = "target_only"
    source: ClassVar[str] = "naive speculative sampling; SpecInfer (2305.09781), section 4"
    cost: ClassVar[str] = "L + 1 rows of the vocabulary"
    laws: ClassVar[frozenset[Law]] = frozenset(Law)
    default_law: ClassVar[Law] = Law.FIXED

    def judge(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Verdict:
        """Judge any tree; inner nodes of depth d sample with acceptance number d."""
        children = child_counts(tree)

        def sample(nodes: Tensor, depth: int) -> Tensor:
            number = uniforms.correction
            if depth < tree.length:
                inner = children.gather(1, nodes.unsqueeze(1)).squeeze(1) > 0
                number = torch.where(inner, uniforms.acceptance[:, depth], number)
            return draw(target.probs_of(nodes), number)

        return walk(tree, sample)
