"""Greedy block verification of a path selected among several by exact optimal transport."""

from typing import ClassVar

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.debts import Debts
from eaglegbv.verifiers.greedy_rule import verify_greedily
from eaglegbv.verifiers.stateful import StatefulUniforms, StatefulVerdict, StatefulVerifier


class SpecTrGbvVerifier(StatefulVerifier):
    """Select as otbv does, for the modified target, and verify by the greedy block rule.

    This rule keeps the paper's promises and is lossless over any number of steps. The acceptance
    rule of the authors' implementation does not preserve the target with two or more paths.
    """

    name: ClassVar[str] = "spectr_gbv"
    source: ClassVar[str] = "Lin et al., SpecTr-GBV (2604.25925), with a corrected acceptance rule"
    cost: ClassVar[str] = "O(L^2 W^2) with full debts and one row of the vocabulary"
    laws: ClassVar[frozenset[Law]] = frozenset({Law.IID})

    def verify(
        self, tree: DraftTree, target: TargetLaw, uniforms: StatefulUniforms, debts: Debts
    ) -> StatefulVerdict:
        """Judge independent paths; selection and tests use the numbers otbv uses."""
        if tree.length > 0:
            self.check_law(tree.law, tree.paths)
        return verify_greedily(tree, target, uniforms, debts)
