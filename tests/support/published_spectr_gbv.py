"""SpecTr-GBV's acceptance rule as its authors' implementation has it: a control, not lossless."""

from math import prod

from eaglegbv.rng import Purpose
from eaglegbv.verifiers.proof.chooser import Chooser, Number, Prefix
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree


def published_spectr_gbv(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Verify the paths one after the other; a later path counts where it is accepted further.

    Source: src/engine.py of github.com/junemily/SpecTr-GBV at e399f44, which calls itself the
    official implementation of 2604.25925. With joint distributions p and q of a prefix,
    c = min(1, q/p) and K paths, a whole path is accepted with p [1 - (1 - c)^K] / [1 - (1 - q)^K], a shorter prefix x
    with

        (sum_y p(xy) (1 - c(xy))^K - p(x) (1 - c(x))^K)
        / (1 - (1 - q(x))^K - sum_y p(xy) [1 - (1 - c(xy))^K]),

    a prefix rejected once is not tried again unless it is a whole path, and the correction has the
    distribution of p (1 - c^K). No target is modified for the next step.
    """
    K, L = len(tree.paths), tree.length
    best: Prefix = ()
    rejected: set[Prefix] = set()
    for number, path in enumerate(tree.paths):
        for depth in range(len(best) + 1, L):
            prefix = path[:depth]
            if prefix in rejected:
                continue
            if _accepted(_chance(tree, prefix, K), chooser, number * L + depth - 1):
                best = prefix
            else:
                rejected.add(prefix)
        if _accepted(_whole(tree, path, K), chooser, number * L + L - 1):
            best = path
            break
    weights = tree.target_probs(best) if len(best) == L else _correction(tree, best, K)
    return Outcome(best, chooser.choose(weights, Purpose.CORRECTION, 0))


def _accepted(h: Number, chooser: Chooser, index: int) -> bool:
    """Return whether u < h; h may lie outside of [0, 1]."""
    h = min(max(h, 0), 1)
    return chooser.choose((h, 1 - h), Purpose.ACCEPTANCE, index) == 0


def _joint(tree: ReferenceTree, prefix: Prefix) -> tuple[Number, Number]:
    dists = [
        (tree.target_probs(prefix[:i]), tree.draft_probs(prefix[:i])) for i in range(len(prefix))
    ]
    return (
        prod(p[x] for (p, _), x in zip(dists, prefix, strict=True)),
        prod(q[x] for (_, q), x in zip(dists, prefix, strict=True)),
    )


def _covered(p: Number, q: Number) -> Number:
    return min(1, q / p) if p > 0 else 1


def _whole(tree: ReferenceTree, path: Prefix, K: int) -> Number:
    p, q = _joint(tree, path)
    return p * (1 - (1 - _covered(p, q)) ** K) / (1 - (1 - q) ** K)


def _chance(tree: ReferenceTree, prefix: Prefix, K: int) -> Number:
    p, q = _joint(tree, prefix)
    missed: Number = 0
    found: Number = 0
    for p_next, q_next in zip(tree.target_probs(prefix), tree.draft_probs(prefix), strict=True):
        miss = (1 - _covered(p * p_next, q * q_next)) ** K
        missed += p * p_next * miss
        found += p * p_next * (1 - miss)
    gain = missed - p * (1 - _covered(p, q)) ** K
    loss = 1 - (1 - q) ** K - found
    return gain / loss if loss != 0 else gain


def _correction(tree: ReferenceTree, prefix: Prefix, K: int) -> list[Number]:
    p, q = _joint(tree, prefix)
    dist = tree.target_probs(prefix)
    weights = [
        a * (1 - _covered(p * a, q * b) ** K)
        for a, b in zip(dist, tree.draft_probs(prefix), strict=True)
    ]
    return weights if sum(weights) > 0 else list(dist)
