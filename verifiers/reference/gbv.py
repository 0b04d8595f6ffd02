"""Greedy multi-path block verification (Thomas & Pal 2026, Algorithm 1)."""

from functools import lru_cache

from eaglegbv.verifiers.reference.block import block_verification
from eaglegbv.verifiers.reference.chooser import Chooser
from eaglegbv.verifiers.reference.probs import Number, Prefix, Probs
from eaglegbv.verifiers.reference.transport import ranked
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree


def gbv(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """Verify the best-ranked path as a block, with the law that being the best gives it.

    The best path has the lexicographically largest tuple of ranks, where tokens are ranked by p/q,
    then token id. That total order is what the skewed law assumes: breaking ties of p/q by the
    order of drafting would be biased.
    """
    path = max(tree.paths, key=lambda path: _ranks(tree, path))
    return block_verification(tree, path, skewed_laws(tree, path), chooser)


def _ranks(tree: ReferenceTree, path: Prefix) -> tuple[int, ...]:
    return tuple(_order(tree, path[:i]).index(x) for i, x in enumerate(path))


def _order(tree: ReferenceTree, prefix: Prefix) -> tuple[int, ...]:
    return _ranked(tree.target_law(prefix), tree.draft_law(prefix))


_ranked = lru_cache(maxsize=1 << 16)(ranked)


def skewed_laws(tree: ReferenceTree, path: Prefix) -> list[Probs]:
    """Return the law of each next token of the best of K paths, along ``path``.

    Pr(best path starts with x^i) = (S + q)^K - S^K, with q = q(x^i) the joint draft law and S the
    probability that one path ranks below x^i; in factored form, since the plain difference loses
    all digits at depth ten. Conditional laws follow by division.
    """
    paths = len(tree.paths)
    laws: list[Probs] = []
    S: Number = 0
    joint: Number = 1
    for i, x in enumerate(path):
        law = tree.draft_law(path[:i])
        whole = _best(S, joint, paths)
        below: Number = 0
        skewed: list[Number] = [0] * len(law)
        beneath: dict[int, Number] = {}
        for y in _order(tree, path[:i]):
            beneath[y] = S + joint * below
            skewed[y] = _best(beneath[y], joint * law[y], paths) / whole
            below += law[y]
        laws.append(tuple(skewed))
        S, joint = beneath[x], joint * law[x]
    return laws


def _best(S: Number, q: Number, paths: int) -> Number:
    return q * sum((S + q) ** k * S ** (paths - 1 - k) for k in range(paths))
