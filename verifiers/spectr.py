"""K-SEQ, the sequential selection of SpecTr."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.drafted_path import places_of_tokens
from eaglegbv.verifiers.iid_selection import PathSteps
from eaglegbv.verifiers.top_down import Decisions, descend, draft_copies

_HALVINGS = 58
"""Bisections after which an interval inside [1, 16] is two neighbouring numbers."""


class SpecTrVerifier(Verifier):
    """Accept each of the n drafts with min(1, p / (rho q)), with the smallest lossless rho."""

    name: ClassVar[str] = "spectr"
    source: ClassVar[str] = "Sun et al., SpecTr (2310.15141), K-SEQ"
    cost: ClassVar[str] = "O(58 N W) and one row of the vocabulary"
    laws: ClassVar[frozenset[Law]] = frozenset({Law.IID})

    def judge(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Verdict:
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
    high = torch.where(_tries(_overlap(target, draft, low), n) <= low, low, high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = _tries(_overlap(target, draft, middle), n) <= middle
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    overlap = _overlap(target, draft, high)
    # A leaf has no drafts, so nothing is served there.
    tries = torch.where(drafts > 0, _tries(overlap, n), 0.0)
    return KSeq(rho=high, served=overlap * tries.unsqueeze(2))


def _overlap(target: Tensor, draft: Tensor, rho: Tensor) -> Tensor:
    return torch.minimum(draft, target / rho.unsqueeze(2))


def _tries(overlap: Tensor, n: Tensor) -> Tensor:
    """Return ``sum_{k<n} (1 - beta)^k``, the expected number of drafts tried; n at beta = 0."""
    beta = overlap.sum(dim=2)
    tries = -torch.expm1(n * torch.log1p(-beta.clamp(max=1.0))) / beta
    return torch.where(beta > 0, tries, n)
