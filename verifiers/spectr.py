"""K-SEQ, the sequential selection of SpecTr (Sun et al. 2023, 2310.15141)."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms, descend, numbers_of_paths
from eaglegbv.verifiers.paths import draft_counts, places_of_tokens, rooted, steps_of
from eaglegbv.verifiers.proof.chooser import Chooser, Number, Prefix, Probs, positive
from eaglegbv.verifiers.proof.tree import (
    Accepted,
    Outcome,
    ReferenceTree,
    Rejected,
    accepts_draft,
    walk_down,
)


def spectr(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Walk down by K-SEQ, draft after draft."""
    return walk_down(tree, chooser, exact_k_seq)


def exact_k_seq(tree: ReferenceTree, prefix: Prefix, chooser: Chooser) -> Accepted | Rejected:
    """Accept each of the n drafts with min(1, p / (rho q)).

    The residual is p - min(q, p / rho) * sum_{k<n} (1 - beta)^k, non-negative because that sum is
    at most rho.
    """
    p, q = tree.target_probs(prefix), tree.draft_probs(prefix)
    drafts = tree.drafts(prefix)
    rho = scale(p, q, len(drafts))
    for path, x in drafts.items():
        if accepts_draft(tree, prefix, path, min(1, p[x] / (rho * q[x])), chooser):
            return Accepted(x)
    overlap = _overlap(p, q, rho)
    tries = _tries(sum(overlap), len(drafts))
    weights = tuple(positive(px - m * tries) for px, m in zip(p, overlap, strict=True))
    return Rejected(weights if sum(weights) > 0 else p)


@lru_cache(maxsize=1 << 16)
def scale(p: Probs, q: Probs, drafts: int) -> Number:
    """Return rho in [1, n] with 1 - (1 - beta)^n = rho beta, beta = sum min(q, p / rho).

    Found by bisection and rounded up: any rho of [1, n] with (1 - (1 - beta)^n) / beta <= rho is
    lossless, a smaller one is not.
    """
    low, high = 1.0, float(drafts)
    if _tries(sum(_overlap(p, q, low)), drafts) <= low:
        return 1
    while low < (middle := (low + high) / 2) < high:
        if _tries(sum(_overlap(p, q, middle)), drafts) <= middle:
            high = middle
        else:
            low = middle
    return high


def _overlap(p: Probs, q: Probs, rho: Number) -> Probs:
    return tuple(min(qx, px / rho) for px, qx in zip(p, q, strict=True))


def _tries(beta: Number, drafts: int) -> Number:
    """Return sum_{k<n} (1 - beta)^k, the expected number of drafts tried."""
    return sum((1 - beta) ** k for k in range(drafts))


# The same for batches.


class SpecTrVerifier(Verifier):
    """Try the drafts in order, with the smallest lossless rho of each node.

    O(58 N W) and one row of the vocabulary.
    """

    name = "spectr"
    draft_samplings = frozenset({DraftSampling.IID})

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge trees of independent paths."""
        probs = target.probs_at(tree.draft_ids) * (tree.draft_probs > 0)
        plan = k_seq(probs, tree.draft_probs, draft_counts(tree))
        places = places_of_tokens(tree, tree.draft_ids, tree.draft_probs)
        at = tree.parents * tree.width + places
        p, q = probs.flatten(1).gather(1, at), tree.draft_probs.flatten(1).gather(1, at)
        chances = p / (plan.rho.gather(1, tree.parents) * q)
        above, real = rooted(tree.path_nodes)[:, :, :-1], steps_of(tree)
        numbers = numbers_of_paths(tree, uniforms.acceptance)
        chosen = torch.zeros_like(tree.parents)
        for k in range(tree.paths):
            parents, children = above[:, k], tree.path_nodes[:, k]
            tried = real[:, k] & (chosen.gather(1, parents) == 0)
            passed = tried & (numbers[:, :, k] < chances.gather(1, children))
            chosen = chosen.scatter_add(1, parents, children * passed)
        return descend(
            tree,
            target,
            uniforms,
            children=chosen,
            weight=torch.ones_like(plan.rho),
            ids=tree.draft_ids,
            draft=plan.served,
        )


_HALVINGS = 58
"""Bisections after which an interval inside [1, 16] is two neighbouring numbers."""


@dataclass(frozen=True, slots=True)
class KSeq:
    """K-SEQ at every node.

    Attributes:
        rho: ``[batch, nodes]`` float64.
        served: ``[batch, nodes, width]`` float64, what the drafts serve of p: the residual is
            p minus it.
    """

    rho: Tensor
    served: Tensor


def k_seq(target: Tensor, draft: Tensor, drafts: Tensor) -> KSeq:
    """Find rho at every node, as :func:`scale` does.

    Args:
        target: ``[batch, nodes, width]`` float64, p on the support of q.
        draft: ``[batch, nodes, width]`` float64, q.
        drafts: ``[batch, nodes]`` int64, n.
    """
    n = drafts.to(draft.dtype).clamp(min=1)

    def tries(rho: Tensor) -> Tensor:
        """Return ``sum_{k<n} (1 - beta)^k``; n at beta = 0."""
        beta = torch.minimum(draft, target / rho.unsqueeze(2)).sum(dim=2)
        powers = -torch.expm1(n * torch.log1p(-beta.clamp(max=1.0))) / beta
        return torch.where(beta > 0, powers, n)

    low, high = torch.ones_like(n), n
    high = torch.where(tries(low) <= low, low, high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = tries(middle) <= middle
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    overlap = torch.minimum(draft, target / high.unsqueeze(2))
    # A leaf has no drafts, so nothing is served there.
    served = torch.where(drafts > 0, tries(high), 0.0)
    return KSeq(rho=high, served=overlap * served.unsqueeze(2))
