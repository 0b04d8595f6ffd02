"""Token verification of one path: one drafted token after the other."""

import torch
from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.verifiers.base import Verdict
from eaglegbv.verifiers.correction import correction_token
from eaglegbv.verifiers.drafted_path import DraftedPath


def verify_tokens(
    path: DraftedPath, target: TargetLaw, tests: Tensor, correction: Tensor
) -> Verdict:
    """Accept x_i with chance min(1, p/q), stop at the first rejection, correct from (p - q)+.

    Args:
        path: The path and its draft laws q.
        target: The target's laws.
        tests: ``[batch, length]`` float64, the uniforms of the tests.
        correction: ``[batch]`` float64, the uniform of the last token.
    """
    depths = torch.arange(tests.shape[1], device=tests.device)
    passed = (tests < path.ratios()) & (depths < path.lengths.unsqueeze(1))
    accepted = passed.to(torch.int64).cumprod(dim=1).sum(dim=1)
    residual = path.residual(accepted, torch.ones_like(correction))
    return Verdict(
        path_nodes=path.nodes[:, 1:],
        accepted=accepted,
        token_ids=correction_token(residual, target, correction),
    )
