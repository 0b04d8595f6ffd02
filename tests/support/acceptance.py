"""Expected acceptance lengths by recursion over prefixes, without walking every branch."""

from collections.abc import Callable, Iterable, Sequence
from itertools import permutations

from eaglegbv.verifiers.proof.chooser import (
    Number,
    Prefix,
    Probs,
    ProbsAt,
    exact_tail_probs,
    most_likely,
    support,
)
from eaglegbv.verifiers.proof.chooser import share as ratio_of
from eaglegbv.verifiers.proof.lp import DraftSets, transport_plan
from eaglegbv.verifiers.transport import ranked


def prefixes(p: ProbsAt, q: ProbsAt, length: int):
    """Joint (p, q) of every prefix of length 1 ... ``length``."""
    todo: list[tuple[Prefix, Number, Number]] = [((), 1, 1)]
    while todo:
        prefix, joint_p, joint_q = todo.pop()
        for x, (px, qx) in enumerate(zip(p(prefix), q(prefix), strict=True)):
            below = ((*prefix, x), joint_p * px, joint_q * qx)
            yield below[1:]
            if len(below[0]) < length:
                todo.append(below)


def ideal_length(p: ProbsAt, q: ProbsAt, length: int) -> Number:
    """What one path can reach within one step: the sum of min(p, q) over prefixes."""
    return sum(min(a, b) for a, b in prefixes(p, q, length))


def optimal_acceptance(p: Probs, q: Probs, inside: Callable[[Sequence[int]], Number]) -> Number:
    """Return alpha* = 1 + min_H [P(H) - Q(H)], Q(H) = Pr(all drafts lie in H) = ``inside(H)``.

    The minimum is reached on a prefix of the tokens by q/p descending (Hu et al., ICLR 2025).
    """
    order = ranked(p, q)
    least: Number = 0
    for size in range(1, len(order) + 1):
        H = order[:size]
        least = min(least, sum(p[x] for x in H) - inside(H))
    return 1 + least


def alpha_iid(p: Probs, q: Probs, drafts: int) -> Number:
    """Return alpha* for independent drafts."""
    return optimal_acceptance(p, q, lambda H: sum(q[x] for x in H) ** drafts)


def alpha_wor(p: Probs, q: Probs, drafts: int) -> Number:
    """Return alpha* for drafts without replacement (all of the support where it is smaller)."""
    count = min(drafts, len(support(q)))
    return optimal_acceptance(p, q, lambda H: inside_wor(q, H, count))


def alpha_greedy(p: Probs, q: Probs, drafts: int) -> Number:
    """Return the acceptance of the top n - 1 tokens with one drawn from the rest of q."""
    kept = most_likely(q, drafts - 1)
    covered = sum(p[x] for x in kept)
    if len(kept) == len(support(q)):
        return covered
    r = exact_tail_probs(q, kept)
    return covered + sum(min(p[x], r[x]) for x in range(len(p)) if x not in kept)


def inside_wor(q: Probs, H: Iterable[int], drafts: int) -> Number:
    """Return the probability that all of ``drafts`` draws without replacement lie in H.

    Successive sampling: the sum over ordered tuples in H of prod q_j / (1 - earlier).
    """
    total: Number = 0
    for drawn in permutations(H, drafts):
        mass: Number = 1
        left = sum(q)
        for x in drawn:
            mass *= ratio_of(q[x], left)
            left -= q[x]
        total += mass
    return total


def lp_acceptance(p: Probs, sets: DraftSets) -> float:
    """Return the value of :func:`transport_plan`: the optimal acceptance of one node."""
    return sum(transport_plan(p, sets).values())
