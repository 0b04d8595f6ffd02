"""Optimal-transport block verification: this project's own rule, and its default.

The walk down the tree selects at every node one of the drafts by the exact optimal transport of
that node; the selected path is then verified as one block, with the distributions b of the
selections in place of the draft distribution. The pair (token, number of drafts left on it) is one
symbol of a larger alphabet. Its second part has the same conditional distribution under target and
draft, so block verification on that alphabet is lossless, and so is its token part. With one path
this is block verification; with one level it reaches the optimal acceptance alpha*.
"""

from typing import TypeAlias

from eaglegbv.config import DraftSampling
from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import VerifyUniforms
from eaglegbv.verifiers.block import BlockRule, block_verification
from eaglegbv.verifiers.paths import DraftedPath
from eaglegbv.verifiers.proof.chooser import (
    Chooser,
    Prefix,
    Probs,
    accepts,
    exact_tail_probs,
    most_likely,
    normalised,
    selection_index,
    share,
)
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.selection import select_fixed, select_greedy, select_iid
from eaglegbv.verifiers.transport import exact_transport, select_draft

Selected: TypeAlias = tuple[int, Probs]
"""The token selected at a node, and the distribution b of that selection."""


def otbv(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Select a path node by node, then verify it as one block."""
    path: Prefix = ()
    probs: list[Probs] = []
    while tree.children(path):
        x, b = select_child(tree, path, tree.target_probs(path), chooser)
        path = (*path, x)
        probs.append(b)
    return block_verification(tree, path, probs, chooser)


def select_child(tree: ReferenceTree, prefix: Prefix, p: Probs, chooser: Chooser) -> Selected:
    """Select a child of the node ``prefix`` for the target probabilities ``p``."""
    match tree.draft_sampling:
        case DraftSampling.IID:
            return _select_iid(tree, prefix, p, chooser)
        case DraftSampling.GREEDY:
            return _select_greedy(tree, prefix, p, chooser)
        case DraftSampling.FIXED:
            return _select_fixed(tree, prefix, p, chooser)
        case other:
            raise ValueError(f"otbv has no selection for the draft sampling {other!r}")


def _select_iid(tree: ReferenceTree, prefix: Prefix, p: Probs, chooser: Chooser) -> Selected:
    drafts = tree.drafts(prefix)
    q = tree.draft_probs(prefix)
    if len(drafts) == 1:
        (token,) = drafts.values()
        return token, q
    node = exact_transport(p, q, len(drafts))
    token = select_draft(node, drafts, len(prefix), tree.most_draws, chooser)
    return token, node.probs


def _select_fixed(tree: ReferenceTree, prefix: Prefix, p: Probs, chooser: Chooser) -> Selected:
    """Draw a child by p restricted to the children; evenly where p has no mass on them."""
    children = tuple(tree.children(prefix))
    among = [int(x in children) for x in range(len(p))]
    wanted = [px * one for px, one in zip(p, among, strict=True)]
    probs = normalised(wanted if sum(wanted) > 0 else among)
    index = selection_index(tree.most_draws, len(prefix), 0, 0)
    chosen = chooser.choose([probs[x] for x in children], Purpose.SELECTION, index)
    return children[chosen], probs


def _select_greedy(tree: ReferenceTree, prefix: Prefix, p: Probs, chooser: Chooser) -> Selected:
    """Select where the most likely tokens are fixed and one is drawn from the tail r.

    The drawn child keeps what the target wants of it, min(p, r); the others share the rest in
    proportion to p.
    """
    q = tree.draft_probs(prefix)
    children = tuple(tree.children(prefix))
    kept = most_likely(q, len(children) - 1)
    (drawn,) = set(children) - set(kept)
    probs = r = exact_tail_probs(q, kept)
    total = sum(p[x] for x in kept)
    if total > 0:
        overlap = [0 if x in kept else min(p[x], r[x]) for x in range(len(p))]
        rest = 1 - sum(overlap)
        shares = (rest * share(p[x], total) if x in kept else overlap[x] for x in range(len(p)))
        probs = tuple(shares)
    which = selection_index(tree.most_draws, len(prefix), 0, 0)
    take = selection_index(tree.most_draws, len(prefix), 0, 1)
    if accepts(chooser, share(probs[drawn], r[drawn]), Purpose.SELECTION, take):
        return drawn, probs
    others = tuple(x for x in children if x in kept)
    chosen = chooser.choose([p[x] for x in others], Purpose.SELECTION, which)
    return others[chosen], probs


# The same for batches.
class OtbvVerifier(BlockRule):
    """Verify the path selected by optimal transport at every node.

    O(N W + F W log W), F forks, and one row of the vocabulary.
    """

    name = "otbv"
    draft_samplings = frozenset({DraftSampling.IID, DraftSampling.GREEDY, DraftSampling.FIXED})
    any_widths = frozenset({DraftSampling.IID, DraftSampling.GREEDY})

    def path(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> DraftedPath:
        """Return the selected path, with the distributions of the selections."""
        if tree.draft_sampling is DraftSampling.FIXED:
            return select_fixed(tree, target, uniforms.selection)
        if tree.draft_sampling is DraftSampling.GREEDY:
            return select_greedy(tree, target, uniforms.selection)
        if tree.drafts == 1:
            return DraftedPath.drawn(tree, target)
        return select_iid(tree, target, uniforms.selection)
