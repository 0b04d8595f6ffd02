"""The correction or bonus token: the one pass over the whole vocabulary a verification needs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.verifiers.categorical import draw


@dataclass(frozen=True, slots=True)
class Residual:
    """The law ``max(weight * p - draft, 0)``, up to its normaliser, at one node per request.

    Attributes:
        nodes: ``[batch]`` int64, the stop nodes.
        weight: ``[batch]`` float64.
        ids: ``[batch, width]`` int64, tokens of ``draft``, distinct where ``draft`` is not zero.
        draft: ``[batch, width]`` float64; all zero at a bonus token, where the law is p itself.
    """

    nodes: Tensor
    weight: Tensor
    ids: Tensor
    draft: Tensor


def correction_token(residual: Residual, target: TargetLaw, uniforms: Tensor) -> Tensor:
    """Draw one token per request from its residual, in float64 and vocabulary order.

    Tokens of target probability zero are never drawn. A residual without mass can only be reached
    through rounding (the stop then has probability zero in exact arithmetic); p is its limit and
    takes its place.

    Args:
        residual: The residual laws.
        target: The target's laws.
        uniforms: ``[batch]`` float64 in [0, 1).

    Returns:
        ``[batch]`` int64.
    """
    probs = target.probs_of(residual.nodes)
    weights = probs * residual.weight.unsqueeze(1)
    weights.scatter_add_(1, residual.ids, -residual.draft)
    weights.clamp_(min=0)
    mass = weights.sum(dim=1, keepdim=True)
    return draw(torch.where(mass > 0, weights, probs), uniforms)
