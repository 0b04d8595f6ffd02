"""Verification of greedy drafts (Hu et al., ICLR 2025, Section 5): optimal for its draft law.

The children of a node are the n - 1 most likely tokens A and one token t drawn from the tail law r,
q restricted to the rest. The rule is optimal transport between p and r, where a sample that falls
on A is a child as well: the walk stops with probability sum over the tail of (p - min(p, r)) only.
"""

from eaglegbv.uniforms import Purpose
from eaglegbv.verifiers.reference.chooser import Chooser
from eaglegbv.verifiers.reference.probs import Prefix, most_likely, residual_or_target
from eaglegbv.verifiers.reference.transport import tail_law
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.reference.walk import (
    Accepted,
    Rejected,
    acceptance_index,
    accepts_draft,
    walk,
)


def greedy_draft(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Walk down the greedy tree."""
    return walk(tree, chooser, _step)


def _step(tree: ReferenceTree, prefix: Prefix, chooser: Chooser) -> Accepted | Rejected:
    """Accept t with min(1, p/r), else sample from (p - r)+ and go on where that is a child.

    The sample uses the number of the first child of A, so each child owns one number; with A empty
    it can only be the correction token.
    """
    p, q = tree.target_law(prefix), tree.draft_law(prefix)
    children = tree.children(prefix)
    kept = most_likely(q, len(children) - 1)
    (drawn,) = children.keys() - set(kept)
    r = tail_law(q, kept)
    h = min(1, p[drawn] / r[drawn])
    if accepts_draft(tree, prefix, children[drawn], h, chooser):
        return Accepted(drawn)
    weights = residual_or_target(1, p, r)
    if not kept:
        return Rejected(weights)
    first = min(children[x] for x in kept)
    x = chooser.choose(weights, Purpose.ACCEPTANCE, acceptance_index(tree, prefix, first))
    if x in kept:
        return Accepted(x)
    return Rejected(tuple(int(y == x) for y in range(len(p))))
