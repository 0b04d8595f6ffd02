"""Selecting among n independent drafts by weights that a truncated convex programme finds.

Global Resolution (Thomas & Pal, 2511.15898) reduces optimal transport for independent drafts to a
convex minimisation, whose solution is a softmax over the different tokens of a draft set, and
truncates it. The objective used here, and the bounds in place of the paper's residuals, are this
project's own, as the paper's text was not available. Let H be the prefix of the tokens by p/q
ascending that minimises P(H) - q(H)^n, so that alpha* = 1 + P(H) - q(H)^n, and let T be the most
likely draft tokens.

* A draft off T among the n: the highest-ranked draft is selected.
* All drafts in T: of the different tokens among those above H (of all, if none is), x is selected
  with probability in proportion to exp(a(x)).

The weights minimise, over a >= 0 on H and a <= 0 above it,

    f(a) = E[log of the sum of exp(a(x)) over the eligible tokens; all in T] - sum_T (p - t) a,

t the law of what the first case selects. f is convex, and its gradient at x is b(x) - p(x), b the
law of the selection. So at a minimum b >= p on H and b <= p above it, and since a token of H is
selected only if all drafts lie in H, b(H) = q(H)^n: both together are optimality. Without
truncation a minimum is approached whatever p and q are: subsets A of the two sides satisfy
P(A) <= Pr(some draft in A, all in H) and P(A) <= q(H + A)^n - q(H)^n, because H is critical.

Error bound: for every law b of such a rule the acceptance falls short of alpha* by exactly

    sum_H (p - b)+  +  sum_(above H) (b - p)+.

Over T that is the part of the gradient that points out of the bounds, at most the L1 norm of the
projected gradient; off T it is at most n q(off T), as p <= n q on H and b <= n q everywhere. A
tolerance costs acceptance and never losslessness: b is the law of the very rule that is applied,
summed over all draws from T.

The draws from T are listed as multisets with their multinomial probabilities: O(|T|^n / n!), which
a limit keeps in bounds by making T smaller.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]

TRUNCATED = 2.5e-4
"""n times the draft probability that is left out of the programme, where the limit allows it."""

MOST_MULTISETS = 200_000
"""Draws that are listed at most; T is cut down to it."""

WEIGHT_RANGE = 30.0
"""Bound on |a|: laws on the boundary of what selection can reach ask for infinite weights."""

GRADIENT_TOLERANCE = 1e-5
MOST_STEPS = 500


@dataclass(frozen=True, slots=True)
class ConvexSelection:
    """A rule that selects one of n independent drafts; arrays are ``[width]``, as p and q were.

    Attributes:
        weights: exp(a), float64; 1 off T.
        ranks: int64, place of each token by p/q ascending.
        low: bool, H.
        kept: bool, T.
        law: b, float64, the law of the token selected; 0 off q's support.
        shortfall: The acceptance lost against the optimum (see the module on its bound).
        truncated: n q(off T), the share of the bound that truncation is answerable for.
    """

    weights: Floats
    ranks: Indices
    low: NDArray[np.bool_]
    kept: NDArray[np.bool_]
    law: Floats
    shortfall: float
    truncated: float

    def chances(self, drafts: Sequence[int]) -> list[float]:
        """Return the probability with which each of ``drafts``, indices into q, is selected.

        Among equal drafts the first gets all of it.
        """
        drawn = np.asarray(drafts)
        if not self.kept[drawn].all():
            chosen = int(np.argmax(self.ranks[drawn]))
            return [float(i == chosen) for i in range(len(drawn))]
        eligible = ~self.low[drawn] | self.low[drawn].all()
        first = np.array([x not in drafts[:i] for i, x in enumerate(drafts)])
        weights = self.weights[drawn] * (eligible & first)
        return list((weights / weights.sum()).tolist())


def convex_selection(p: Floats, q: Floats, drafts: int) -> ConvexSelection:
    """Find the selection for ``drafts`` draws from ``q`` and the target ``p``.

    Args:
        p: ``[width]`` float64; tokens that q never draws may be left out.
        q: ``[width]`` float64, a law.
        drafts: n.
    """
    order = ranked_support(p, q)
    ps, qs = p[order], q[order]
    critical = critical_size(ps, qs, drafts)
    T = _kept(qs, critical, drafts)
    left_out = _highest(qs, drafts) - _highest(np.where(T, qs, 0.0), drafts)
    left_out = np.maximum(left_out, 0.0) if not T.all() else np.zeros_like(qs)

    a, selected = np.zeros(len(order)), np.zeros(len(order))
    above = np.arange(len(order)) >= critical
    wanted = ps - left_out
    for side, bounds in ((~above, (0.0, WEIGHT_RANGE)), (above, (-WEIGHT_RANGE, 0.0))):
        tokens = np.flatnonzero(T & side)
        if len(tokens):
            others = float(qs[T & ~side].sum()) if side is above else 0.0
            draws = _draws(qs[tokens], others, drafts)
            a[tokens] = _minimise(draws, wanted[tokens], bounds)
            selected[tokens] = draws.value_and_law(a[tokens])[1]
    b = selected + left_out
    short = np.where(above, b - ps, ps - b)

    def spread(ranked: NDArray[np.generic], fill: object) -> NDArray[np.generic]:
        full = np.full(len(q), fill, dtype=ranked.dtype)
        full[order] = ranked
        return full

    return ConvexSelection(
        weights=np.asarray(spread(np.exp(a), 1.0), dtype=np.float64),
        ranks=np.asarray(spread(np.arange(len(order)), -1), dtype=np.int64),
        low=np.asarray(spread(~above, False), dtype=np.bool_),
        kept=np.asarray(spread(T, False), dtype=np.bool_),
        law=np.asarray(spread(b, 0.0), dtype=np.float64),
        shortfall=float(np.maximum(short, 0.0).sum()),
        truncated=float(drafts * qs[~T].sum()),
    )


def ranked_support(p: Floats, q: Floats) -> Indices:
    """Return q's support by p/q ascending, ties by token id."""
    drawn = np.flatnonzero(q > 0)
    with np.errstate(over="ignore"):
        return drawn[np.argsort(p[drawn] / q[drawn], kind="stable")]


def critical_size(p: Floats, q: Floats, n: int) -> int:
    """Return how many of the lowest-ranked tokens minimise P - F^n."""
    excess = np.concatenate(([0.0], p.cumsum() - q.cumsum() ** n))
    return int(excess.argmin())


def _highest(q: Floats, n: int) -> Floats:
    """Return F^n - (F - q)^n: the law of the highest-ranked draft, factored, not as a difference.

    ``q`` may sum to less than 1: that all n drafts lie in it is part of the event then.
    """
    F = q.cumsum()
    before = np.concatenate(([0.0], F[:-1]))
    return np.asarray(q * sum(F**k * before ** (n - 1 - k) for k in range(n)))


def _kept(q: Floats, critical: int, n: int) -> NDArray[np.bool_]:
    """Return T: enough of the most likely tokens, as far as the limit on multisets goes."""
    likely = np.argsort(-q, kind="stable")
    low = (likely < critical).cumsum()
    above = np.arange(1, len(q) + 1) - low
    sizes = [comb(int(h) + n - 1, n) for h in low]
    for k in range(1, n + 1):
        sizes = [size + comb(int(c) + k - 1, k) for size, c in zip(sizes, above, strict=True)]
    left = np.maximum(1.0 - q[likely].cumsum(), 0.0)
    enough = int(np.searchsorted(-left, -TRUNCATED / n)) + 1
    allowed = int(np.searchsorted(np.array(sizes, dtype=np.float64), MOST_MULTISETS, "right"))
    T = np.zeros(len(q), dtype=np.bool_)
    T[likely[: max(1, min(enough, allowed))]] = True
    return T


@dataclass(frozen=True, slots=True)
class _Draws:
    """The eligible drafts of every draw.

    Attributes:
        multisets: One ``[draws, k]`` int64 of token indices for each number k of eligible drafts.
        masses: ``[draws]`` float64 each, their probabilities.
        tokens: How many tokens there are.
    """

    multisets: tuple[Indices, ...]
    masses: tuple[Floats, ...]
    tokens: int

    def value_and_law(self, a: Floats) -> tuple[float, Floats]:
        """Return E[log sum exp a] and the law of the token selected, its gradient."""
        weights = np.exp(a)
        value, law = 0.0, np.zeros(self.tokens)
        for members, mass in zip(self.multisets, self.masses, strict=True):
            # A multiset is ascending, so a token counts where it differs from the one before.
            fresh = [True, *(members[:, 1:] != members[:, :-1]).T]
            columns = list(zip(members.T, fresh, strict=True))
            total = sum((weights[column] * new for column, new in columns), np.zeros(len(mass)))
            value += float(mass @ np.log(total))
            share = mass / total
            for column, new in columns:
                law += np.bincount(column, share * new, self.tokens)
        return value, law * weights


def _draws(q: Floats, others: float, n: int) -> _Draws:
    """List the draws of n with at least one draft in ``q`` and the rest among ``others``."""
    sets, masses = [], []
    for k in range(1, n + 1) if others > 0 else (n,):
        members, ways = _multisets(len(q), k)
        chance = comb(n, k) * others ** (n - k) * ways
        for column in members.T:
            chance = chance * q[column]
        sets.append(members)
        masses.append(chance)
    return _Draws(tuple(sets), tuple(masses), len(q))


@lru_cache(maxsize=16)
def _multisets(tokens: int, k: int) -> tuple[Indices, Floats]:
    """List the multisets of k tokens, ``[sets, k]`` ascending, and the orders each comes in."""
    members, ways = np.arange(tokens)[:, None], np.ones(tokens)
    runs = np.ones(tokens, dtype=np.int64)
    for size in range(2, k + 1):
        last = members[:, -1]
        counts = tokens - last
        row = np.repeat(np.arange(len(last)), counts)
        new = np.arange(len(row)) - np.repeat(counts.cumsum() - tokens, counts)
        runs = np.where(new == last[row], runs[row] + 1, 1)
        ways = ways[row] * size / runs
        members = np.column_stack((members[row], new))
    return members, ways


def _minimise(draws: _Draws, wanted: Floats, bounds: tuple[float, float]) -> Floats:
    def objective(a: Floats) -> tuple[float, Floats]:
        value, law = draws.value_and_law(a)
        return value - float(wanted @ a), law - wanted

    result = minimize(
        objective,
        np.zeros(draws.tokens),
        jac=True,
        method="L-BFGS-B",
        bounds=[bounds] * draws.tokens,
        options={"ftol": 0.0, "gtol": GRADIENT_TOLERANCE, "maxiter": MOST_STEPS},
    )
    return np.asarray(result.x, dtype=np.float64)
