"""Exact optimal transport between a target law and the drafts at one node.

For n drafts drawn independently from q there is a law b on the support of q with
sum_x min(p(x), b(x)) = alpha*, the largest acceptance probability any rule can reach, and a rule
that picks one of the n drafts with law exactly b:

1. Rank the support by p/q ascending, ties by token id. With F, P the cumulative q and p in that
   order, G = F^n is the cdf of the highest-ranked draft, and D = G - P says how much mass the
   drafts put into a low prefix beyond what the target wants there.
2. b's cumulative law is P + g, where g is the running maximum of D up to its argmax i* and the
   running maximum from the right after it. So b >= p before i*, b <= p after it.
3. Each draft may relabel its token as a partner's before the highest label wins; the token
   selected is the winner's own. Relabelling keeps q stationary (the highest label has the law v of
   the highest draft), and moves exactly d = b - v.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from math import comb

from eaglegbv.uniforms import Purpose
from eaglegbv.verifiers.reference.chooser import Chooser, accepts, selection_index
from eaglegbv.verifiers.reference.probs import (
    Number,
    Probs,
    magnitude,
    normalised,
    positive,
    share,
    support,
)


@dataclass(frozen=True, eq=False)
class Transport:
    """The exact transport of n iid drafts; sequences run over the ranked support.

    Attributes:
        drafts: n.
        order: Tokens of q's support, lowest p/q first.
        q: Draft probabilities.
        v: Law of the highest-ranked of the n drafts.
        b: Law of the selected draft.
        law: b over the whole vocabulary.
    """

    drafts: int
    order: tuple[int, ...]
    q: Probs
    v: Probs
    b: Probs
    law: Probs

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
        moved = self.moved
        own, other = (1, -1) if moved[rank] > 0 else (-1, 1)
        mine = list(accumulate(positive(own * d) for d in moved))
        theirs = list(accumulate(positive(other * d) for d in moved))
        low, high = mine[rank] - magnitude(moved[rank]), mine[rank]
        overlap: dict[int, Number] = {}
        for y in reversed(range(len(moved))):
            if other * moved[y] > 0:
                delta = min(high, theirs[y]) - max(low, theirs[y] - magnitude(moved[y]))
                if delta > 0:
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

    def label_law(self, rank: int) -> dict[int, Number]:
        """Return the law of the label of a draft of the given rank."""
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
        return sum(min(px, bx) for px, bx in zip(p, self.law, strict=True))


def transport(p: Probs, q: Probs, drafts: int) -> Transport:
    """Return the exact transport for ``drafts`` draws from ``q`` and the target ``p``."""
    # 0.5 and 1/2 are equal keys of a cache, and must not be confused.
    return _transport(p, q, drafts, isinstance(sum(q), Fraction))


@lru_cache(maxsize=1 << 16)
def _transport(p: Probs, q: Probs, drafts: int, exact: bool) -> Transport:
    del exact
    order = ranked(p, q)
    ps, qs = [p[x] for x in order], [q[x] for x in order]
    F = [0, *accumulate(qs)]
    P = [0, *accumulate(ps)]
    # F_i^n - F_{i-1}^n in factored form: the plain difference cancels.
    v = [
        qs[i] * sum(F[i + 1] ** k * F[i] ** (drafts - 1 - k) for k in range(drafts))
        for i in range(len(order))
    ]
    D = [Fi**drafts - Pi for Fi, Pi in zip(F, P, strict=True)]
    b = _selected_law(ps, v, D)
    law: list[Number] = [0] * len(q)
    for x, mass in zip(order, b, strict=True):
        law[x] = mass
    return Transport(drafts, order, tuple(qs), tuple(v), tuple(b), tuple(law))


def ranked(p: Sequence[Number], q: Sequence[Number]) -> tuple[int, ...]:
    """Return q's support by p/q ascending, ties by token id: the one order used everywhere."""
    return tuple(sorted(support(q), key=lambda x: (p[x] / q[x], x)))


def _selected_law(p: Sequence[Number], v: Sequence[Number], D: Sequence[Number]) -> list[Number]:
    """Return b case by case, as differences of P + g would lose digits."""
    top = max(range(len(D)), key=lambda i: (D[i], -i))
    g_left = list(accumulate(D, max))
    g_right = list(accumulate(reversed(D), max))[::-1]
    b: list[Number] = []
    for i in range(1, len(D)):
        if i <= top:
            before, after, g = D[i - 1], D[i], g_left[i - 1]
            if after <= g:
                b.append(p[i - 1])
            else:
                b.append(v[i - 1] if g == before else positive(p[i - 1] + (after - g)))
        else:
            before, after, g = D[i - 1], D[i], g_right[i]
            if before <= g:
                b.append(p[i - 1])
            else:
                b.append(v[i - 1] if g == after else positive(p[i - 1] - (before - g)))
    return b


def select(
    node: Transport, drafts: Mapping[int, int], depth: int, paths: int, chooser: Chooser
) -> int:
    """Return the token selected among the drafts of one node; its law is ``node.law``.

    Args:
        node: The node's transport, for ``len(drafts)`` drafts.
        drafts: Path number -> token, in the order drawn.
        depth: The node's depth, for the index of the uniforms.
        paths: K, for the same.
        chooser: Decides.
    """
    rank_of = {token: rank for rank, token in enumerate(node.order)}
    best, selected = -1, -1
    for path, token in drafts.items():

        def index(which: int, path: int = path) -> int:
            return selection_index(paths, depth, path, which)

        label = _label(node, rank_of[token], index, chooser)
        if label > best:  # equal labels: the first drafted
            best, selected = label, token
    return selected


def _label(node: Transport, rank: int, index: Callable[[int], int], chooser: Chooser) -> int:
    partners = node.partners[rank]
    if not partners:
        return rank
    ranks = tuple(partners)
    chosen = chooser.choose(tuple(partners.values()), Purpose.SELECTION, index(0))
    partner = ranks[chosen]
    relabel = node.relabel_probability(rank, partner)
    return partner if accepts(chooser, relabel, Purpose.SELECTION, index(1)) else rank


@lru_cache(maxsize=1 << 16)
def multiplicity_law(node: Transport, token: int) -> Probs:
    """Return Pr(m | token): how many of the drafts lie on the selected token, m = 1 ... n.

    Entry m - 1 belongs to m. A draft's *position* is uniform inside its label's piece of [0, 1],
    so positions of drafts are uniform on [0, 1] and the highest one wins. With H the cdf of the
    position of a draft of token x and h its density,

        Pr(x, m) = C(n, m) m q_x^m  integral of H(t)^(m-1) (t - q_x H(t))^(n-m) h(t) dt,

    a polynomial on each piece with non-negative coefficients. A token outside q's support is
    selected with probability 0; m = 1 then.
    """
    n = node.drafts
    if token not in node.order:
        return (1, *([0] * (n - 1)))
    rank = node.order.index(token)
    q = node.q[rank]
    labels = node.label_law(rank)
    joint: list[Number] = [0] * n
    start: Number = 0
    below: Number = 0
    for y, width in enumerate(node.q):
        mass = labels.get(y, 0)
        if mass > 0:
            other, slope = positive(start - q * below), positive(width - q * mass)
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
            total += (
                comb(m - 1, i)
                * H ** (m - 1 - i)
                * mass**i
                * comb(n - m, j)
                * other ** (n - m - j)
                * slope**j
                * mass
                / (i + j + 1)
            )
    return comb(n, m) * m * q**m * total


def fixed_law(p: Probs, children: Sequence[int]) -> Probs:
    """Return the law of the child selected at a node whose children are not random."""
    total = sum(p[x] for x in set(children))
    if total > 0:
        return tuple(share(p[x], total) if x in children else p[x] - p[x] for x in range(len(p)))
    return normalised(1 if x in children else 0 for x in range(len(p)))


def tail_law(q: Probs, kept: Sequence[int]) -> Probs:
    """Return q restricted to the tokens off ``kept``."""
    return normalised(q[x] if x not in kept else 0 for x in range(len(q)))


def greedy_law(p: Probs, q: Probs, kept: Sequence[int]) -> Probs:
    """Return the law of the child selected at a node of fixed children ``kept`` and one drawn.

    The drawn child keeps what the target wants of it, min(p, r); ``kept`` shares the rest in
    proportion to p.
    """
    r = tail_law(q, kept)
    if not sum(p[x] for x in kept) > 0:
        return r
    overlap = [0 if x in kept else min(p[x], r[x]) for x in range(len(p))]
    rest = 1 - sum(overlap)
    total = sum(p[x] for x in kept)
    return tuple(rest * share(p[x], total) if x in kept else overlap[x] for x in range(len(p)))
