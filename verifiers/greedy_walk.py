"""The greedy walk: verification at temperature 0."""

from typing import ClassVar

from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.walk import walk


class GreedyWalkVerifier(Verifier):
    """Follow the target's most likely tokens while they are children; commit the first that is not.

    The text is the target's own greedy text. At any other temperature it is not a sample of the
    target's law, and the engine uses it at temperature 0 only.
    """

    name: ClassVar[str] = "greedy"
    source: ClassVar[str] = "Stern et al., Blockwise Parallel Decoding (1811.03115)"
    cost: ClassVar[str] = "L + 1 rows of the vocabulary"
    laws: ClassVar[frozenset[Law]] = frozenset(Law)
    default_law: ClassVar[Law] = Law.FIXED

    def judge(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Verdict:  # noqa: ARG002
        """Judge any tree; of equal largest logits the first counts."""

        def most_likely(nodes: Tensor, depth: int) -> Tensor:  # noqa: ARG001
            rows = target.rows.gather(1, nodes.unsqueeze(1)).squeeze(1)
            return target.logits[rows].argmax(dim=1)

        return walk(tree, most_likely)
