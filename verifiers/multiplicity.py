"""How many of a node's drafts lie on the token that exact transport selected."""

import numpy as np
import torch
from torch import Tensor

from eaglegbv.verifiers.categorical import draw
from eaglegbv.verifiers.transport import RankedLaws, Transport

_TINY = torch.finfo(torch.float64).tiny


def draw_multiplicity(
    ranked: RankedLaws, plan: Transport, drafts: Tensor, ranks: Tensor, uniforms: Tensor, most: int
) -> Tensor:
    """Draw m from Pr(m | x, n), the number of drafts on the selected token x.

    Args:
        ranked: The laws of some nodes, ``[nodes, width]``.
        plan: Their transport.
        drafts: ``[nodes]`` int64, n; m = 1 where n < 2.
        ranks: ``[nodes]`` int64, the rank of x.
        uniforms: ``[nodes]`` float64.
        most: A bound on ``drafts``.

    Returns:
        ``[nodes]`` int64, 1 ... n.
    """
    if most < 2:
        return torch.ones_like(drafts)
    joint = multiplicity_weights(ranked, plan, drafts, ranks, most)
    # A token too unlikely to count in floating point is drafted once.
    joint[:, 0] = torch.where(joint.sum(dim=1) > 0, joint[:, 0], 1.0)
    return torch.where(drafts > 1, draw(joint, uniforms) + 1, 1)


def multiplicity_weights(
    ranked: RankedLaws, plan: Transport, drafts: Tensor, ranks: Tensor, most: int
) -> Tensor:
    """Return Pr(x, m) for m = 1 ... ``most``, ``[nodes, most]`` float64.

    A draft's position is uniform inside its label's piece of [0, 1], so positions are uniform on
    [0, 1] and the highest one wins. With H the cdf of the position of a draft of token x and h its
    density,

        Pr(x, m) = C(n, m) m q_x^m  integral of H(t)^(m-1) (t - q_x H(t))^(n-m) h(t) dt,

    a polynomial of degree n - 1 on each label's piece: Gauss-Legendre quadrature is exact.
    """
    at = ranks.unsqueeze(1)
    label = _label_law(ranked, plan, at)
    q = ranked.draft.gather(1, at)
    below = label.cumsum(dim=1) - label
    start = ranked.draft.cumsum(dim=1) - ranked.draft
    points, weights = np.polynomial.legendre.leggauss((most + 1) // 2)
    s = torch.tensor((points + 1) / 2, device=q.device)
    ds = torch.tensor(weights / 2, device=q.device)
    # [nodes, width, points]: H, and the mass of other tokens below the same position.
    H = below.unsqueeze(2) + label.unsqueeze(2) * s
    others = (start - q * below).clamp(min=0).unsqueeze(2) + (
        (ranked.draft - q * label).clamp(min=0).unsqueeze(2) * s
    )
    n = drafts.to(q.dtype)
    columns = []
    for m in range(1, most + 1):
        rest = (n - m).clamp(min=0)
        integrand = H.pow(m - 1) * others.pow(rest.view(-1, 1, 1)) * ds
        integral = (integrand.sum(dim=2) * label).sum(dim=1)
        ways = torch.exp(torch.lgamma(n + 1) - torch.lgamma(rest + 1) - _log_factorial(m - 1, n))
        columns.append(torch.where(n >= m, ways * q.squeeze(1).pow(m) * integral, 0.0))
    return torch.stack(columns, dim=1)


def _log_factorial(m: int, like: Tensor) -> Tensor:
    return torch.lgamma(torch.full_like(like, m + 1))


def _label_law(ranked: RankedLaws, plan: Transport, at: Tensor) -> Tensor:
    """Return the law of the label of a draft of rank ``at`` ``[nodes, 1]``: ``[nodes, width]``."""
    moved = plan.law - plan.highest
    excess = moved.gather(1, at)
    side = torch.where(excess > 0, 1.0, -1.0)
    amount, high = excess.abs(), (side * moved).clamp(min=0).cumsum(dim=1).gather(1, at)
    partner = (-side * moved).clamp(min=0)
    reach = partner.cumsum(dim=1)
    overlap = torch.minimum(high, reach) - torch.maximum(high - amount, reach - partner)
    overlap = overlap.clamp(min=0) * (partner > 0)
    total = overlap.sum(dim=1, keepdim=True)

    density = plan.highest / ranked.draft.clamp(min=_TINY)
    gap = side * (density - density.gather(1, at))
    above = torch.arange(moved.shape[1], device=moved.device) > at
    exchanged = (gap > 0) & (above == (side > 0)) & (total > 0)
    takes = (amount / (ranked.draft.gather(1, at) * gap)).clamp(max=1.0)
    label = torch.where(exchanged, overlap / total * takes, 0.0)
    kept = (1 - label.sum(dim=1, keepdim=True)).clamp(min=0)
    return label.scatter(1, at, kept)
