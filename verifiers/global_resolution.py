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

t the distribution of what the first case selects. f is convex, and its gradient at x is b(x) - p(x), b the
distribution of the selection. So at a minimum b >= p on H and b <= p above it, and since a token of H is
selected only if all drafts lie in H, b(H) = q(H)^n: both together are optimality. Without
truncation a minimum is approached whatever p and q are: subsets A of the two sides satisfy
P(A) <= Pr(some draft in A, all in H) and P(A) <= q(H + A)^n - q(H)^n, because H is critical.

Error bound: for every distribution b of such a rule the acceptance falls short of alpha* by exactly

    sum_H (p - b)+  +  sum_(above H) (b - p)+.

Over T that is the part of the gradient that points out of the bounds, at most the L1 norm of the
projected gradient; off T it is at most n q(off T), as p <= n q on H and b <= n q everywhere. A
tolerance costs acceptance and never losslessness: b is the distribution of the very rule that is applied,
summed over all draws from T.

The draws from T are listed as multisets with their multinomial probabilities: O(|T|^n / n!), which
a limit keeps in bounds by making T smaller.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import ceil, comb, log
from types import MappingProxyType
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, minimize
from scipy.sparse import coo_array
from scipy.sparse.csgraph import maximum_flow

from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms, numbers_of_children
from eaglegbv.verifiers.paths import first_paths
from eaglegbv.verifiers.proof.chooser import (
    Chooser,
    Number,
    Prefix,
    Probs,
    UniformChooser,
    normalised,
    residual_or_target,
    selection_index,
    support,
)
from eaglegbv.verifiers.proof.lp import DraftSets, draft_sets_iid, transport_plan
from eaglegbv.verifiers.proof.tree import (
    Accepted,
    Outcome,
    ReferenceTree,
    Rejected,
    accepts_draft,
    from_draft_tree,
    walk_down,
)
from eaglegbv.verifiers.selection import select_iid
from eaglegbv.verifiers.spectr import exact_k_seq
from eaglegbv.verifiers.token import verify_tokens
from eaglegbv.verifiers.transport import exact_transport, select

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]

TRUNCATED = 2.5e-4
"""n times the draft probability that is left out of the programme, where the limit allows it."""

MOST_MULTISETS = 200_000
"""Draws that are listed at most; T is cut down to it."""

WEIGHT_RANGE = 30.0
"""Bound on |a|: distributions on the boundary of what selection can reach ask for infinite weights."""

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
        dist: b, float64, the distribution of the token selected; 0 off q's support.
        shortfall: The acceptance lost against the optimum (see the module on its bound).
        truncated: n q(off T), the share of the bound that truncation is answerable for.
    """

    weights: Floats
    ranks: Indices
    low: NDArray[np.bool_]
    kept: NDArray[np.bool_]
    dist: Floats
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
        q: ``[width]`` float64, a distribution.
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
            selected[tokens] = draws.value_and_probs(a[tokens])[1]
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
        dist=np.asarray(spread(b, 0.0), dtype=np.float64),
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
    """Return F^n - (F - q)^n: the distribution of the highest-ranked draft, factored, not as a difference.

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

    def value_and_probs(self, a: Floats) -> tuple[float, Floats]:
        """Return E[log sum exp a] and the distribution of the token selected, its gradient."""
        weights = np.exp(a)
        value, dist = 0.0, np.zeros(self.tokens)
        for members, mass in zip(self.multisets, self.masses, strict=True):
            # A multiset is ascending, so a token counts where it differs from the one before.
            fresh = [True, *(members[:, 1:] != members[:, :-1]).T]
            columns = list(zip(members.T, fresh, strict=True))
            total = sum((weights[column] * new for column, new in columns), np.zeros(len(mass)))
            value += float(mass @ np.log(total))
            share = mass / total
            for column, new in columns:
                dist += np.bincount(column, share * new, self.tokens)
        return value, dist * weights


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
        value, dist = draws.value_and_probs(a)
        return value - float(wanted @ a), dist - wanted

    result = minimize(
        objective,
        np.zeros(draws.tokens),
        jac=True,
        method="L-BFGS-B",
        bounds=[bounds] * draws.tokens,
        options={"ftol": 0.0, "gtol": GRADIENT_TOLERANCE, "maxiter": MOST_STEPS},
    )
    return np.asarray(result.x, dtype=np.float64)


# Selecting among n independent drafts by a race whose rates a convex programme finds.
#
# The convex programme of Global Resolution
# (:mod:`~eaglegbv.verifiers.reference.convex_selection`) weighs the different tokens of a draft set,
# and sets have to be listed. Here every draft is weighed, copies of a token included, and nothing is
# listed; this variant is the project's own. Let H be the prefix of the tokens by p/q ascending that
# minimises P(H) - q(H)^n, so that alpha* = 1 + P(H) - q(H)^n. Among the drafts above H (among all, if
# none is) each is selected with probability in proportion to w(x) = exp(a(x)), x its token. The
# weights minimise, over a >= 0 on H and a <= 0 above it,
#
# f(a) = E[log of the sum of w over the eligible drafts] - sum p a.
#
# f is convex, and its gradient at x is b(x) - p(x), b the distribution of the selection. So at a minimum
# b >= p on H and b <= p above it, and since a token of H is selected only if all drafts lie in H,
# b(H) = q(H)^n: both together are optimality. A minimum is approached whatever p and q are: subsets A
# of the two sides satisfy P(A) <= Pr(some draft in A, all in H) and
# P(A) <= q(H + A)^n - q(H)^n, because H is critical.
#
# The drafts need not be listed. Selecting by weights is a race: a draft of token x arrives after an
# exponential time of rate w(x), and the first to arrive is selected. With phi(t) the probability that
# one draft has not arrived by t, the sum of q(x) exp(-t w(x)) over the side and of q(H) above it,
#
# b(x) = n q(x) w(x) Integral exp(-t w(x)) phi(t)^(n-1) dt,
# E[log] = Integral (M exp(-t) - phi(t)^n + phi(inf)^n) dt / t,  M = phi(0)^n - phi(inf)^n.
#
# In u = log t both integrands are analytic in a strip and vanish fast at its ends, where the
# trapezoidal rule converges exponentially: O(W) for a point, and a few dozen points.
#
# Truncation: the least likely tokens keep the weight 1. Error bound: for every distribution b of such a rule
# the acceptance falls short of alpha* by exactly
#
# sum_H (p - b)+  +  sum_(above H) (b - p)+.
#
# Over the tokens with weights of their own that is the part of the gradient that points out of the
# bounds, at most the L1 norm of the projected gradient; over the others it is at most n times their
# draft probability, as p <= n q on H and b <= n q everywhere. A tolerance costs acceptance and never
# losslessness: b is the distribution of the very rule that is applied.


RaceFloats: TypeAlias = NDArray[np.float64]

RACE_TRUNCATED = 2.5e-4
"""n times the draft probability of the tokens whose weights stay 1."""

RACE_WEIGHT_RANGE = 16.0
"""Bound on |a|: distributions on the boundary of what selection can reach ask for infinite weights."""

RACE_GRADIENT_TOLERANCE = 3e-6
MOST_RACE_STEPS = 500

STEP, TAIL = 0.7, 16.0
"""Step and reach of the trapezoidal rule in log t while minimising. Its error is below the
tolerance."""

FINE_STEP, FINE_TAIL = 0.17, 40.0
"""Step and reach of the rule that yields the final b, exact to rounding."""

POINTS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class RaceSelection:
    """A rule that selects one of n independent drafts; arrays are ``[width]``, as p and q were.

    Attributes:
        weights: exp(a), float64.
        low: bool, H.
        dist: b, float64, the distribution of the token selected; 0 off q's support.
        shortfall: The acceptance lost against the optimum (see the module on its bound).
        truncated: n times the draft probability of the tokens whose weights stayed 1.
    """

    weights: RaceFloats
    low: NDArray[np.bool_]
    dist: RaceFloats
    shortfall: float
    truncated: float

    def chances(self, drafts: Sequence[int]) -> list[float]:
        """Return the probability with which each of ``drafts``, indices into q, is selected."""
        drawn = np.asarray(drafts)
        eligible = ~self.low[drawn] | self.low[drawn].all()
        weights = self.weights[drawn] * eligible
        return list((weights / weights.sum()).tolist())


@dataclass(frozen=True, slots=True)
class _Side:
    """The race among the drafts of H, or of those above it.

    Attributes:
        q: ``[tokens]`` float64.
        beside: The probability of a draft that does not take part: q(H) above H, 0 on H.
        drafts: n.
    """

    q: RaceFloats
    beside: float
    drafts: int

    def value_and_probs(
        self, a: RaceFloats, *, step: float, tail: float
    ) -> tuple[float, RaceFloats]:
        """Return E[log of the sum of weights] and b, its gradient."""
        n, w = self.drafts, np.exp(a)
        low, high = -tail - max(0.0, a.max()), log(tail) - min(0.0, a.min())
        times = np.exp(low + step * np.arange(ceil((high - low) / step) + 1))
        mass = (self.beside + self.q.sum()) ** n - self.beside**n
        value, dist = 0.0, np.zeros(len(w))
        for first in range(0, len(times), POINTS_AT_ONCE):
            t = times[first : first + POINTS_AT_ONCE]
            waiting = np.exp(-t[:, None] * w)
            phi = self.beside + waiting @ self.q
            value += float((mass * np.exp(-t) - phi**n + self.beside**n).sum())
            dist += (t * phi ** (n - 1)) @ waiting
        return step * value, step * n * self.q * w * dist


def race_selection(p: RaceFloats, q: RaceFloats, drafts: int) -> RaceSelection:
    """Find the selection for ``drafts`` draws from ``q`` and the target ``p``.

    Args:
        p: ``[width]`` float64; tokens that q never draws may be left out.
        q: ``[width]`` float64, a distribution.
        drafts: n.
    """
    order = ranked_support(p, q)
    critical = critical_size(p[order], q[order], drafts)
    free = np.zeros(len(q), dtype=np.bool_)
    free[_likely(q, drafts)] = True
    low = np.zeros(len(q), dtype=np.bool_)
    low[order[:critical]] = True
    a, dist = np.zeros(len(q)), np.zeros(len(q))
    sides = (
        (order[:critical], 0.0, (0.0, RACE_WEIGHT_RANGE)),
        (order[critical:], float(q[low].sum()), (-RACE_WEIGHT_RANGE, 0.0)),
    )
    for tokens, beside, bounds in sides:
        if len(tokens):
            a[tokens] = _weights(p[tokens], q[tokens], free[tokens], beside, drafts, bounds)
            side = _Side(q[tokens], beside, drafts)
            dist[tokens] = side.value_and_probs(a[tokens], step=FINE_STEP, tail=FINE_TAIL)[1]
    short = np.where(low, p - dist, dist - p)[order]
    return RaceSelection(
        weights=np.exp(a),
        low=low,
        dist=dist,
        shortfall=float(np.maximum(short, 0.0).sum()),
        truncated=float(drafts * q[~free].sum()),
    )


def _likely(q: RaceFloats, n: int) -> NDArray[np.int64]:
    """Return the fewest tokens that leave out no more than :data:`RACE_TRUNCATED`."""
    likely = np.argsort(-q, kind="stable")
    left = np.maximum(1.0 - q[likely].cumsum(), 0.0)
    return likely[: int(np.searchsorted(-left, -RACE_TRUNCATED / n)) + 1]


def _weights(
    p: RaceFloats,
    q: RaceFloats,
    free: NDArray[np.bool_],
    beside: float,
    n: int,
    bounds: tuple[float, float],
) -> RaceFloats:
    """Return a at the tokens of one side, 0 where they are not ``free``.

    The variables are a sqrt(q), whose second derivatives are alike.
    """
    a = np.zeros(len(q))
    if not free.any():
        return a
    # The others run as one draft of weight 1.
    rest = float(q[~free].sum())
    side = _Side(np.append(q[free], rest), beside, n)
    wanted, scale = p[free], np.sqrt(q[free])

    def objective(x: RaceFloats) -> tuple[float, RaceFloats]:
        own = x / scale
        value, dist = side.value_and_probs(np.append(own, 0.0), step=STEP, tail=TAIL)
        return value - float(wanted @ own), (dist[:-1] - wanted) / scale

    _, dist = side.value_and_probs(np.zeros(len(wanted) + 1), step=STEP, tail=TAIL)
    with np.errstate(divide="ignore", invalid="ignore"):
        start = np.nan_to_num(np.clip(np.log(wanted / dist[:-1]), *bounds))
    result = minimize(
        objective,
        start * scale,
        jac=True,
        method="L-BFGS-B",
        bounds=Bounds(scale * bounds[0], scale * bounds[1]),
        options={"ftol": 0.0, "gtol": RACE_GRADIENT_TOLERANCE, "maxiter": MOST_RACE_STEPS},
    )
    a[free] = result.x / scale
    return a


# Optimal transport at every node of an iid tree, by five solvers (Thomas & Pal, 2511.15898).
#
# At a node with n drafts select one of them and accept it with min(1, p/b), b the distribution of the
# selection; the residual is (p - b)+. Every solver proposes a selection *plan*; b is then the distribution of
# that very plan, summed over all draft sets, so a solver's tolerance costs acceptance and never
# losslessness.
#
# * ``exact``: the transport of :mod:`~eaglegbv.verifiers.reference.transport`; no tolerance.
# * ``convex``: weights found by a truncated convex programme, with a bound on the acceptance lost
# (:mod:`~eaglegbv.verifiers.reference.convex_selection`).
# * ``race``: likewise, with weights of drafts in place of those of their different tokens
# (:mod:`~eaglegbv.verifiers.reference.race_selection`).
# * ``max_flow``: the linear program as an integer flow, capacities in units of 2^-30.
# * ``lp``: the linear program, solved with HiGHS.
#
# The last two list all draft sets, of which there may be a thousand. A solver has failed where its
# loss of acceptance may exceed a tolerance, or where it cannot be run; the node falls back to K-SEQ
# then, which is counted.


TOLERANCE = 1e-3
"""Loss of acceptance above which a solver counts as failed."""

MOST_SETS = 1000
"""Draft sets that ``max_flow`` and ``lp`` take at most: their matrices are dense."""

UNITS = 1 << 30


class Solver(StrEnum):
    """How the selection of a node is found."""

    EXACT = "exact"
    CONVEX = "convex"
    RACE = "race"
    MAX_FLOW = "max_flow"
    LP = "lp"


_WEIGHING: Mapping[Solver, Callable[[Floats, Floats, int], ConvexSelection | RaceSelection]] = (
    MappingProxyType({Solver.CONVEX: convex_selection, Solver.RACE: race_selection})
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which of the drafts to select.

    Attributes:
        chances: Drafted tokens -> the probability with which each of these drafts is selected.
        dist: b, the distribution of the token selected.
        shortfall: Bound on the acceptance lost against the optimum.
    """

    chances: Callable[[Sequence[int]], Sequence[Number]]
    dist: Probs
    shortfall: float


@dataclass(slots=True)
class GlobalResolution:
    """The verifier with one of its solvers.

    Attributes:
        solver: How plans are found.
        tolerance: Largest loss of acceptance at which a solver has not failed.
        fallbacks: How often a node fell back to K-SEQ because its solver failed.
    """

    solver: Solver = Solver.EXACT
    tolerance: float = TOLERANCE
    fallbacks: int = 0

    def __call__(self, tree: ReferenceTree, chooser: Chooser) -> Outcome:
        """Walk down, one transport a node."""
        return walk_down(tree, chooser, self._step)

    def _step(self, tree: ReferenceTree, prefix: Prefix, chooser: Chooser) -> Accepted | Rejected:
        p, q = tree.target_probs(prefix), tree.draft_probs(prefix)
        drafts = tree.drafts(prefix)
        if self.solver is Solver.EXACT or len(drafts) == 1:
            node = exact_transport(p, q, len(drafts))
            x = select(node, drafts, len(prefix), len(tree.paths), chooser)
            return _accept(tree, prefix, x, node.dist, chooser)
        plan = solve(self.solver, p, q, len(drafts))
        if plan is None or plan.shortfall > self.tolerance:
            self.fallbacks += 1
            return exact_k_seq(tree, prefix, chooser)
        tokens = tuple(drafts.values())
        row: dict[int, Number] = dict.fromkeys(tree.children(prefix), 0)
        for x, chance in zip(tokens, plan.chances(tokens), strict=True):
            row[x] += chance
        index = selection_index(len(tree.paths), len(prefix), 0, 0)
        chosen = chooser.choose(list(row.values()), Purpose.SELECTION, index)
        return _accept(tree, prefix, tuple(row)[chosen], plan.dist, chooser)


def _accept(
    tree: ReferenceTree, prefix: Prefix, x: int, b: Probs, chooser: Chooser
) -> Accepted | Rejected:
    p = tree.target_probs(prefix)
    path = tree.children(prefix)[x]
    h = min(1, p[x] / b[x]) if b[x] > 0 else 1
    if accepts_draft(tree, prefix, path, h, chooser):
        return Accepted(x)
    return Rejected(residual_or_target(1, p, b))


@lru_cache(maxsize=1 << 12)
def solve(solver: Solver, p: Probs, q: Probs, drafts: int) -> Plan | None:
    """Return a solver's plan for ``drafts`` draws from ``q``; None where the support is too large.

    Raises:
        ValueError: The exact transport needs no plan.
    """
    if solver is Solver.EXACT:
        raise ValueError("the exact transport needs no plan over draft sets")
    if solver in _WEIGHING:
        found = _WEIGHING[solver](np.array(p, np.float64), np.array(q, np.float64), drafts)
        return Plan(found.chances, tuple(found.dist.tolist()), found.shortfall)
    if count_draft_sets(len(support(q)), drafts) > MOST_SETS:
        return None
    sets = draft_sets_iid(q, drafts)
    sent = _flow(p, sets) if solver is Solver.MAX_FLOW else transport_plan(p, sets)
    rows = _rows_of_mass(sent, sets)
    dist: list[Number] = [0] * len(p)
    for drawn, mass in sets.items():
        for x, probability in rows[drawn].items():
            dist[x] += mass * probability

    def chances(tokens: Sequence[int]) -> list[Number]:
        row = rows[frozenset(tokens)]
        return [row[x] if x not in tokens[:i] else 0 for i, x in enumerate(tokens)]

    accepted = sum(min(px, b) for px, b in zip(p, dist, strict=True))
    lost = float(exact_transport(p, q, drafts).acceptance(p) - accepted)
    return Plan(chances, tuple(dist), max(0.0, lost))


def count_draft_sets(width: int, drafts: int) -> int:
    """Return how many sets of different tokens ``drafts`` draws from ``width`` tokens can form."""
    return sum(comb(width, size) for size in range(1, drafts + 1))


def _rows_of_mass(
    mass: Mapping[tuple[frozenset[int], int], float], sets: DraftSets
) -> dict[frozenset[int], dict[int, Number]]:
    """Turn mass sent into selection probabilities; what a set does not send is spread evenly."""
    rows: dict[frozenset[int], dict[int, Number]] = {}
    for drawn, total in sets.items():
        sent = [max(0.0, mass[drawn, x]) for x in sorted(drawn)]
        spare = max(0.0, float(total) - sum(sent)) / len(drawn)
        dist = normalised(weight + spare for weight in sent)
        rows[drawn] = dict(zip(sorted(drawn), dist, strict=True))
    return rows


def _flow(p: Probs, sets: DraftSets) -> dict[tuple[frozenset[int], int], float]:
    """Send integer units from the source through sets and tokens to the sink."""
    names = list(sets)
    source, sink = 0, 1 + len(names) + len(p)
    token = 1 + len(names)
    edges = [(source, 1 + i, int(float(sets[s]) * UNITS)) for i, s in enumerate(names)]
    edges += [(1 + i, token + x, UNITS) for i, s in enumerate(names) for x in sorted(s)]
    edges += [(token + x, sink, int(float(mass) * UNITS)) for x, mass in enumerate(p)]
    rows, columns, capacity = np.array(edges, dtype=np.int32).T
    graph = coo_array((capacity, (rows, columns)), shape=(sink + 1, sink + 1)).tocsr()
    flow = maximum_flow(graph, source, sink).flow.toarray()
    return {(s, x): float(flow[1 + i, token + x]) / UNITS for i, s in enumerate(names) for x in s}


# Global Resolution by solvers that run on the host, to compare with the exact transport.
#
# Each solver's tolerance costs acceptance and never losslessness; see
# :mod:`eaglegbv.verifiers.global_resolution`.


class HostSolver(Verifier):
    """Global resolution by a solver that runs on the host, for comparison.

    Attributes:
        resolution: The rule; ``resolution.fallbacks`` counts nodes at which the solver failed and
            K-SEQ took its place.
    """

    source: ClassVar[str] = "Thomas & Pal, Global Resolution (2511.15898)"
    cost: ClassVar[str] = "O(W^n) on the host, for comparison only"
    draft_samplings: ClassVar[frozenset[DraftSampling]] = frozenset({DraftSampling.IID})
    solver: ClassVar[Solver]

    def __init__(self) -> None:
        self.resolution = GlobalResolution(self.solver)

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge the requests one by one."""
        path_nodes = torch.zeros_like(tree.path_nodes[:, 0])
        accepted, token_ids = torch.zeros_like(tree.num_nodes), torch.zeros_like(tree.num_nodes)
        for b in range(tree.batch):
            request = from_draft_tree(tree, target, b)
            outcome = self.resolution(request, UniformChooser(uniforms, b))
            for depth in range(1, len(outcome.accepted) + 1):
                node = request.node_numbers[outcome.accepted[:depth]]
                path_nodes[b, depth - 1] = node
            accepted[b], token_ids[b] = len(outcome.accepted), outcome.token
        return Verdict(path_nodes, accepted, token_ids)


class ConvexResolutionVerifier(HostSolver):
    """The convex programme, with an error bound and a counted fall-back to K-SEQ."""

    name: ClassVar[str] = "global_resolution_convex"
    solver: ClassVar[Solver] = Solver.CONVEX


class RaceResolutionVerifier(HostSolver):
    """The convex programme for weights of drafts, which needs no list of draft sets."""

    name: ClassVar[str] = "global_resolution_race"
    source: ClassVar[str] = "eaglegbv: a variant of Global Resolution (2511.15898)"
    cost: ClassVar[str] = "O(W) an evaluation on the host, some hundred a node, for comparison only"
    solver: ClassVar[Solver] = Solver.RACE


class MaxFlowResolutionVerifier(HostSolver):
    """The linear programme as an integer flow."""

    name: ClassVar[str] = "global_resolution_max_flow"
    solver: ClassVar[Solver] = Solver.MAX_FLOW


class LinearResolutionVerifier(HostSolver):
    """The linear programme, by HiGHS."""

    name: ClassVar[str] = "global_resolution_lp"
    solver: ClassVar[Solver] = Solver.LP


# Global Resolution: optimal transport at every node of a tree of independent paths.
#
# At a node with n drafts one of them is selected and accepted with min(1, p/b), b the distribution of the
# selection; the residual is (p - b)+. The transport of :mod:`eaglegbv.verifiers.transport` is exact:
# it has no tolerance and cannot fail. :mod:`eaglegbv.verifiers.global_resolution` has other solvers.


class GlobalResolutionVerifier(Verifier):
    """Select by exact optimal transport at every node, accept token by token."""

    name: ClassVar[str] = "global_resolution"
    source: ClassVar[str] = "Thomas & Pal, Global Resolution (2511.15898), solved exactly"
    cost: ClassVar[str] = "O(N W + F W log W), F forks, and one row of the vocabulary"
    draft_samplings: ClassVar[frozenset[DraftSampling]] = frozenset({DraftSampling.IID})

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge independent paths; a child is tested by the number of its first path."""
        path = select_iid(tree, target, uniforms.selection)
        numbers = numbers_of_children(tree, first_paths(tree), uniforms.acceptance)
        tests = numbers.gather(1, path.nodes[:, 1:])
        return verify_tokens(path, target, tests, uniforms.correction)
