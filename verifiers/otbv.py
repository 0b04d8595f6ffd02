"""Optimal-transport block verification: this project's own rule, and its default.

The walk down the tree selects at every node one of the drafts by the exact optimal transport of
that node; the selected path is then verified as one block, with the distributions b of the selections in
place of the draft distribution. The pair (token, number of drafts left on it) is one symbol of a larger
alphabet. Its second part has the same conditional distribution under target and draft, so block verification
on that alphabet is lossless, and so is its token part. With one path this is block verification;
with one level it reaches the optimal acceptance alpha*.
"""

from dataclasses import dataclass
from typing import ClassVar

from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers.base import NodeFigures, Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.block import block_figures, block_verification, verify_block
from eaglegbv.verifiers.paths import DraftedPath
from eaglegbv.verifiers.proof.chooser import (
    Chooser,
    Number,
    Prefix,
    Probs,
    accepts,
    most_likely,
    selection_index,
    share,
)
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.selection import select_fixed, select_greedy, select_iid
from eaglegbv.verifiers.transport import (
    exact_tail_probs,
    exact_transport,
    fixed_probs,
    greedy_probs,
    select,
)


@dataclass(frozen=True, slots=True)
class Selection:
    """A token selected at a node, and the distribution b of that selection."""

    token: int
    dist: Probs


def otbv(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Select a path node by node, then verify it as one block."""
    path: Prefix = ()
    dists: list[Probs] = []
    while tree.children(path):
        selection = select_child(tree, path, tree.target_probs(path), chooser)
        path = (*path, selection.token)
        dists.append(selection.dist)
    return block_verification(tree, path, dists, chooser)


def select_child(tree: ReferenceTree, prefix: Prefix, p: Probs, chooser: Chooser) -> Selection:
    """Select a child of the node ``prefix`` for the target draft_sampling ``p``."""
    match tree.draft_sampling:
        case DraftSampling.IID:
            return _select_iid(tree, prefix, p, chooser)
        case DraftSampling.GREEDY:
            return _select_greedy(tree, prefix, p, chooser)
        case DraftSampling.FIXED:
            return _select_fixed(tree, prefix, p, chooser)
        case other:
            raise ValueError(f"otbv has no selection for the distribution {other!r}")


def _select_iid(tree: ReferenceTree, prefix: Prefix, p: Probs, chooser: Chooser) -> Selection:
    drafts = tree.drafts(prefix)
    q = tree.draft_probs(prefix)
    if len(drafts) == 1:
        (token,) = drafts.values()
        return Selection(token, q)
    node = exact_transport(p, q, len(drafts))
    return Selection(select(node, drafts, len(prefix), len(tree.paths), chooser), node.dist)


def _select_fixed(tree: ReferenceTree, prefix: Prefix, p: Probs, chooser: Chooser) -> Selection:
    children = tuple(tree.children(prefix))
    dist = fixed_probs(p, children)
    index = selection_index(len(tree.paths), len(prefix), 0, 0)
    chosen = chooser.choose([dist[x] for x in children], Purpose.SELECTION, index)
    return Selection(children[chosen], dist)


def _select_greedy(tree: ReferenceTree, prefix: Prefix, p: Probs, chooser: Chooser) -> Selection:
    q = tree.draft_probs(prefix)
    children = tuple(tree.children(prefix))
    kept = most_likely(q, len(children) - 1)
    (drawn,) = set(children) - set(kept)
    dist, r = greedy_probs(p, q, kept), exact_tail_probs(q, kept)

    def index(which: int) -> int:
        return selection_index(len(tree.paths), len(prefix), 0, which)

    take: Number = share(dist[drawn], r[drawn])
    if accepts(chooser, take, Purpose.SELECTION, index(1)):
        return Selection(drawn, dist)
    others = tuple(x for x in children if x in kept)
    chosen = chooser.choose([p[x] for x in others], Purpose.SELECTION, index(0))
    return Selection(others[chosen], dist)


# Optimal-transport block verification: this project's own rule, and its default.
#
# At every node one of the drafts is selected by the exact optimal transport of that node; the
# selected path is verified as one block, with the distributions b of the selections in place of the draft distribution.
# The pair (token, number of drafts left on it) is one symbol of a larger alphabet. Its second part
# has the same conditional distribution under target and draft, so block verification on that alphabet is
# lossless, and so is its token part. With one path this is block verification; with one level it
# reaches the optimal acceptance alpha*.


class OtbvVerifier(Verifier):
    """Select a path by optimal transport at every node, then verify it as one block."""

    name: ClassVar[str] = "otbv"
    source: ClassVar[str] = "eaglegbv: exact optimal transport, then block verification"
    cost: ClassVar[str] = "O(N W + F W log W), F forks, and one row of the vocabulary"
    draft_samplings: ClassVar[frozenset[DraftSampling]] = frozenset(
        {DraftSampling.IID, DraftSampling.GREEDY, DraftSampling.FIXED}
    )
    one_graph: ClassVar[bool] = True

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge trees of any accepted distribution."""
        return verify_block(_select(tree, target, uniforms), target, uniforms)

    def figures(
        self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms
    ) -> NodeFigures:
        """Return the distributions b of the selections, w and h of the selected path."""
        return block_figures(tree, _select(tree, target, uniforms))


def _select(tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> DraftedPath:
    if tree.draft_sampling is DraftSampling.FIXED:
        return select_fixed(tree, target, uniforms.selection)
    if tree.draft_sampling is DraftSampling.GREEDY:
        return select_greedy(tree, target, uniforms.selection)
    if tree.paths == 1:
        return DraftedPath.only(tree, target)
    return select_iid(tree, target, uniforms.selection)
