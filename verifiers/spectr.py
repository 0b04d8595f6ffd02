"""K-SEQ, the sequential selection of SpecTr (Sun et al. 2023, 2310.15141)."""

from functools import lru_cache

import torch
from torch import Tensor

from eaglegbv.config import DraftSampling
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms, descend, drafts_in_order
from eaglegbv.verifiers.paths import places_of_tokens
from eaglegbv.verifiers.proof.chooser import Chooser, Number, Prefix, Probs, positive
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree, Rejected, accepts_draft, walk_down


def spectr(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Walk down by K-SEQ, draft after draft."""
    return walk_down(tree, chooser, exact_k_seq)


def exact_k_seq(tree: ReferenceTree, prefix: Prefix, chooser: Chooser) -> int | Rejected:
    """Accept each of the n drafts with min(1, p / (rho q)).

    The residual is p - min(q, p / rho) * sum_{k<n} (1 - beta)^k, non-negative because that sum is
    at most rho.
    """
    p = tree.target_probs(prefix)
    q = tree.draft_probs(prefix)
    drafts = tree.drafts(prefix)
    rho = scale(p, q, len(drafts))
    for number, x in drafts.items():
        if accepts_draft(tree, prefix, number, min(1, p[x] / (rho * q[x])), chooser):
            return x
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
    low = 1.0
    high = float(drafts)
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
    any_widths = frozenset({DraftSampling.IID})

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge trees of independent paths."""
        probs = target.probs_in(target.rows, tree.draft_ids) * (tree.draft_probs > 0)
        rho, served = k_seq(probs, tree.draft_probs, tree.draft_counts())
        places = places_of_tokens(tree, tree.draft_ids, tree.draft_probs)
        at = tree.parents * tree.width + places
        p = probs.flatten(1).gather(1, at)
        q = tree.draft_probs.flatten(1).gather(1, at)
        chances = p / (rho.gather(1, tree.parents) * q)
        chosen = torch.zeros_like(tree.parents)
        for parents, children, real, numbers in drafts_in_order(tree, uniforms.acceptance):
            tried = real & (chosen.gather(1, parents) == 0)
            passed = tried & (numbers < chances.gather(1, children))
            chosen = chosen.scatter_add(1, parents, children * passed)
        ones = torch.ones_like(rho)
        return descend(tree, target, uniforms, chosen, ones, tree.draft_ids, served)


_HALVINGS = 58  # bisections after which an interval inside [1, 16] is two neighbouring numbers


def k_seq(target: Tensor, draft: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Find rho at every node, as :func:`scale` does; return it and what the drafts serve of p.

    p on the support of q, q, and what is served, so that the residual is p minus it, are ``[batch,
    nodes, width]`` float64; ``drafts``, n, and rho ``[batch, nodes]``.
    """
    n = drafts.to(draft.dtype).clamp(min=1)

    def tries(rho: Tensor) -> Tensor:
        """Return ``sum_{k<n} (1 - beta)^k``; n at beta = 0."""
        beta = torch.minimum(draft, target / rho.unsqueeze(2)).sum(dim=2)
        powers = -torch.expm1(n * torch.log1p(-beta.clamp(max=1.0))) / beta
        return torch.where(beta > 0, powers, n)

    low = torch.ones_like(n)
    high = n
    high = torch.where(tries(low) <= low, low, high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = tries(middle) <= middle
        low = torch.where(enough, low, middle)
        high = torch.where(enough, middle, high)
    overlap = torch.minimum(draft, target / high.unsqueeze(2))
    # A leaf has no drafts, so nothing is served there.
    served = torch.where(drafts > 0, tries(high), 0.0)
    return high, overlap * served.unsqueeze(2)
