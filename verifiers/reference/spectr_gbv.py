"""Multi-path greedy block verification with the promises of SpecTr-GBV (2604.25925).

The path is selected as by otbv, for the modified target M in place of p, and verified by the greedy
block rule with the selections' laws b. The acceptance rule of the authors' implementation does not
preserve the target with two or more paths. This one does, over any number of steps, and keeps what
the paper claims: one path is greedy block verification, and with one level a step accepts at least
sum p(x) [1 - (1 - min(1, q(x)/p(x)))^K].
"""

from eaglegbv.verifiers.reference.chooser import Chooser
from eaglegbv.verifiers.reference.greedy_block import Step, Visit, greedy_verification
from eaglegbv.verifiers.reference.modified_target import ModifiedTarget, entering_draw
from eaglegbv.verifiers.reference.otbv import select_child
from eaglegbv.verifiers.reference.probs import Prefix
from eaglegbv.verifiers.reference.tree import ReferenceTree


def spectr_gbv(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
    """Select a path for the modified target and verify it greedily."""
    path: Prefix = ()
    visits: list[Visit] = []
    state = target
    while drafts := tree.drafts(path):
        p = tree.target_law(path)
        M = state.law(p)
        selection = select_child(tree, path, M, chooser)
        visits.append(Visit(state, M, selection.law, len(drafts)))
        draw = entering_draw(tree, chooser, len(path), len(target.layers))
        state = state.entered(p, selection.token, draw)
        path = (*path, selection.token)
    return greedy_verification(tree, path, visits, state, chooser)
