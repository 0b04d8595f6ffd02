"""Greedy block verification: a step accepts more, and the next ones pay it back."""

from typing import ClassVar

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.debts import Debts
from eaglegbv.verifiers.greedy_rule import verify_greedily
from eaglegbv.verifiers.stateful import StatefulUniforms, StatefulVerdict, StatefulVerifier


class GreedyBlockVerifier(StatefulVerifier):
    """Test prefixes by the products of p/q without a minimum; the next tokens repay the surplus."""

    name: ClassVar[str] = "greedy_block"
    source: ClassVar[str] = "Sun et al., Block Verification, ICLR 2025 (2403.10444), Algorithms 4-6"
    cost: ClassVar[str] = "O(L^2 W^2) with full debts and one row of the vocabulary"
    laws: ClassVar[frozenset[Law]] = frozenset({Law.IID})
    max_paths: ClassVar[int | None] = 1

    def verify(
        self, tree: DraftTree, target: TargetLaw, uniforms: StatefulUniforms, debts: Debts
    ) -> StatefulVerdict:
        """Judge one path per request; the test of depth i uses acceptance number i - 1."""
        if tree.length > 0:
            self.check_law(tree.law, tree.paths)
        return verify_greedily(tree, target, uniforms, debts)
