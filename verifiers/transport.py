"""Exact optimal transport between a target distribution and the drafts at one node.

For n drafts drawn independently from q there is a distribution b on the support of q with
sum_x min(p(x), b(x)) = alpha*, the largest acceptance probability any rule can reach, and a rule
that picks one of the n drafts with distribution exactly b:

1. Rank the support by p/q ascending, ties by token id. With F, P the cumulative q and p in that
   order, G = F^n is the cdf of the highest-ranked draft, and D = G - P says how much mass the
   drafts put into a low prefix beyond what the target wants there.
2. b's cumulative distribution is P + g, where g is the running maximum of D up to its argmax i*
   and the running maximum from the right after it. So b >= p before i*, b <= p after it.
3. Each draft may relabel its token as a partner's before the highest label wins; the token
   selected is the winner's own. Relabelling keeps q stationary (the highest label has the
   distribution v of the highest draft), and moves exactly d = b - v.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from math import comb, lgamma
from typing import Self

import numpy as np
import torch
from torch import Tensor

from eaglegbv.devices import TensorFields
from eaglegbv.rng import Purpose
from eaglegbv.verifiers.paths import draw, rows_at
from eaglegbv.verifiers.proof.chooser import (
    Chooser,
    Number,
    Probs,
    accepts,
    magnitude,
    normalised,
    positive,
    selection_index,
    share,
    support,
)


@dataclass(frozen=True, eq=False)
class ExactTransport:
    """The exact transport of n iid drafts; sequences run over the ranked support."""

    drafts: int  # n
    order: tuple[int, ...]  # tokens of q's support, lowest p/q first
    q: Probs  # draft probabilities
    v: Probs  # distribution of the highest-ranked of the n drafts
    b: Probs  # distribution of the selected draft
    probs: Probs  # b over the whole vocabulary

    @cached_property
    def moved(self) -> Probs:
        """d = b - v: what relabelling adds to a token (receivers) or takes from it (givers)."""
        return tuple(b - v for b, v in zip(self.b, self.v, strict=True))

    @cached_property
    def partners(self) -> tuple[dict[int, Number], ...]:
        """For each rank: the ranks matched with it, and the mass delta exchanged with each.

        Receivers and givers are matched first-in first-out on their cumulative sums. Partners come
        highest rank first: the uniform of the draw runs down from the token's own cumulative sum.
        """
        return tuple(self._partners(rank) for rank in range(len(self.order)))

    def _partners(self, rank: int) -> dict[int, Number]:
        sign = 1 if self.moved[rank] > 0 else -1
        same_side = list(accumulate(positive(sign * d) for d in self.moved))
        other_side = list(accumulate(positive(-sign * d) for d in self.moved))
        low = same_side[rank] - magnitude(self.moved[rank])
        high = same_side[rank]
        overlap: dict[int, Number] = {}
        for y, d in reversed(tuple(enumerate(self.moved))):
            delta = min(high, other_side[y]) - max(low, other_side[y] - magnitude(d))
            if sign * d < 0 and delta > 0:
                overlap[y] = delta
        return overlap

    def relabel_probability(self, rank: int, partner: int) -> Number:
        """Return how likely a draft whose partner is drawn takes the partner's label.

        Never above 1: matching stays inside a stretch on which b/q is non-decreasing. A pair whose
        giver does not rank above its receiver exists by rounding only and exchanges nothing.
        """
        receiver, giver = (rank, partner) if self.moved[rank] > 0 else (partner, rank)
        gap = self.v[giver] / self.q[giver] - self.v[receiver] / self.q[receiver]
        if giver <= receiver or gap <= 0:
            return 0
        return min(1, magnitude(self.moved[rank]) / (self.q[rank] * gap))

    def label_probs(self, rank: int) -> dict[int, Number]:
        """Return the distribution of the label of a draft of the given rank."""
        partners = self.partners[rank]
        total = sum(partners.values())
        labels = {
            y: share(delta, total) * self.relabel_probability(rank, y)
            for y, delta in partners.items()
        }
        labels[rank] = 1 - sum(labels.values())
        return labels

    def acceptance(self, p: Probs) -> Number:
        """Return sum min(p, b), the optimal acceptance probability alpha*."""
        return sum(min(px, bx) for px, bx in zip(p, self.probs, strict=True))


def exact_transport(p: Probs, q: Probs, drafts: int) -> ExactTransport:
    """Return the exact transport for ``drafts`` draws from ``q`` and the target ``p``."""
    # 0.5 and 1/2 are equal keys of a cache, and must not be confused.
    return _transport(p, q, drafts, isinstance(sum(q), Fraction))


@lru_cache(maxsize=1 << 16)
def _transport(p: Probs, q: Probs, drafts: int, exact: bool) -> ExactTransport:
    del exact
    order = ranked(p, q)
    ps = [p[x] for x in order]
    qs = [q[x] for x in order]
    F = [0, *accumulate(qs)]
    P = [0, *accumulate(ps)]
    # F_i^n - F_{i-1}^n in factored form: the plain difference cancels.
    v = [
        qs[i] * sum(F[i + 1] ** k * F[i] ** (drafts - 1 - k) for k in range(drafts))
        for i in range(len(order))
    ]
    D = [Fi**drafts - Pi for Fi, Pi in zip(F, P, strict=True)]
    b = _selected_probs(ps, v, D)
    probs: list[Number] = [0] * len(q)
    for x, mass in zip(order, b, strict=True):
        probs[x] = mass
    return ExactTransport(drafts, order, tuple(qs), tuple(v), tuple(b), tuple(probs))


def ranked(p: Sequence[Number], q: Sequence[Number]) -> tuple[int, ...]:
    """Return q's support by p/q ascending, ties by token id: the one order used everywhere."""
    return tuple(sorted(support(q), key=lambda x: (p[x] / q[x], x)))


def _selected_probs(p: Sequence[Number], v: Sequence[Number], D: Sequence[Number]) -> list[Number]:
    """Return b case by case, as differences of P + g would lose digits."""
    top = max(range(len(D)), key=lambda i: (D[i], -i))
    from_left = list(accumulate(D, max))
    from_right = list(accumulate(reversed(D), max))[::-1]
    b: list[Number] = []
    for i in range(1, len(D)):
        near = D[i - 1]
        far = D[i]
        g = from_left[i - 1]
        if i > top:  # the mirror image: g falls from entry i - 1 to entry i
            near = D[i]
            far = D[i - 1]
            g = from_right[i]
        if far <= g:
            b.append(p[i - 1])
        elif g == near:
            b.append(v[i - 1])
        else:
            change = far - g if i <= top else g - far
            b.append(positive(p[i - 1] + change))
    return b


def select_draft(
    node: ExactTransport, drafts: Mapping[int, int], depth: int, most: int, chooser: Chooser
) -> int:
    """Return the token selected among the drafts of one node; its distribution is ``node.probs``.

    ``drafts`` are number of the draw -> token, in the order drawn; the node's ``depth`` and the
    ``most`` draws of a level say which uniforms decide.
    """

    def label(number: int) -> int:
        rank = node.order.index(drafts[number])
        partners = node.partners[rank]
        if not partners:
            return rank
        find, take = (selection_index(most, depth, number, which) for which in (0, 1))
        chosen = chooser.choose(tuple(partners.values()), Purpose.SELECTION, find)
        partner = tuple(partners)[chosen]
        relabel = node.relabel_probability(rank, partner)
        return partner if accepts(chooser, relabel, Purpose.SELECTION, take) else rank

    best = -1
    highest = -1
    top = len(node.order) - 1
    for number in drafts:
        if highest < top:  # no label is above the top: other drafts need none
            rank = label(number)
            if rank > highest:  # equal labels: the first drafted
                best = number
                highest = rank
    return drafts[best]


@lru_cache(maxsize=1 << 16)
def multiplicity_probs(node: ExactTransport, token: int) -> Probs:
    """Return Pr(m | token): how many of the drafts lie on the selected token, m = 1 ... n.

    A draft's *position* is uniform inside its label's piece of [0, 1], so positions of drafts are
    uniform on [0, 1] and the highest one wins. With H the cdf of the position of a draft of token x
    and h its density,

        Pr(x, m) = C(n, m) m q_x^m  integral of H(t)^(m-1) (t - q_x H(t))^(n-m) h(t) dt,

    a polynomial on each piece. A token off q's support is selected with probability 0; m = 1 then.
    """
    n = node.drafts
    if token not in node.order:
        return (1, *([0] * (n - 1)))
    rank = node.order.index(token)
    q = node.q[rank]
    labels = node.label_probs(rank)
    joint: list[Number] = [0] * n
    start: Number = 0
    below: Number = 0
    for y, width in enumerate(node.q):
        mass = labels.get(y, 0)
        if mass > 0:
            other = positive(start - q * below)
            slope = positive(width - q * mass)
            for m in range(1, n + 1):
                joint[m - 1] += _piece(n, m, q, below, mass, other, slope)
            below += mass
        start += width
    return normalised(joint) if sum(joint) > 0 else (1, *([0] * (n - 1)))


def _piece(
    n: int, m: int, q: Number, H: Number, mass: Number, other: Number, slope: Number
) -> Number:
    """Integrate one piece, t = start + s width: H + s mass and other + s slope, s in [0, 1]."""
    total: Number = 0
    for i in range(m):
        for j in range(n - m + 1):
            below = comb(m - 1, i) * H ** (m - 1 - i) * mass**i
            beside = comb(n - m, j) * other ** (n - m - j) * slope**j
            total += below * beside * mass / (i + j + 1)
    return comb(n, m) * m * q**m * total


# The same for many nodes at once, on short lists (ids, probs), in float64, O(W log W) a node.


_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, slots=True)
class RankedProbs(TensorFields):
    """q and p over the support of q, lowest p/q first, ties by token id: the order used everywhere.

    Entries of draft probability zero come last, with target 0.
    """

    ids: Tensor  # [..., width] int64
    draft: Tensor  # [..., width] float64, q
    target: Tensor  # [..., width] float64, p at ``ids``

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
class Transport(RankedProbs):
    """The exact transport at nodes of n drafts, over their ranked supports."""

    selected: Tensor  # [..., width] float64, b, the distribution of the selected draft
    highest: Tensor  # [..., width] float64, v, the distribution of the highest-ranked draft


def transport(ranked: RankedProbs, drafts: Tensor) -> Transport:
    """Return the exact transport of every node.

    Args:
        ranked: The distributions of the nodes.
        drafts: ``[...]`` number of drafts n at each node; where it is below 2, b = q.
    """
    n = drafts.to(torch.float64).unsqueeze(-1)
    F = ranked.draft.cumsum(dim=-1)
    G = F.pow(n)
    v = power_step(F, ranked.draft, n, G)
    D = torch.nn.functional.pad(G - ranked.target.cumsum(dim=-1), (1, 0))
    b = torch.where(n > 1, _selected(ranked.target, v, D), ranked.draft)
    return Transport(ranked.ids, ranked.draft, ranked.target, selected=b, highest=v)


def power_step(F: Tensor, q: Tensor, n: Tensor, G: Tensor) -> Tensor:
    """Return ``F^n - (F - q)^n`` without cancellation, given ``G = F^n``; 0 <= q <= F."""
    share = q / F.clamp(min=_TINY)
    return share.clamp_(max=1.0).neg_().log1p_().mul_(n).expm1_().mul_(G).neg_()


def _selected(p: Tensor, v: Tensor, D: Tensor) -> Tensor:
    """Return b case by case, as :func:`_selected_probs`, with D from D_0 = 0."""
    # Up to the argmax the maximum from the left is the smaller one, after it that from the right.
    g = torch.minimum(D.cummax(dim=-1).values, D.flip(-1).cummax(dim=-1).values.flip(-1))
    change = g.diff(dim=-1)
    # Where g follows D from one entry to the next, b is v; where g is constant, b is p.
    touching = g == D
    along = touching[..., :-1] & touching[..., 1:] & (change != 0)
    return torch.where(along, v, (p + change).clamp_(min=0))


def labels(plan: Transport, nodes: Tensor, ranks: Tensor, uniforms: Tensor) -> Tensor:
    """Return the label of each draft; at each node the draft of the highest label is selected.

    Receivers (b > v) and givers (b < v) are matched first-in first-out on their cumulative sums; a
    draft of token x finds its partner y by one uniform and takes its label if another is below
    ``|d_x| / (q_x |v_y/q_y - v_x/q_x|)``.

    Args:
        plan: The transport at ``[batch, nodes]``.
        nodes: ``[batch, drafts]`` int64, the place in ``plan`` of the node each was drawn at.
        ranks: ``[batch, drafts]`` int64, the rank of its token there, as the result's labels are.
        uniforms: ``[batch, drafts, 2]``.
    """
    ranks = ranks.unsqueeze(2)
    moved = rows_at(plan.selected - plan.highest, nodes)
    excess = moved.gather(2, ranks)
    side = excess.sign()
    # What receivers get and givers give, with the sign of the draft's own side.
    moved.mul_(side)
    received = moved.clamp(min=0).cumsum(dim=2).gather(2, ranks)
    given = moved.clamp_(max=0).cumsum(dim=2)
    amount = excess.abs()
    position = uniforms[..., :1] * amount - received
    partner = (given > position).sum(dim=2, keepdim=True).clamp_(max=moved.shape[2] - 1)

    at = nodes.unsqueeze(2) * plan.ids.shape[2] + torch.cat((ranks, partner), dim=2)
    q, v = (x.flatten(1).gather(1, at.flatten(1)).view_as(at) for x in (plan.draft, plan.highest))
    gap = (v / q.clamp(min=_TINY)).diff(dim=2) * side
    takes = uniforms[..., 1:] * (q[..., :1] * gap) < amount
    # A giver that does not rank above its receiver is matched by rounding only: no exchange.
    takes &= (gap > 0) & ((partner - ranks) * side > 0)
    return torch.where(takes, partner, ranks).squeeze(2)


def draw_multiplicity(
    plan: Transport, drafts: Tensor, ranks: Tensor, uniforms: Tensor, most: int
) -> Tensor:
    """Draw m, ``[nodes]`` int64 in 1 ... n, from Pr(m | x, n): the drafts on the selected token x.

    Args:
        plan: The transport of some nodes, ``[nodes, width]``.
        drafts: ``[nodes]`` int64, n; m = 1 where n < 2.
        ranks: ``[nodes]`` int64, the rank of x.
        uniforms: ``[nodes]`` float64.
        most: A bound on ``drafts``.
    """
    if most < 2:
        return torch.ones_like(drafts)
    joint = multiplicity_weights(plan, drafts, ranks, most)
    # A token too unlikely to count in floating point is drafted once.
    joint[:, 0] = torch.where(joint.sum(dim=1) > 0, joint[:, 0], 1.0)
    return torch.where(drafts > 1, draw(joint, uniforms) + 1, 1)


def multiplicity_weights(plan: Transport, drafts: Tensor, ranks: Tensor, most: int) -> Tensor:
    """Return Pr(x, m) for m = 1 ... ``most``, ``[nodes, most]`` float64.

    As in :func:`multiplicity_probs`; the integrand is a polynomial of degree n - 1 on each label's
    piece, so Gauss-Legendre quadrature is exact.
    """
    at = ranks.unsqueeze(1)
    label = _label_probs(plan, at)
    q = plan.draft.gather(1, at)
    below = label.cumsum(dim=1) - label
    start = plan.draft.cumsum(dim=1) - plan.draft
    points, weights = np.polynomial.legendre.leggauss((most + 1) // 2)
    s = torch.tensor((points + 1) / 2, device=q.device)
    ds = torch.tensor(weights / 2, device=q.device)
    # [nodes, width, points]: H, and the mass of other tokens below the same position.
    H = below.unsqueeze(2) + label.unsqueeze(2) * s
    others = (start - q * below).clamp(min=0).unsqueeze(2) + (
        (plan.draft - q * label).clamp(min=0).unsqueeze(2) * s
    )
    n = drafts.to(q.dtype)
    columns = []
    for m in range(1, most + 1):
        rest = (n - m).clamp(min=0)
        integrand = H.pow(m - 1) * others.pow(rest.view(-1, 1, 1)) * ds
        integral = (integrand.sum(dim=2) * label).sum(dim=1)
        ways = torch.exp(torch.lgamma(n + 1) - torch.lgamma(rest + 1) - lgamma(m))
        columns.append(torch.where(n >= m, ways * q.squeeze(1).pow(m) * integral, 0.0))
    return torch.stack(columns, dim=1)


def _label_probs(plan: Transport, at: Tensor) -> Tensor:
    """Return ``[nodes, width]``: the distribution of the label of a draft of rank ``at``."""
    moved = plan.selected - plan.highest
    excess = moved.gather(1, at)
    side = torch.where(excess > 0, 1.0, -1.0)
    amount = excess.abs()
    high = (side * moved).clamp(min=0).cumsum(dim=1).gather(1, at)
    partner = (-side * moved).clamp(min=0)
    reach = partner.cumsum(dim=1)
    overlap = torch.minimum(high, reach) - torch.maximum(high - amount, reach - partner)
    overlap = overlap.clamp(min=0) * (partner > 0)
    total = overlap.sum(dim=1, keepdim=True)

    density = plan.highest / plan.draft.clamp(min=_TINY)
    gap = side * (density - density.gather(1, at))
    above = torch.arange(moved.shape[1], device=moved.device) > at
    exchanged = (gap > 0) & (above == (side > 0)) & (total > 0)
    takes = (amount / (plan.draft.gather(1, at) * gap)).clamp(max=1.0)
    label = torch.where(exchanged, overlap / total * takes, 0.0)
    kept = (1 - label.sum(dim=1, keepdim=True)).clamp(min=0)
    return label.scatter(1, at, kept)
