"""K-SEQ, the sequential selection of SpecTr (Sun et al. 2023, 2310.15141)."""

from functools import lru_cache

from eaglegbv.verifiers.reference.chooser import Chooser
from eaglegbv.verifiers.reference.probs import Number, Prefix, Probs, positive
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.reference.walk import Accepted, Rejected, accepts_draft, walk


def spectr(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Walk down by K-SEQ, draft after draft."""
    return walk(tree, chooser, k_seq)


def k_seq(tree: ReferenceTree, prefix: Prefix, chooser: Chooser) -> Accepted | Rejected:
    """Accept each of the n drafts with min(1, p / (rho q)).

    The residual is p - min(q, p / rho) * sum_{k<n} (1 - beta)^k, non-negative because that sum is
    at most rho.
    """
    p, q = tree.target_law(prefix), tree.draft_law(prefix)
    drafts = tree.drafts(prefix)
    rho = scale(p, q, len(drafts))
    for path, x in drafts.items():
        if accepts_draft(tree, prefix, path, min(1, p[x] / (rho * q[x])), chooser):
            return Accepted(x)
    overlap = _overlap(p, q, rho)
    tries = _tries(sum(overlap), len(drafts))
    weights = tuple(positive(px - m * tries) for px, m in zip(p, overlap, strict=True))
    return Rejected(weights if sum(weights) > 0 else p)


@lru_cache(maxsize=1 << 16)
def scale(p: Probs, q: Probs, drafts: int) -> Number:
    """Return rho in [1, n] with 1 - (1 - beta)^n = rho beta, beta = sum min(q, p / rho).

    Found by bisection and rounded up: any rho of [1, n] with (1 - (1 - beta)^n) / beta <= rho is
    lossless, a smaller one is not.
    """
    low, high = 1.0, float(drafts)
    if _tries(sum(_overlap(p, q, low)), drafts) <= low:
        return 1
    while low < (middle := (low + high) / 2) < high:
        if _tries(sum(_overlap(p, q, middle)), drafts) <= middle:
            high = middle
        else:
            low = middle
    return high


def _overlap(p: Probs, q: Probs, rho: Number) -> Probs:
    return tuple(min(qx, px / rho) for px, qx in zip(p, q, strict=True))


def _tries(beta: Number, drafts: int) -> Number:
    """Return sum_{k<n} (1 - beta)^k, the expected number of drafts tried."""
    return sum((1 - beta) ** k for k in range(drafts))
