"""Optimal-transport block verification: this project's own rule, and its default.

The walk down the tree selects at every node one of the drafts by the exact optimal transport of
that node; the selected path is then verified as one block, with the laws b of the selections in
place of the draft law. The pair (token, number of drafts left on it) is one symbol of a larger
alphabet. Its second part has the same conditional law under target and draft, so block verification
on that alphabet is lossless, and so is its token part. With one path this is block verification;
with one level it reaches the optimal acceptance alpha*.
"""

from dataclasses import dataclass

from eaglegbv.tree import Law
from eaglegbv.uniforms import Purpose
from eaglegbv.verifiers.reference.block import block_verification
from eaglegbv.verifiers.reference.chooser import Chooser, accepts, selection_index
from eaglegbv.verifiers.reference.probs import Number, Prefix, Probs, most_likely, share
from eaglegbv.verifiers.reference.transport import (
    fixed_law,
    greedy_law,
    select,
    tail_law,
    transport,
)
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree


@dataclass(frozen=True, slots=True)
class Selection:
    """A token selected at a node, and the law b of that selection."""

    token: int
    law: Probs


def otbv(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Select a path node by node, then verify it as one block."""
    path: Prefix = ()
    laws: list[Probs] = []
    while tree.children(path):
        selection = select_child(tree, path, tree.target_law(path), chooser)
        path = (*path, selection.token)
        laws.append(selection.law)
    return block_verification(tree, path, laws, chooser)


def select_child(tree: ReferenceTree, prefix: Prefix, p: Probs, chooser: Chooser) -> Selection:
    """Select a child of the node ``prefix`` for the target law ``p``."""
    match tree.law:
        case Law.IID:
            return _select_iid(tree, prefix, p, chooser)
        case Law.GREEDY:
            return _select_greedy(tree, prefix, p, chooser)
        case Law.FIXED:
            return _select_fixed(tree, prefix, p, chooser)
        case other:
            raise ValueError(f"otbv has no selection for the law {other!r}")


def _select_iid(tree: ReferenceTree, prefix: Prefix, p: Probs, chooser: Chooser) -> Selection:
    drafts = tree.drafts(prefix)
    q = tree.draft_law(prefix)
    if len(drafts) == 1:
        (token,) = drafts.values()
        return Selection(token, q)
    node = transport(p, q, len(drafts))
    return Selection(select(node, drafts, len(prefix), len(tree.paths), chooser), node.law)


def _select_fixed(tree: ReferenceTree, prefix: Prefix, p: Probs, chooser: Chooser) -> Selection:
    children = tuple(tree.children(prefix))
    law = fixed_law(p, children)
    index = selection_index(len(tree.paths), len(prefix), 0, 0)
    chosen = chooser.choose([law[x] for x in children], Purpose.SELECTION, index)
    return Selection(children[chosen], law)


def _select_greedy(tree: ReferenceTree, prefix: Prefix, p: Probs, chooser: Chooser) -> Selection:
    q = tree.draft_law(prefix)
    children = tuple(tree.children(prefix))
    kept = most_likely(q, len(children) - 1)
    (drawn,) = set(children) - set(kept)
    law, r = greedy_law(p, q, kept), tail_law(q, kept)

    def index(which: int) -> int:
        return selection_index(len(tree.paths), len(prefix), 0, which)

    take: Number = share(law[drawn], r[drawn])
    if accepts(chooser, take, Purpose.SELECTION, index(1)):
        return Selection(drawn, law)
    others = tuple(x for x in children if x in kept)
    chosen = chooser.choose([p[x] for x in others], Purpose.SELECTION, index(0))
    return Selection(others[chosen], law)
