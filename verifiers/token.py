"""Token verification (Leviathan et al. 2211.17192, Chen et al. 2302.01318)."""

import torch
from torch import Tensor

from eaglegbv.config import DraftSampling
from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.paths import DraftedPath, correction_token
from eaglegbv.verifiers.proof.chooser import Chooser, accepts, residual_or_target
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree


def token(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Accept x with min(1, p/q), stop at the first rejection, correct with (p - q)+."""
    (path,) = tree.paths
    for i, x in enumerate(path):
        p = tree.target_probs(path[:i])
        q = tree.draft_probs(path[:i])
        if not accepts(chooser, min(1, p[x] / q[x]), Purpose.ACCEPTANCE, i):
            correction = chooser.choose(residual_or_target(1, p, q), Purpose.CORRECTION, 0)
            return Outcome(path[:i], correction)
    return Outcome(path, chooser.choose(tree.target_probs(path), Purpose.CORRECTION, 0))


# The same for batches.
class TokenVerifier(Verifier):
    """Judge one token after the other. O(L) and one row of the vocabulary."""

    name = "token"
    draft_samplings = frozenset({DraftSampling.IID})
    any_widths = frozenset()
    max_paths = 1

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge one path per request; the test of depth i uses acceptance number i - 1."""
        tests = uniforms.acceptance[:, : tree.length]
        path = DraftedPath.drawn(tree, target)
        return verify_tokens(path, target, tests, uniforms.correction)


def verify_tokens(
    path: DraftedPath, target: TargetProbs, tests: Tensor, correction: Tensor
) -> Verdict:
    """Accept x_i with chance min(1, p/q), stop at the first rejection, correct from (p - q)+.

    ``tests`` ``[batch, length]`` are the uniforms of the tests, ``correction`` ``[batch]`` that of
    the last token.
    """
    depths = torch.arange(tests.shape[1], device=tests.device)
    passed = (tests < path.ratios()) & (depths < path.lengths.unsqueeze(1))
    accepted = passed.to(torch.int64).cumprod(dim=1).sum(dim=1)
    residual = path.residual(accepted, torch.ones_like(correction))
    token_ids = correction_token(residual, target, correction)
    return Verdict(path.nodes[:, 1:], accepted, token_ids)
