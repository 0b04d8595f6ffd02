"""SpecHub (Sun et al., EMNLP 2024, 2411.05289): two drafts, one of which is always the hub.

The hub a is the most likely token of q. The first draft is drawn from q; if it is the hub, the
second is drawn from the rest of q, else the second is the hub. So the pair is (x, a) with
probability q(x), and (a, x) with probability q(a) q(x) / (1 - q(a)).
"""

import torch

from eaglegbv.config import DraftSampling
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms, descend, numbers_of_children
from eaglegbv.verifiers.paths import child_counts, drafted_nodes, first_draws, over_nodes
from eaglegbv.verifiers.proof.chooser import (
    Chooser,
    Prefix,
    exact_tail_probs,
    most_likely,
    positive,
    share,
)
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree, Rejected, accepts_draft, walk_down
from eaglegbv.verifiers.selection import PopularTree, tail_probs


def spechub(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Walk down the tree of pairs."""
    return walk_down(tree, chooser, _step)


def _step(tree: ReferenceTree, prefix: Prefix, chooser: Chooser) -> int | Rejected:
    """Serve p(x) from the pairs (x, a) first, then from (a, x); the hub takes what is left."""
    p = tree.target_probs(prefix)
    q = tree.draft_probs(prefix)
    (hub,) = most_likely(q, 1)
    children = tree.children(prefix)
    others = [x for x in children if x != hub]
    tail = exact_tail_probs(q, (hub,)) if others else tuple(mass - mass for mass in q)
    first = q if others else tail
    # What the pairs serve of p(x) off the hub: min(p, q(x) / (1 - q(a))).
    taken = [
        px - px if x == hub else min(px, fx) + min(positive(px - fx), positive(tx - fx))
        for x, (px, fx, tx) in enumerate(zip(p, first, tail, strict=True))
    ]
    for x in others:
        second = tail[x] - first[x]
        if next(iter(children)) == x:
            h = min(1, p[x] / first[x])
        else:
            h = share(min(second, positive(p[x] - first[x])), second) if second > 0 else 0
        if accepts_draft(tree, prefix, children[x], h, chooser):
            return x
    left = 1 - sum(taken)
    h = min(1, share(p[hub], left)) if left > 0 else 1
    if accepts_draft(tree, prefix, children[hub], h, chooser):
        return hub
    weights = tuple(
        px - px if x == hub else positive(px - tx)
        for x, (px, tx) in enumerate(zip(p, taken, strict=True))
    )
    return Rejected(weights if sum(weights) > 0 else p)


# The same for batches.
class SpecHubVerifier(Verifier):
    """Walk down the tree of pairs. O(N W log W) and one row of the vocabulary."""

    name = "spechub"
    draft_samplings = frozenset({DraftSampling.HUB})
    any_widths = frozenset()
    default_sampling = DraftSampling.HUB

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge trees of pairs; each child uses the number of its first draw."""
        popular = PopularTree.of(tree, target)
        children = child_counts(tree)
        hub = popular.most_likely(children.clamp(max=1))
        first = popular.draft.masked_fill(hub, 0.0)
        second = tail_probs(popular.draft, hub) - first
        again = torch.minimum((popular.target - first).clamp(min=0), second.clamp(min=0))
        served = torch.minimum(popular.target, first) + again
        served = served.masked_fill(hub | (children < 2).unsqueeze(2), 0.0)
        left = 1 - served.sum(dim=2, keepdim=True)
        chances = torch.where(
            hub,
            torch.where(left > 0, popular.target[:, :, :1] / left, 1.0),
            torch.where(second > 0, again / second, 0.0),
        )

        # A token drawn before the hub is judged by the pairs (x, a).
        first_draw = first_draws(tree)
        is_hub = popular.places == 0
        drawn_at = torch.where(drafted_nodes(tree), first_draw, tree.drafts)
        earliest = over_nodes(tree, tree.parents, drawn_at, "amin", tree.drafts)
        leads = ~is_hub & (first_draw == earliest.gather(1, tree.parents))
        ratio = popular.at_tokens(popular.target) / popular.at_tokens(popular.draft)
        chances = torch.where(leads, ratio, popular.at_tokens(chances))
        numbers = numbers_of_children(tree, first_draw, uniforms.acceptance)
        passed = drafted_nodes(tree) & (numbers < chances)
        # The accepted child of each node, 0 if none; the hub yields to the other token.
        index = torch.arange(tree.nodes, device=passed.device)
        score = torch.where(passed, index + torch.where(is_hub, 0, tree.nodes), 0)
        best = over_nodes(tree, tree.parents, score, "amax", 0)
        child = best % tree.nodes
        ones = torch.ones_like(numbers)
        draft = torch.where(hub, popular.target, served)
        return descend(tree, target, uniforms, child, ones, popular.ids, draft)
