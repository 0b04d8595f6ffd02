"""Multi-path greedy block verification with the promises of SpecTr-GBV (2604.25925).

The path is selected as by otbv, for the modified target M in place of p, and verified by the greedy
block rule with the selections' distributions b. The acceptance rule of the authors' implementation does not
preserve the target with two or more paths. This one does, over any number of steps, and keeps what
the paper claims: one path is greedy block verification, and with one level a step accepts at least
sum p(x) [1 - (1 - min(1, q(x)/p(x)))^K].
"""

from typing import ClassVar

from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers.greedy_block import Step, Visit, greedy_verification, verify_greedily
from eaglegbv.verifiers.otbv import select_child
from eaglegbv.verifiers.proof.chooser import Chooser, Prefix
from eaglegbv.verifiers.proof.tree import ReferenceTree
from eaglegbv.verifiers.stateful import (
    Debts,
    ModifiedTarget,
    StatefulUniforms,
    StatefulVerdict,
    StatefulVerifier,
    entering_draw,
)


def spectr_gbv(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
    """Select a path for the modified target and verify it greedily."""
    path: Prefix = ()
    visits: list[Visit] = []
    state = target
    while drafts := tree.drafts(path):
        p = tree.target_probs(path)
        M = state.dist(p)
        selection = select_child(tree, path, M, chooser)
        visits.append(Visit(state, M, selection.dist, len(drafts)))
        draw = entering_draw(tree, chooser, len(path), len(target.layers))
        state = state.entered(p, selection.token, draw)
        path = (*path, selection.token)
    return greedy_verification(tree, path, visits, state, chooser)


# Greedy block verification of a path selected among several by exact optimal transport.


class SpecTrGbvVerifier(StatefulVerifier):
    """Select as otbv does, for the modified target, and verify by the greedy block rule.

    This rule keeps the paper's promises and is lossless over any number of steps. The acceptance
    rule of the authors' implementation does not preserve the target with two or more paths.
    """

    name: ClassVar[str] = "spectr_gbv"
    source: ClassVar[str] = "Lin et al., SpecTr-GBV (2604.25925), with a corrected acceptance rule"
    cost: ClassVar[str] = "O(L^2 W^2) with full debts and one row of the vocabulary"
    draft_samplings: ClassVar[frozenset[DraftSampling]] = frozenset({DraftSampling.IID})

    def verify(
        self, tree: DraftTree, target: TargetProbs, uniforms: StatefulUniforms, debts: Debts
    ) -> StatefulVerdict:
        """Judge independent paths; selection and tests use the numbers otbv uses."""
        if tree.length > 0:
            self.check_sampling(tree.draft_sampling, tree.paths)
        return verify_greedily(tree, target, uniforms, debts)
