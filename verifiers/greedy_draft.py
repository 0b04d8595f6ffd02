"""Verification of greedy drafts (Hu et al., MDSD, ICLR 2025, 2502.18779, Section 5): optimal there.

The children of a node are the n - 1 most likely tokens A and one token t drawn from the tail r: q
restricted to the rest. The rule is optimal transport between p and r, where a sample that falls on
A is a child as well: the walk stops with probability sum over the tail of (p - min(p, r)) only.
"""

import torch
from torch import Tensor

from eaglegbv.config import DraftSampling
from eaglegbv.devices import entry_at
from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms, numbers_of_children, walk
from eaglegbv.verifiers.paths import (
    Residual,
    child_counts,
    correction_token,
    drafted_nodes,
    first_draws,
    over_nodes,
)
from eaglegbv.verifiers.proof.chooser import (
    Chooser,
    Prefix,
    exact_tail_probs,
    most_likely,
    residual_or_target,
)
from eaglegbv.verifiers.proof.tree import (
    Outcome,
    ReferenceTree,
    Rejected,
    acceptance_index,
    accepts_draft,
    walk_down,
)
from eaglegbv.verifiers.selection import PopularTree, tail_probs


def greedy_draft(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Walk down the greedy tree."""
    return walk_down(tree, chooser, _step)


def _step(tree: ReferenceTree, prefix: Prefix, chooser: Chooser) -> int | Rejected:
    """Accept t with min(1, p/r), else sample from (p - r)+ and go on where that is a child.

    The sample uses the number of the first child of A, so each child owns one number; with A empty
    it can only be the correction token.
    """
    p = tree.target_probs(prefix)
    q = tree.draft_probs(prefix)
    children = tree.children(prefix)
    kept = most_likely(q, len(children) - 1)
    (drawn,) = children.keys() - set(kept)
    r = exact_tail_probs(q, kept)
    h = min(1, p[drawn] / r[drawn])
    if accepts_draft(tree, prefix, children[drawn], h, chooser):
        return drawn
    weights = residual_or_target(1, p, r)
    if not kept:
        return Rejected(weights)
    first = min(children[x] for x in kept)
    x = chooser.choose(weights, Purpose.ACCEPTANCE, acceptance_index(tree, prefix, first))
    if x in kept:
        return x
    return Rejected(tuple(int(y == x) for y in range(len(p))))


# The same for batches.
class GreedyDraftVerifier(Verifier):
    """Walk down the greedy tree. O(N W log W) and L + 1 rows of the vocabulary."""

    name = "greedy_draft"
    draft_samplings = frozenset({DraftSampling.GREEDY})
    any_widths = frozenset({DraftSampling.GREEDY})
    default_sampling = DraftSampling.GREEDY

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge greedy trees, by the numbers that :func:`greedy_draft` uses."""
        popular = PopularTree.of(tree, target)
        children = child_counts(tree)
        kept = popular.most_likely(children - 1)
        # At a leaf nothing is drawn, and the sample is the bonus token.
        tail = tail_probs(popular.draft, kept) * (children > 0).unsqueeze(2)
        first = first_draws(tree)
        drafted = drafted_nodes(tree)
        fixed = drafted & (popular.at_tokens(kept.to(torch.int64)) > 0)
        chances = popular.at_tokens(popular.target) / popular.at_tokens(tail)
        numbers = numbers_of_children(tree, first, uniforms.acceptance)
        passed = drafted & ~fixed & (numbers < chances)
        index = torch.arange(tree.nodes, device=passed.device)
        accepted = torch.where(passed, index, 0)
        taken = over_nodes(tree, tree.parents, accepted, "amax", 0)
        fixed_first = torch.where(fixed, first, tree.drafts)
        sampler = over_nodes(tree, tree.parents, fixed_first, "amin", tree.drafts)
        ones = torch.ones_like(numbers)

        def next_token(nodes: Tensor, depth: int) -> Tensor:
            draw = entry_at(sampler, nodes)
            number = uniforms.correction
            if depth < tree.length:
                column = depth * tree.drafts + draw.clamp(max=tree.drafts - 1)
                acceptance = entry_at(uniforms.acceptance, column)
                number = torch.where(draw < tree.drafts, acceptance, number)
            residual = Residual.at(nodes, ones, popular.ids, tail)
            sampled = correction_token(residual, target, number)
            child = entry_at(taken, nodes)
            return torch.where(child > 0, entry_at(tree.token_ids, child), sampled)

        return walk(tree, next_token)
