"""SpecHub (Sun et al., EMNLP 2024, 2411.05289): two drafts, one of which is always the hub.

The hub a is the most likely token of q. The first draft is drawn from q; if it is the hub, the
second is drawn from the rest of q, else the second is the hub. So the pair is (x, a) with
probability q(x), and (a, x) with probability q(a) q(x) / (1 - q(a)).
"""

from eaglegbv.verifiers.reference.chooser import Chooser
from eaglegbv.verifiers.reference.probs import Number, Prefix, Probs, most_likely, positive, share
from eaglegbv.verifiers.reference.transport import tail_law
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.reference.walk import Accepted, Rejected, accepts_draft, walk


def spechub(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Walk down the tree of pairs."""
    return walk(tree, chooser, _step)


def _step(tree: ReferenceTree, prefix: Prefix, chooser: Chooser) -> Accepted | Rejected:
    """Serve p(x) from the pairs (x, a) first, then from (a, x); the hub takes what is left."""
    p, q = tree.target_law(prefix), tree.draft_law(prefix)
    (hub,) = most_likely(q, 1)
    children = tree.children(prefix)
    others = [x for x in children if x != hub]
    tail = tail_law(q, (hub,)) if others else tuple(mass - mass for mass in q)
    first = q if others else tail
    taken = _taken(p, first, tail, hub)
    for x in others:
        second = tail[x] - first[x]
        if next(iter(children)) == x:
            h = min(1, p[x] / first[x])
        else:
            h = share(min(second, positive(p[x] - first[x])), second) if second > 0 else 0
        if accepts_draft(tree, prefix, children[x], h, chooser):
            return Accepted(x)
    left = 1 - sum(taken)
    h = min(1, share(p[hub], left)) if left > 0 else 1
    if accepts_draft(tree, prefix, children[hub], h, chooser):
        return Accepted(hub)
    weights = tuple(
        px - px if x == hub else positive(px - tx)
        for x, (px, tx) in enumerate(zip(p, taken, strict=True))
    )
    return Rejected(weights if sum(weights) > 0 else p)


def _taken(p: Probs, first: Probs, tail: Probs, hub: int) -> list[Number]:
    """Return what the pairs serve of p(x) off the hub: min(p, q(x) / (1 - q(a)))."""
    return [
        px - px if x == hub else min(px, fx) + min(positive(px - fx), positive(tx - fx))
        for x, (px, fx, tx) in enumerate(zip(p, first, tail, strict=True))
    ]
