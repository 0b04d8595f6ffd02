"""Multi-path greedy block verification with the promises of SpecTr-GBV (Lin et al., 2604.25925).

The path is selected as by otbv, for the modified target M in place of p, and verified by the greedy
block rule with the selections' distributions b. The acceptance rule of the authors' implementation
does not preserve the target with two or more paths. This one does, over any number of steps, and
keeps what the paper claims: one path is greedy block verification, and with one level a step
accepts at least sum p(x) [1 - (1 - min(1, q(x)/p(x)))^K].
"""

from eaglegbv.verifiers.greedy_block import GreedyBlockVerifier, Visit, greedy_verification
from eaglegbv.verifiers.otbv import select_child
from eaglegbv.verifiers.proof.chooser import Chooser, Prefix
from eaglegbv.verifiers.proof.tree import ReferenceTree
from eaglegbv.verifiers.stateful import ModifiedTarget, Step, entering_draw


def spectr_gbv(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
    """Select a path for the modified target and verify it greedily."""
    path: Prefix = ()
    visits: list[Visit] = []
    state = target
    while drafts := tree.drafts(path):
        p = tree.target_probs(path)
        M = state.probs(p)
        x, b = select_child(tree, path, M, chooser)
        visits.append(Visit(state, M, b, len(drafts)))
        draw = entering_draw(tree, chooser, len(path), len(target.layers))
        state = state.entered(p, x, draw)
        path = (*path, x)
    return greedy_verification(tree, path, visits, state, chooser)


class SpecTrGbvVerifier(GreedyBlockVerifier):
    """The same for batches: :class:`GreedyBlockVerifier` of any number of paths."""

    name = "spectr_gbv"
    max_paths = None
