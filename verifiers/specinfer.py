"""Recursive rejection sampling (SpecInfer, 2305.09781; MDSD, 2502.18779, Appendix A.1)."""

from typing import ClassVar

import torch

from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers.base import (
    Decisions,
    RemainingProbs,
    Verdict,
    Verifier,
    VerifyUniforms,
    descend,
    draft_copies,
)
from eaglegbv.verifiers.paths import first_paths
from eaglegbv.verifiers.proof.chooser import Chooser, Prefix, Probs, normalised, residual_or_target
from eaglegbv.verifiers.proof.tree import (
    Accepted,
    Outcome,
    ReferenceTree,
    Rejected,
    accepts_draft,
    walk_down,
)


def specinfer(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Walk down by rejection sampling, draft after draft."""
    return walk_down(tree, chooser, _step)


def _step(tree: ReferenceTree, prefix: Prefix, chooser: Chooser) -> Accepted | Rejected:
    """Accept x with min(1, r(x) / q(x)), r = p at first; on rejection r <- (r - q)+, normalised.

    Drawn without replacement (each child once), q also loses x and is renormalised. Drawn with
    replacement every copy of a token is tried: a copy counts like any other draft.
    """
    r, q = tree.target_probs(prefix), tree.draft_probs(prefix)
    for path, x in _drafts(tree, prefix).items():
        if accepts_draft(tree, prefix, path, min(1, r[x] / q[x]), chooser):
            return Accepted(x)
        r = normalised(residual_or_target(1, r, q))
        if tree.draft_sampling is DraftSampling.WOR:
            q = without(q, x)
    return Rejected(r)


def _drafts(tree: ReferenceTree, prefix: Prefix) -> dict[int, int]:
    if tree.draft_sampling is DraftSampling.WOR:
        return {path: token for token, path in tree.children(prefix).items()}
    return tree.drafts(prefix)


def without(q: Probs, x: int) -> Probs:
    """Return q restricted to the tokens other than x; ``q`` itself minus x if nothing is left."""
    rest = tuple(q[y] if y != x else q[y] - q[y] for y in range(len(q)))
    return normalised(rest) if sum(rest) > 0 else rest


# Recursive rejection sampling, with or without replacement.


class SpecInferVerifier(Verifier):
    """Try the drafts in order: accept x with min(1, r/q), r = p at first; else r <- (r - q)+.

    Without replacement q also loses a rejected token and is renormalised.
    """

    name: ClassVar[str] = "specinfer"
    source: ClassVar[str] = "SpecInfer (2305.09781); MDSD (2502.18779), Appendix A.1"
    cost: ClassVar[str] = "O(K L W) and one row of the vocabulary"
    draft_samplings: ClassVar[frozenset[DraftSampling]] = frozenset(
        {DraftSampling.IID, DraftSampling.WOR}
    )

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge trees drawn with (``iid``) or without (``wor``) replacement."""
        dists = RemainingProbs.of(tree, target)
        first = first_paths(tree)
        chosen = torch.zeros_like(tree.parents)
        for k, copies in enumerate(draft_copies(tree, uniforms.acceptance)):
            tried = copies.real & (chosen.gather(1, copies.parents) == 0)
            if tree.draft_sampling is DraftSampling.WOR:
                # Paths share their children here: each is one draft, that of its first path.
                tried &= first.gather(1, copies.children) == k
            passed = tried & (copies.uniforms < dists.ratios(copies.parents, copies.children))
            chosen = chosen.scatter_add(1, copies.parents, copies.children * passed)
            rejected = tried & ~passed
            dists.subtract(copies.parents, torch.ones_like(copies.uniforms), rejected)
            if tree.draft_sampling is DraftSampling.WOR:
                dists.lose(copies.parents, copies.children, rejected)
        decisions = Decisions(chosen, weight=dists.scale, draft=dists.taken, ids=dists.ids)
        return descend(tree, decisions, target, uniforms)
