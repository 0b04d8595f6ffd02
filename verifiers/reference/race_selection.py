"""Selecting among n independent drafts by a race whose rates a convex programme finds.

The convex programme of Global Resolution
(:mod:`~eaglegbv.verifiers.reference.convex_selection`) weighs the different tokens of a draft set,
and sets have to be listed. Here every draft is weighed, copies of a token included, and nothing is
listed; this variant is the project's own. Let H be the prefix of the tokens by p/q ascending that
minimises P(H) - q(H)^n, so that alpha* = 1 + P(H) - q(H)^n. Among the drafts above H (among all, if
none is) each is selected with probability in proportion to w(x) = exp(a(x)), x its token. The
weights minimise, over a >= 0 on H and a <= 0 above it,

    f(a) = E[log of the sum of w over the eligible drafts] - sum p a.

f is convex, and its gradient at x is b(x) - p(x), b the law of the selection. So at a minimum
b >= p on H and b <= p above it, and since a token of H is selected only if all drafts lie in H,
b(H) = q(H)^n: both together are optimality. A minimum is approached whatever p and q are: subsets A
of the two sides satisfy P(A) <= Pr(some draft in A, all in H) and
P(A) <= q(H + A)^n - q(H)^n, because H is critical.

The drafts need not be listed. Selecting by weights is a race: a draft of token x arrives after an
exponential time of rate w(x), and the first to arrive is selected. With phi(t) the probability that
one draft has not arrived by t, the sum of q(x) exp(-t w(x)) over the side and of q(H) above it,

    b(x) = n q(x) w(x) Integral exp(-t w(x)) phi(t)^(n-1) dt,
    E[log] = Integral (M exp(-t) - phi(t)^n + phi(inf)^n) dt / t,  M = phi(0)^n - phi(inf)^n.

In u = log t both integrands are analytic in a strip and vanish fast at its ends, where the
trapezoidal rule converges exponentially: O(W) for a point, and a few dozen points.

Truncation: the least likely tokens keep the weight 1. Error bound: for every law b of such a rule
the acceptance falls short of alpha* by exactly

    sum_H (p - b)+  +  sum_(above H) (b - p)+.

Over the tokens with weights of their own that is the part of the gradient that points out of the
bounds, at most the L1 norm of the projected gradient; over the others it is at most n times their
draft probability, as p <= n q on H and b <= n q everywhere. A tolerance costs acceptance and never
losslessness: b is the law of the very rule that is applied.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, minimize

from eaglegbv.verifiers.reference.convex_selection import critical_size, ranked_support

Floats: TypeAlias = NDArray[np.float64]

TRUNCATED = 2.5e-4
"""n times the draft probability of the tokens whose weights stay 1."""

WEIGHT_RANGE = 16.0
"""Bound on |a|: laws on the boundary of what selection can reach ask for infinite weights."""

GRADIENT_TOLERANCE = 3e-6
MOST_STEPS = 500

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
        law: b, float64, the law of the token selected; 0 off q's support.
        shortfall: The acceptance lost against the optimum (see the module on its bound).
        truncated: n times the draft probability of the tokens whose weights stayed 1.
    """

    weights: Floats
    low: NDArray[np.bool_]
    law: Floats
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

    q: Floats
    beside: float
    drafts: int

    def value_and_law(self, a: Floats, *, step: float, tail: float) -> tuple[float, Floats]:
        """Return E[log of the sum of weights] and b, its gradient."""
        n, w = self.drafts, np.exp(a)
        low, high = -tail - max(0.0, a.max()), log(tail) - min(0.0, a.min())
        times = np.exp(low + step * np.arange(ceil((high - low) / step) + 1))
        mass = (self.beside + self.q.sum()) ** n - self.beside**n
        value, law = 0.0, np.zeros(len(w))
        for first in range(0, len(times), POINTS_AT_ONCE):
            t = times[first : first + POINTS_AT_ONCE]
            waiting = np.exp(-t[:, None] * w)
            phi = self.beside + waiting @ self.q
            value += float((mass * np.exp(-t) - phi**n + self.beside**n).sum())
            law += (t * phi ** (n - 1)) @ waiting
        return step * value, step * n * self.q * w * law


def race_selection(p: Floats, q: Floats, drafts: int) -> RaceSelection:
    """Find the selection for ``drafts`` draws from ``q`` and the target ``p``.

    Args:
        p: ``[width]`` float64; tokens that q never draws may be left out.
        q: ``[width]`` float64, a law.
        drafts: n.
    """
    order = ranked_support(p, q)
    critical = critical_size(p[order], q[order], drafts)
    free = np.zeros(len(q), dtype=np.bool_)
    free[_likely(q, drafts)] = True
    low = np.zeros(len(q), dtype=np.bool_)
    low[order[:critical]] = True
    a, law = np.zeros(len(q)), np.zeros(len(q))
    sides = (
        (order[:critical], 0.0, (0.0, WEIGHT_RANGE)),
        (order[critical:], float(q[low].sum()), (-WEIGHT_RANGE, 0.0)),
    )
    for tokens, beside, bounds in sides:
        if len(tokens):
            a[tokens] = _weights(p[tokens], q[tokens], free[tokens], beside, drafts, bounds)
            side = _Side(q[tokens], beside, drafts)
            law[tokens] = side.value_and_law(a[tokens], step=FINE_STEP, tail=FINE_TAIL)[1]
    short = np.where(low, p - law, law - p)[order]
    return RaceSelection(
        weights=np.exp(a),
        low=low,
        law=law,
        shortfall=float(np.maximum(short, 0.0).sum()),
        truncated=float(drafts * q[~free].sum()),
    )


def _likely(q: Floats, n: int) -> NDArray[np.int64]:
    """Return the fewest tokens that leave out no more than :data:`TRUNCATED`."""
    likely = np.argsort(-q, kind="stable")
    left = np.maximum(1.0 - q[likely].cumsum(), 0.0)
    return likely[: int(np.searchsorted(-left, -TRUNCATED / n)) + 1]


def _weights(
    p: Floats,
    q: Floats,
    free: NDArray[np.bool_],
    beside: float,
    n: int,
    bounds: tuple[float, float],
) -> Floats:
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

    def objective(x: Floats) -> tuple[float, Floats]:
        own = x / scale
        value, law = side.value_and_law(np.append(own, 0.0), step=STEP, tail=TAIL)
        return value - float(wanted @ own), (law[:-1] - wanted) / scale

    _, law = side.value_and_law(np.zeros(len(wanted) + 1), step=STEP, tail=TAIL)
    with np.errstate(divide="ignore", invalid="ignore"):
        start = np.nan_to_num(np.clip(np.log(wanted / law[:-1]), *bounds))
    result = minimize(
        objective,
        start * scale,
        jac=True,
        method="L-BFGS-B",
        bounds=Bounds(scale * bounds[0], scale * bounds[1]),
        options={"ftol": 0.0, "gtol": GRADIENT_TOLERANCE, "maxiter": MOST_STEPS},
    )
    a[free] = result.x / scale
    return a
