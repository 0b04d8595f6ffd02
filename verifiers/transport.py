"""Exact optimal transport between a target law and the drafts at a node, for many nodes at once.

For n drafts drawn independently from q there is a law b on the support of q with
``sum min(p, b) = alpha*``, the largest acceptance probability any rule can reach, and a rule that
picks one of the n drafts with law exactly b:

1. Rank the support by p/q ascending, ties by token id. With F and P the cumulative q and p in that
   order, ``G = F^n`` is the cdf of the highest-ranked draft, and ``D = G - P``.
2. b's cumulative law is ``P + g``, where g is the running maximum of D up to its argmax and the
   running maximum from the right after it.
3. Each draft may take a partner's label before the highest label wins; the token selected is the
   winner's own. The kernel keeps q stationary and moves exactly ``b - v``, v the law of the
   highest-ranked draft.

Everything works on the short lists (ids, probs) of truncated draft laws, in float64, O(W log W) a
node. :mod:`eaglegbv.verifiers.reference.transport` is the readable counterpart.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from eaglegbv.verifiers.constants import numbered_rows
from eaglegbv.verifiers.drafted_path import rows_at

_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, slots=True)
class RankedLaws:
    """Laws over the support of q, lowest p/q first, ties by token id: the order used everywhere.

    Entries of draft probability zero come last, with target 0.

    Attributes:
        ids: ``[..., width]`` int64.
        draft: ``[..., width]`` float64, q.
        target: ``[..., width]`` float64, p at ``ids``.
    """

    ids: Tensor
    draft: Tensor
    target: Tensor

    @classmethod
    def of(cls, ids: Tensor, draft: Tensor, target: Tensor) -> Self:
        """Rank by one division and two stable sorts; nothing is normalised again."""
        by_id = ids.argsort(dim=-1)
        # Without draft probability the ratio is infinite or, as 0 / 0, NaN: both come last.
        by_ratio = (target / draft).gather(-1, by_id).sort(dim=-1, stable=True).indices
        order = by_id.gather(-1, by_ratio)
        draft = draft.gather(-1, order)
        return cls(ids.gather(-1, order), draft, target.gather(-1, order).mul_(draft.sign()))


@dataclass(frozen=True, slots=True)
class Transport:
    """The exact transport at nodes of n drafts, over their ranked supports.

    Attributes:
        law: ``[..., width]`` float64, b, the law of the selected draft.
        highest: ``[..., width]`` float64, v, the law of the highest-ranked draft.
    """

    law: Tensor
    highest: Tensor


def transport(ranked: RankedLaws, drafts: Tensor) -> Transport:
    """Return the exact transport of every node.

    Args:
        ranked: The laws of the nodes.
        drafts: ``[...]`` number of drafts n at each node; where it is below 2, b = q.
    """
    n = drafts.to(torch.float64).unsqueeze(-1)
    F = ranked.draft.cumsum(dim=-1)
    G = F.pow(n)
    v = power_step(F, ranked.draft, n, G)
    D = torch.nn.functional.pad(G - ranked.target.cumsum(dim=-1), (1, 0))
    b = torch.where(n > 1, _selected_law(ranked.target, v, D), ranked.draft)
    return Transport(law=b, highest=v)


def power_step(F: Tensor, q: Tensor, n: Tensor, G: Tensor) -> Tensor:
    """Return ``F^n - (F - q)^n`` without cancellation, given ``G = F^n``; 0 <= q <= F."""
    share = q / F.clamp(min=_TINY)
    return share.clamp_(max=1.0).neg_().log1p_().mul_(n).expm1_().mul_(G).neg_()


def _selected_law(p: Tensor, v: Tensor, D: Tensor) -> Tensor:
    """Return b case by case; as a difference of P + g it would lose its digits.

    Args:
        p: ``[..., width]``, in ranked order.
        v: ``[..., width]``.
        D: ``[..., width + 1]``, entry 0 is D_0 = 0.
    """
    # Up to the argmax the maximum from the left is the smaller one, after it that from the right.
    g = torch.minimum(D.cummax(dim=-1).values, D.flip(-1).cummax(dim=-1).values.flip(-1))
    change = g.diff(dim=-1)
    # Where g follows D from one entry to the next, b is v; where g is constant, b is p.
    touching = g == D
    along = touching[..., :-1] & touching[..., 1:] & (change != 0)
    return torch.where(along, v, (p + change).clamp_(min=0))


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafted tokens, each below a node of a flat list of nodes.

    Attributes:
        nodes: ``[batch, drafts]`` int64, the node each was drawn at.
        ranks: ``[batch, drafts]`` int64, the rank of its token there.
    """

    nodes: Tensor
    ranks: Tensor


def labels(ranked: RankedLaws, plan: Transport, drafts: Drafts, uniforms: Tensor) -> Tensor:
    """Return the label of each draft; at each node the draft of the highest label is selected.

    Receivers (b > v) and givers (b < v) are matched first-in first-out on their cumulative sums; a
    draft of token x finds its partner y by one uniform and takes its label if another is below
    ``|d_x| / (q_x |v_y/q_y - v_x/q_x|)``.

    Args:
        ranked: The laws at ``[batch, nodes]``.
        plan: Their transport.
        drafts: ``[batch, drafts]``.
        uniforms: ``[batch, drafts, 2]``.

    Returns:
        ``[batch, drafts]`` int64, ranks.
    """
    nodes, ranks = drafts.nodes, drafts.ranks.unsqueeze(2)
    moved = rows_at(plan.law - plan.highest, nodes)
    excess = moved.gather(2, ranks)
    side = excess.sign()
    # What receivers get and givers give, with the sign of the draft's own side.
    moved.mul_(side)
    own = moved.clamp(min=0).cumsum(dim=2).gather(2, ranks)
    theirs = moved.clamp_(max=0).cumsum(dim=2)
    amount = excess.abs()
    position = uniforms[..., :1] * amount - own
    partner = (theirs > position).sum(dim=2, keepdim=True).clamp_(max=moved.shape[2] - 1)

    both = torch.cat((ranks, partner), dim=2)
    requests = numbered_rows(len(nodes), nodes.device)
    at = requests.unsqueeze(2), nodes.unsqueeze(2), both
    q = ranked.draft[at]
    gap = (plan.highest[at] / q.clamp(min=_TINY)).diff(dim=2) * side
    takes = uniforms[..., 1:] * (q[..., :1] * gap) < amount
    # A giver that does not rank above its receiver is matched by rounding only: no exchange.
    takes &= (gap > 0) & ((partner - ranks) * side > 0)
    return torch.where(takes, partner, ranks).squeeze(2)
