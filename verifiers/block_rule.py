"""Block verification of one path: the rule that block, gbv and otbv share.

The three differ in the path they verify and in the law that path has: the draft law itself, or the
law of a path selected among several. Sun et al., Block Verification, ICLR 2025, Algorithm 2.
"""

import math

import torch
from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.base import Verdict, VerifyUniforms
from eaglegbv.verifiers.constants import counting_from_one
from eaglegbv.verifiers.correction import correction_token
from eaglegbv.verifiers.drafted_path import DraftedPath
from eaglegbv.verifiers.figures import NodeFigures, along_path, at_children

_LARGEST = math.log(torch.finfo(torch.float64).max)
"""Logarithm of the largest number."""


def verify_block(path: DraftedPath, target: TargetLaw, uniforms: VerifyUniforms) -> Verdict:
    """Accept the longest prefix that passes its own test; the test of depth i uses number i - 1."""
    weights = prefix_weights(path.ratios())
    chances = acceptance_chances(path, weights)
    accepted = longest_passed(chances, path.lengths, uniforms.acceptance)
    stop = weights.gather(1, accepted.unsqueeze(1)).squeeze(1)
    return Verdict(
        path_nodes=path.nodes[:, 1:],
        accepted=accepted,
        token_ids=correction_token(path.residual(accepted, stop), target, uniforms.correction),
    )


def block_figures(tree: DraftTree, path: DraftedPath) -> NodeFigures:
    """Return the numbers :func:`verify_block` decides by.

    They are b at the path's nodes and their siblings, and w and h along the path.

    Args:
        tree: The trees that ``path`` was selected from.
        path: What :func:`verify_block` judges.
    """
    weights = prefix_weights(path.ratios())
    return {
        "b": at_children(tree, path, path.draft),
        "w": along_path(tree, path, weights[:, 1:]),
        "h": along_path(tree, path, acceptance_chances(path, weights)),
    }


def prefix_weights(ratios: Tensor) -> Tensor:
    """Return ``w_0 = 1, w_i = min(1, w_{i-1} p/q)``, ``[batch, length + 1]``: Pr(tau >= i | x^i).

    That is R_i, the product of the ratios so far, over the largest of R_0 = 1, R_1, ..., R_i.

    Args:
        ratios: ``[batch, length]`` float64.
    """
    # Infinite ratios count as the largest number: differences of their logarithms would be NaN.
    logs = ratios.log().clamp_(max=_LARGEST).cumsum(dim=1)
    logs = torch.nn.functional.pad(logs, (1, 0))
    return (logs - logs.cummax(dim=1).values).exp_()


def acceptance_chances(path: DraftedPath, weights: Tensor) -> Tensor:
    """Return ``[batch, length]`` float64: the chance h_i of the test at depths 1 ... length.

    ``R = sum max(w p - q, 0) = w - sum_S min(w p, q)`` needs only the support S of q;
    ``h = R / (R + 1 - w)``, 1 where w is 1, and w itself at a path's end.
    """
    inner = weights[:, 1:-1]
    kept = torch.minimum(inner.unsqueeze(2) * path.target[:, 1:], path.draft[:, 1:]).sum(dim=2)
    residual = (inner - kept).clamp_(min=0.0)
    tests = (residual / (residual + (1 - inner))).masked_fill_(inner == 1, 1.0)
    chances = torch.cat((tests, weights[:, -1:]), dim=1)
    depths = counting_from_one(chances.shape[1], chances.device)
    return torch.where(depths == path.lengths.unsqueeze(1), weights[:, 1:], chances)


def longest_passed(chances: Tensor, lengths: Tensor, uniforms: Tensor) -> Tensor:
    """Return ``[batch]`` int64: the largest depth whose test passes, 0 if none does.

    Args:
        chances: ``[batch, length]`` float64, of the tests at depths 1 ... length.
        lengths: ``[batch]`` int64, depths past it are not tested.
        uniforms: ``[batch, at least length]`` float64; a test passes iff its number is below its
            chance, so that a chance of zero never passes.
    """
    depths = counting_from_one(chances.shape[1], chances.device)
    passed = (uniforms[:, : chances.shape[1]] < chances) & (depths <= lengths.unsqueeze(1))
    return (passed * depths).amax(dim=1)
