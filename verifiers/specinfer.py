"""Recursive rejection sampling, with or without replacement."""

from typing import ClassVar

import torch

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.remaining_laws import RemainingLaws
from eaglegbv.verifiers.siblings import first_paths
from eaglegbv.verifiers.top_down import Decisions, descend, draft_copies


class SpecInferVerifier(Verifier):
    """Try the drafts in order: accept x with min(1, r/q), r = p at first; else r <- (r - q)+.

    Without replacement q also loses a rejected token and is renormalised.
    """

    name: ClassVar[str] = "specinfer"
    source: ClassVar[str] = "SpecInfer (2305.09781); MDSD (2502.18779), Appendix A.1"
    cost: ClassVar[str] = "O(K L W) and one row of the vocabulary"
    laws: ClassVar[frozenset[Law]] = frozenset({Law.IID, Law.WOR})

    def judge(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Verdict:
        """Judge trees drawn with (``iid``) or without (``wor``) replacement."""
        laws = RemainingLaws.of(tree, target)
        first = first_paths(tree)
        chosen = torch.zeros_like(tree.parents)
        for k, copies in enumerate(draft_copies(tree, uniforms.acceptance)):
            tried = copies.real & (chosen.gather(1, copies.parents) == 0)
            if tree.law is Law.WOR:
                # Paths share their children here: each is one draft, that of its first path.
                tried &= first.gather(1, copies.children) == k
            passed = tried & (copies.uniforms < laws.ratios(copies.parents, copies.children))
            chosen = chosen.scatter_add(1, copies.parents, copies.children * passed)
            rejected = tried & ~passed
            laws.subtract(copies.parents, torch.ones_like(copies.uniforms), rejected)
            if tree.law is Law.WOR:
                laws.lose(copies.parents, copies.children, rejected)
        decisions = Decisions(chosen, weight=laws.scale, draft=laws.taken, ids=laws.ids)
        return descend(tree, decisions, target, uniforms)
