"""Token verification: one drafted token after the other."""

from typing import ClassVar

import torch

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.correction import correction_token
from eaglegbv.verifiers.drafted_path import DraftedPath


class TokenVerifier(Verifier):
    """Accept x_i with chance min(1, p/q), stop at the first rejection, correct from (p - q)+."""

    name: ClassVar[str] = "token"
    source: ClassVar[str] = "Leviathan et al. 2211.17192; Chen et al. 2302.01318"
    laws: ClassVar[frozenset[Law]] = frozenset({Law.IID})
    max_paths: ClassVar[int | None] = 1

    def judge(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Verdict:
        """Judge one path per request; the test of depth i uses acceptance number i - 1."""
        path = DraftedPath.only(tree, target)
        depths = torch.arange(tree.length, device=tree.token_ids.device)
        passed = uniforms.acceptance[:, : tree.length] < path.ratios()
        passed = passed & (depths < path.lengths.unsqueeze(1))
        accepted = passed.to(torch.int64).cumprod(dim=1).sum(dim=1)
        residual = path.residual(accepted, torch.ones_like(uniforms.correction))
        return Verdict(
            path_nodes=path.nodes[:, 1:],
            accepted=accepted,
            token_ids=correction_token(residual, target, uniforms.correction),
        )
