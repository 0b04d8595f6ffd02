"""The correction or bonus token: the one pass over the whole vocabulary a verification needs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.verifiers.categorical import draw

_TRACE = 1e-280
"""What a token keeps of p where the residual leaves it nothing: too little ever to be drawn, unless
no token has any residual left."""


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
    return draw_residual(target.probs_of(residual.nodes), residual, uniforms)


def draw_residual(probs: Tensor, residual: Residual, uniforms: Tensor) -> Tensor:
    """Draw from the residual of ``probs`` ``[batch, vocab]``, which may be overwritten."""
    # A uniform of exactly 0 must not find a trace.
    return draw(_residual_weights(probs, residual), uniforms.clamp(min=_TRACE**0.5))


def _residual_weights(probs: Tensor, residual: Residual) -> Tensor:
    """Return the residual of ``probs`` ``[batch, vocab]``, which may be overwritten."""
    own = probs.gather(1, residual.ids)
    weight = residual.weight.unsqueeze(1)
    left = torch.maximum(weight * own - residual.draft, _TRACE * own)
    weights = probs.mul_(weight.clamp(min=_TRACE))
    # The minimum ignores padding, whose ids are those of other tokens.
    return weights.scatter_reduce_(1, residual.ids, left, "amin")


def probs_along(target: TargetLaw, nodes: Tensor, ids: Tensor) -> Tensor:
    """Return p at ``ids`` ``[batch, steps, width]`` of ``nodes`` ``[batch, steps]``, float64."""
    return target.probs_in(target.rows.gather(1, nodes), ids)
