"""Greedy multi-path block verification: the best-ranked of K paths, verified as one block."""

from typing import ClassVar

import torch
from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.block_rule import verify_block
from eaglegbv.verifiers.drafted_path import DraftedPath
from eaglegbv.verifiers.path_choice import preferred_path
from eaglegbv.verifiers.ranked_tree import RankedTree
from eaglegbv.verifiers.transport import power_step


class GbvVerifier(Verifier):
    """Verify the lexicographically largest path of p/q ratios with the law of being the largest."""

    name: ClassVar[str] = "gbv"
    source: ClassVar[str] = "Thomas & Pal 2026 (2602.16961), Algorithm 1, with block verification"
    laws: ClassVar[frozenset[Law]] = frozenset({Law.IID})

    def judge(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Verdict:
        """Judge K independent paths per request."""
        ranked = RankedTree.of(tree, target)
        path = ranked.path(preferred_path(tree, ranked.ranks), ranked.laws.draft)
        return verify_block(_skewed(path, tree.paths), target, uniforms)


def _skewed(path: DraftedPath, paths: int) -> DraftedPath:
    """Replace q along the best of K paths by the law that being the best gives it.

    ``Pr(best path starts with x^i) = (S + q)^K - S^K``, with q the joint draft law of x^i and S
    the probability that one path ranks below x^i. Conditional laws are quotients of two such, which
    only depend on ``S / (S + q)``, so nothing underflows.
    """
    if paths == 1:
        return path
    at = path.chosen.unsqueeze(2)
    F = path.draft.cumsum(dim=2)
    own = path.draft.gather(2, at).squeeze(2)
    beneath = F.gather(2, at).squeeze(2) - own
    S, q = torch.zeros_like(own[:, 0]), torch.ones_like(own[:, 0])
    below, joint = [], []
    for step in range(own.shape[1]):
        below.append(S)
        joint.append(q)
        S, q = S + q * beneath[:, step], q * own[:, step]
        total = S + q
        S, q = S / total, q / total
    return path.with_draft(
        _best(
            torch.stack(below, 1).unsqueeze(2), torch.stack(joint, 1).unsqueeze(2), F, path, paths
        )
    )


def _best(S: Tensor, q: Tensor, F: Tensor, path: DraftedPath, paths: int) -> Tensor:
    n = torch.full_like(q, paths)
    whole = power_step(torch.ones_like(q), q, n, torch.ones_like(q))
    upto = S + q * F
    return power_step(upto, q * path.draft, n, upto.pow(n)) / whole
