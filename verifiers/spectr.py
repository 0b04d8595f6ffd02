"""K-SEQ, the sequential selection of SpecTr (Sun et al. 2023, 2310.15141)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers.base import (
    Decisions,
    Verdict,
    Verifier,
    VerifyUniforms,
    descend,
    draft_copies,
)
from eaglegbv.verifiers.paths import places_of_tokens
from eaglegbv.verifiers.proof.chooser import Chooser, Number, Prefix, Probs, positive
from eaglegbv.verifiers.proof.tree import (
    Accepted,
    Outcome,
    ReferenceTree,
    Rejected,
    accepts_draft,
    walk_down,
)
from eaglegbv.verifiers.selection import PathSteps


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


# K-SEQ, the sequential selection of SpecTr.


_HALVINGS = 58
"""Bisections after which an interval inside [1, 16] is two neighbouring numbers."""


class SpecTrVerifier(Verifier):
    """Accept each of the n drafts with min(1, p / (rho q)), with the smallest lossless rho."""

    name: ClassVar[str] = "spectr"
    source: ClassVar[str] = "Sun et al., SpecTr (2310.15141), K-SEQ"
    cost: ClassVar[str] = "O(58 N W) and one row of the vocabulary"
    draft_samplings: ClassVar[frozenset[DraftSampling]] = frozenset({DraftSampling.IID})

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge trees of independent paths."""
        probs = target.probs_at(tree.draft_ids) * (tree.draft_probs > 0)
        plan = k_seq(probs, tree.draft_probs, PathSteps.of(tree).draft_counts(tree))
        places = places_of_tokens(tree, tree.draft_ids, tree.draft_probs)
        at = tree.parents * tree.width + places
        p, q = probs.flatten(1).gather(1, at), tree.draft_probs.flatten(1).gather(1, at)
        chances = p / (plan.rho.gather(1, tree.parents) * q)
        chosen = torch.zeros_like(tree.parents)
        for copies in draft_copies(tree, uniforms.acceptance):
            tried = copies.real & (chosen.gather(1, copies.parents) == 0)
            passed = tried & (copies.uniforms < chances.gather(1, copies.children))
            chosen = chosen.scatter_add(1, copies.parents, copies.children * passed)
        decisions = Decisions(chosen, torch.ones_like(plan.rho), plan.served, tree.draft_ids)
        return descend(tree, decisions, target, uniforms)


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
    """Find rho in [1, n] with ``1 - (1 - beta)^n = rho beta``, ``beta = sum min(q, p / rho)``.

    By bisection, rounded up: any rho with ``(1 - (1 - beta)^n) / beta <= rho`` is lossless, a
    smaller one is not.

    Args:
        target: ``[batch, nodes, width]`` float64, p on the support of q.
        draft: ``[batch, nodes, width]`` float64, q.
        drafts: ``[batch, nodes]`` int64, n.
    """
    n = drafts.to(draft.dtype).clamp(min=1)
    low, high = torch.ones_like(n), n
    high = torch.where(_spectr_tries(_spectr_overlap(target, draft, low), n) <= low, low, high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = _spectr_tries(_spectr_overlap(target, draft, middle), n) <= middle
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    overlap = _spectr_overlap(target, draft, high)
    # A leaf has no drafts, so nothing is served there.
    tries = torch.where(drafts > 0, _spectr_tries(overlap, n), 0.0)
    return KSeq(rho=high, served=overlap * tries.unsqueeze(2))


def _spectr_overlap(target: Tensor, draft: Tensor, rho: Tensor) -> Tensor:
    return torch.minimum(draft, target / rho.unsqueeze(2))


def _spectr_tries(overlap: Tensor, n: Tensor) -> Tensor:
    """Return ``sum_{k<n} (1 - beta)^k``, the expected number of drafts tried; n at beta = 0."""
    beta = overlap.sum(dim=2)
    tries = -torch.expm1(n * torch.log1p(-beta.clamp(max=1.0))) / beta
    return torch.where(beta > 0, tries, n)
