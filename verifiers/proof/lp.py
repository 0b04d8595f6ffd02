"""What no rule can beat, at a node and over whole trees: linear programs, solved with HiGHS."""

from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement
from math import factorial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from eaglegbv.verifiers.proof.chooser import Number, Prefix, Probs, ProbsAt, support
from eaglegbv.verifiers.proof.tree import Draws

DraftSets: TypeAlias = Mapping[frozenset[int], Number]
"""The distribution of the set of different drafts at a node."""


def draft_sets_iid(q: Probs, drafts: int) -> dict[frozenset[int], Number]:
    """Return the distribution of the set of different tokens among ``drafts`` independent draws."""
    sets: dict[frozenset[int], Number] = {}
    for drawn in combinations_with_replacement(support(q), drafts):
        mass: Number = factorial(drafts)
        for x in set(drawn):
            mass = mass * q[x] ** drawn.count(x) / factorial(drawn.count(x))
        key = frozenset(drawn)
        sets[key] = sets.get(key, 0) + mass
    return sets


def transport_plan(p: Probs, sets: DraftSets) -> dict[tuple[frozenset[int], int], float]:
    """Solve the linear program of optimal transport: the mass each draft set sends to each token.

    Maximise the mass sent, at most Pr(set) from a set and p(x) to a token: the optimal acceptance.
    """
    edges = [(drawn, x) for drawn in sets for x in sorted(drawn)]
    rows = {drawn: i for i, drawn in enumerate(sets)}
    entries = [(rows[drawn], j, 1.0) for j, (drawn, _) in enumerate(edges)]
    entries += [(len(rows) + x, j, 1.0) for j, (_, x) in enumerate(edges)]
    bounds = [float(mass) for mass in sets.values()] + [float(mass) for mass in p]
    solution = _maximise(np.ones(len(edges)), entries, bounds)
    return dict(zip(edges, solution.tolist(), strict=True))


def lp_acceptance_length(p: ProbsAt, vocab: int, trees: Mapping[Draws, Number]) -> float:
    """Return the largest E[tau] of any lossless rule (GBV, 2602.16961, Theorem 4.3).

    ``trees`` is the distribution of the draws. Variables: the probability that a tree X is drawn
    and exactly its prefix s is accepted. With B(c) = Pr(the accepted prefix starts with
    c), the correction token after c must make up B(c) p(x|c) - B(c x) >= 0; every such B belongs to
    a rule, and E[tau] = sum of B below the root.
    """
    merged: dict[frozenset[Prefix], Number] = {}
    for draws, mass in trees.items():
        nodes = frozenset(child for level in draws for child in level if child is not None)
        merged[nodes] = merged.get(nodes, 0) + mass
    stops: list[tuple[int, Prefix]] = []
    for i, nodes in enumerate(merged):
        stops += [(i, prefix) for prefix in sorted({(), *nodes})]
    inner = {prefix[:-1] for _, prefix in stops if prefix}
    children = {(*c, x): p(c)[x] for c in sorted(inner) for x in range(vocab)}
    rows = {child: i for i, child in enumerate(children)}
    entries = [(len(rows) + i, j, 1.0) for j, (i, _) in enumerate(stops)]
    for j, (_, prefix) in enumerate(stops):
        # A stop at s counts in B(c) for every c on the way to s: B(cx) - p(x|c) B(c) <= 0.
        for depth in range(len(prefix) + 1):
            c = prefix[:depth]
            if c:
                entries.append((rows[c], j, 1.0))
            if c in inner:
                below = [(*c, x) for x in range(vocab)]
                entries += [(rows[child], j, -float(children[child])) for child in below]
    bounds = [0.0] * len(rows) + [float(mass) for mass in merged.values()]
    lengths = np.array([len(prefix) for _, prefix in stops], dtype=np.float64)
    solution = _maximise(lengths, entries, bounds)
    return float(lengths @ solution)


def _maximise(
    gain: NDArray[np.float64], entries: Sequence[tuple[int, int, float]], bounds: Sequence[float]
) -> NDArray[np.float64]:
    """Maximise ``gain x`` over x >= 0, A x <= ``bounds``; A's (row, column, value) are summed."""
    A = np.zeros((len(bounds), len(gain)))
    rows, columns, values = zip(*entries, strict=True)
    np.add.at(A, (rows, columns), values)
    result = linprog(-gain, A_ub=A, b_ub=bounds, method="highs")
    if result.status != 0:
        raise ArithmeticError(f"HiGHS: {result.message}")
    return np.asarray(result.x, dtype=np.float64)
