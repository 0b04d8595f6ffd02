"""Optimal transport at every node of a tree of independent drafts (Thomas & Pal, 2511.15898).

At a node with n drafts select one of them and accept it with min(1, p/b), b the distribution of the
selection; the residual is (p - b)+. A solver finds the selection:

* ``exact``: the transport of :mod:`eaglegbv.verifiers.transport`; no tolerance, it cannot fail.
* ``convex``: weights of the different tokens of a draft set, found by a truncated convex programme.
* ``max_flow``: the linear program as an integer flow, capacities in units of 2^-30.
* ``lp``: the linear program, solved with HiGHS.

All but the first run on the host and are here for the tables of the paper, which compares them. b
is the distribution of the very rule that is applied, so a solver's tolerance costs acceptance and
never losslessness. K-SEQ takes a solver's place where its loss of acceptance may exceed the
tolerance, or where it cannot be run: the last two list all draft sets, at most a thousand.

The convex programme (its objective and bounds are this project's own, as the paper's text was not
available). Let H be the prefix of the tokens by p/q ascending that minimises P(H) - q(H)^n, so that
alpha* = 1 + P(H) - q(H)^n. Of the different tokens drafted above H (of all, if none is) x is
selected in proportion to exp(a(x)). The weights minimise, over a >= 0 on H and a <= 0 above it,

    f(a) = E[log of the sum of exp(a) over the eligible tokens] - sum p a.

f is convex, and its gradient at x is b(x) - p(x). So at a minimum b >= p on H and b <= p above it,
and since a token of H is selected only if all drafts lie in H, b(H) = q(H)^n: both together are
optimality. A minimum is approached whatever p and q are: subsets A of the two sides satisfy
P(A) <= Pr(some draft in A, all in H) and P(A) <= q(H + A)^n - q(H)^n, because H is critical.

Draws from the most likely tokens T are listed as multisets with their multinomial probabilities:
O(|T|^n / n!), which a limit keeps in bounds by making T smaller. With a draft off T, the
highest-ranked draft is selected; p is reduced by that.

The acceptance falls short of alpha* by exactly sum_H (p - b)+ + sum_(above H) (b - p)+. Over T that
is the part of the gradient that points out of the bounds, at most the L1 norm of the projected
gradient; off T it is at most n q(off T), as p <= n q on H and b <= n q everywhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import comb
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, minimize
from scipy.sparse import coo_array
from scipy.sparse.csgraph import maximum_flow

from eaglegbv.config import DraftSampling
from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms, numbers_of_children
from eaglegbv.verifiers.paths import first_draws
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
from eaglegbv.verifiers.transport import exact_transport, select_draft

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]
TOLERANCE = 1e-3  # loss of acceptance above which a solver counts as failed
MOST_SETS = 1000  # draft sets that `max_flow` and `lp` take at most: their matrices are dense
UNITS = 1 << 30


class Solver(StrEnum):
    """How the selection of a node is found."""

    EXACT = "exact"
    CONVEX = "convex"
    MAX_FLOW = "max_flow"
    LP = "lp"


@dataclass(frozen=True, slots=True)
class GlobalResolution:
    """The rule with one of its solvers."""

    solver: Solver = Solver.EXACT  # how selections are found
    tolerance: float = TOLERANCE  # largest loss of acceptance at which a solver has not failed

    def __call__(self, tree: ReferenceTree, chooser: Chooser) -> Outcome:
        """Walk down, one transport a node."""
        return walk_down(tree, chooser, self._step)

    def _step(self, tree: ReferenceTree, prefix: Prefix, chooser: Chooser) -> int | Rejected:
        p, q = tree.target_probs(prefix), tree.draft_probs(prefix)
        drafts = tree.drafts(prefix)
        if self.solver is Solver.EXACT or len(drafts) == 1:
            node = exact_transport(p, q, len(drafts))
            x = select_draft(node, drafts, len(prefix), tree.most_draws, chooser)
            return _accept(tree, prefix, x, node.probs, chooser)
        plan = solve(self.solver, p, q, len(drafts))
        if plan is None or plan.shortfall > self.tolerance:
            return exact_k_seq(tree, prefix, chooser)
        tokens = tuple(drafts.values())
        row: dict[int, Number] = dict.fromkeys(tree.children(prefix), 0)
        for x, chance in zip(tokens, plan.chances(tokens), strict=True):
            row[x] += chance
        index = selection_index(tree.most_draws, len(prefix), 0, 0)
        chosen = chooser.choose(list(row.values()), Purpose.SELECTION, index)
        return _accept(tree, prefix, tuple(row)[chosen], plan.probs, chooser)


def _accept(
    tree: ReferenceTree, prefix: Prefix, x: int, b: Probs, chooser: Chooser
) -> int | Rejected:
    p = tree.target_probs(prefix)
    h = min(1, p[x] / b[x]) if b[x] > 0 else 1
    if accepts_draft(tree, prefix, tree.children(prefix)[x], h, chooser):
        return x
    return Rejected(residual_or_target(1, p, b))


# The same for batches: exactly, on the device; and by the other solvers, on the host.
class GlobalResolutionVerifier(Verifier):
    """Select by exact optimal transport at every node, accept token by token.

    O(N W + F W log W), F forks, and one row of the vocabulary.
    """

    name = "global_resolution"
    draft_samplings = frozenset({DraftSampling.IID})
    any_widths = frozenset({DraftSampling.IID})

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge independent drafts; a child is tested by the number of its first draw."""
        path = select_iid(tree, target, uniforms.selection)
        numbers = numbers_of_children(tree, first_draws(tree), uniforms.acceptance)
        tests = numbers.gather(1, path.nodes[:, 1:])
        return verify_tokens(path, target, tests, uniforms.correction)


class HostSolver(Verifier):
    """Global resolution by a solver that runs on the host, for comparison only: O(W^n) a node."""

    draft_samplings = frozenset({DraftSampling.IID})
    any_widths = frozenset({DraftSampling.IID})
    solver: ClassVar[Solver]

    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge the requests one by one."""
        path_nodes = torch.zeros_like(tree.draws[:, :, 0])
        accepted, token_ids = torch.zeros_like(tree.num_nodes), torch.zeros_like(tree.num_nodes)
        resolve = GlobalResolution(self.solver)
        for b in range(tree.batch):
            request = from_draft_tree(tree, target, b)
            outcome = resolve(request, UniformChooser(uniforms, b))
            for depth in range(1, len(outcome.accepted) + 1):
                path_nodes[b, depth - 1] = request.node_numbers[outcome.accepted[:depth]]
            accepted[b], token_ids[b] = len(outcome.accepted), outcome.token
        return Verdict(path_nodes, accepted, token_ids)


def host_solver(kind: Solver) -> type[HostSolver]:
    """Return the verifier of a solver other than the exact one."""

    class OfKind(HostSolver):
        name = f"{GlobalResolutionVerifier.name}_{kind}"
        solver = kind

    return OfKind


@dataclass(frozen=True, slots=True)
class Plan:
    """Which of the drafts to select."""

    # drafted tokens -> the probability with which each of these drafts is selected
    chances: Callable[[Sequence[int]], Sequence[Number]]
    probs: Probs  # b, the distribution of the token selected
    shortfall: float  # bound on the acceptance lost against the optimum


@lru_cache(maxsize=1 << 12)
def solve(solver: Solver, p: Probs, q: Probs, drafts: int) -> Plan | None:
    """Return a plan for so many draws from ``q`` by a solver on the host; None if q is too wide."""
    if solver is Solver.CONVEX:
        selection = weighted_selection(np.array(p, np.float64), np.array(q, np.float64), drafts)
        return Plan(selection.chances, tuple(selection.probs.tolist()), selection.shortfall)
    if count_draft_sets(len(support(q)), drafts) > MOST_SETS:
        return None
    sets = draft_sets_iid(q, drafts)
    sent = _flow(p, sets) if solver is Solver.MAX_FLOW else transport_plan(p, sets)
    rows = _rows_of_mass(sent, sets)
    probs: list[Number] = [0] * len(p)
    for drawn, mass in sets.items():
        for x, probability in rows[drawn].items():
            probs[x] += mass * probability

    def chances(tokens: Sequence[int]) -> list[Number]:
        row = rows[frozenset(tokens)]
        return [row[x] if x not in tokens[:i] else 0 for i, x in enumerate(tokens)]

    accepted = sum(min(px, b) for px, b in zip(p, probs, strict=True))
    lost = float(exact_transport(p, q, drafts).acceptance(p) - accepted)
    return Plan(chances, tuple(probs), max(0.0, lost))


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
        probs = normalised(weight + spare for weight in sent)
        rows[drawn] = dict(zip(sorted(drawn), probs, strict=True))
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


# The convex programme.


TRUNCATED = 2.5e-4
"""n times the draft probability of the tokens off T, where the limit on multisets allows it."""

MOST_MULTISETS = 200_000  # draws that are listed at most; T is cut down to it
MOST_STEPS = 500
WEIGHT_RANGE = 30.0
"""Bound on |a|: distributions on the boundary of what selection can reach ask for infinite
weights."""

GRADIENT_TOLERANCE = 1e-5
Objective: TypeAlias = Callable[[Floats], tuple[float, Floats]]
"""Takes a; returns E[log of the sum of exp(a)] and its gradient, the distribution selected."""


@dataclass(frozen=True, slots=True)
class WeightedSelection:
    """A rule that selects one of n independent drafts; arrays are ``[width]``, as p and q were.

    Equal drafts count once: the first of them gets all of the probability.
    """

    weights: Floats  # exp(a), float64; 1 off T
    ranks: Indices  # int64, place of each token by p/q ascending
    low: Flags  # H
    kept: Flags  # T
    probs: Floats  # b, float64, the distribution of the token selected; 0 off q's support
    shortfall: float  # the acceptance lost against the optimum (see the module on its bound)

    def chances(self, drafts: Sequence[int]) -> list[float]:
        """Return the probability with which each of ``drafts``, indices into q, is selected."""
        drawn = np.asarray(drafts)
        if not self.kept[drawn].all():
            chosen = int(np.argmax(self.ranks[drawn]))
            return [float(i == chosen) for i in range(len(drawn))]
        eligible = ~self.low[drawn] | self.low[drawn].all()
        eligible &= np.array([x not in drafts[:i] for i, x in enumerate(drafts)])
        weights = self.weights[drawn] * eligible
        return list((weights / weights.sum()).tolist())


def weighted_selection(p: Floats, q: Floats, drafts: int) -> WeightedSelection:
    """Find the selection for ``drafts`` draws from ``q``, a distribution, and the target ``p``.

    Both are ``[width]`` float64.
    """
    order = np.flatnonzero(q > 0)
    with np.errstate(over="ignore"):  # ties by token id
        order = order[np.argsort(p[order] / q[order], kind="stable")]
    ps, qs = p[order], q[order]
    excess = np.concatenate(([0.0], ps.cumsum() - qs.cumsum() ** drafts))
    low = np.arange(len(order)) < excess.argmin()
    kept = _kept(qs, low, drafts)
    left_out = np.maximum(_highest(qs, drafts) - _highest(np.where(kept, qs, 0.0), drafts), 0.0)
    a, b = np.zeros_like(qs), left_out.copy()
    for side, sign in ((low, 1.0), (~low, -1.0)):
        free = kept & side
        if free.any():
            beside = 0.0 if side is low else float(qs[low & kept].sum())
            objective = _listed(qs[free], beside, drafts)
            a[free] = _minimise(objective, (ps - left_out)[free], sign)
            b[free] += objective(a[free])[1]
    short = np.where(low, ps - b, b - ps)

    def spread(values: NDArray[Any], fill: float) -> NDArray[Any]:
        full = np.full(len(q), fill, dtype=values.dtype)
        full[order] = values
        return full

    return WeightedSelection(
        weights=spread(np.exp(a), 1.0),
        ranks=spread(np.arange(len(order)), -1),
        low=spread(low, False),
        kept=spread(kept, False),
        probs=spread(b, 0.0),
        shortfall=float(np.maximum(short, 0.0).sum()),
    )


def _highest(q: Floats, n: int) -> Floats:
    """Return F^n - (F - q)^n: the distribution of the highest-ranked draft, without cancellation.

    ``q`` may sum to less than 1: that all n drafts lie in it is part of the event then.
    """
    F = q.cumsum()
    before = np.concatenate(([0.0], F[:-1]))
    return np.asarray(q * sum(F**k * before ** (n - 1 - k) for k in range(n)))


def _kept(q: Floats, low: Flags, n: int) -> Flags:
    """Return T: enough of the most likely tokens, as far as the limit on multisets goes."""
    likely = np.argsort(-q, kind="stable")
    left = np.maximum(1.0 - q[likely].cumsum(), 0.0)
    count = int(np.searchsorted(-left, -TRUNCATED / n)) + 1
    in_low = low[likely].cumsum()
    above = np.arange(1, len(q) + 1) - in_low
    sizes = [comb(int(h) + n - 1, n) for h in in_low]
    for k in range(1, n + 1):
        sizes = [size + comb(int(c) + k - 1, k) for size, c in zip(sizes, above, strict=True)]
    allowed = int(np.searchsorted(np.array(sizes, dtype=np.float64), MOST_MULTISETS, "right"))
    T = np.zeros(len(q), dtype=np.bool_)
    T[likely[: max(1, min(count, allowed))]] = True
    return T


def _minimise(objective: Objective, wanted: Floats, sign: float) -> Floats:
    """Return the a of the given sign that minimises the objective less ``wanted @ a``."""
    low, high = min(0.0, sign * WEIGHT_RANGE), max(0.0, sign * WEIGHT_RANGE)

    def reduced(a: Floats) -> tuple[float, Floats]:
        value, probs = objective(a)
        return value - float(wanted @ a), probs - wanted

    result = minimize(
        reduced,
        np.zeros_like(wanted),
        jac=True,
        method="L-BFGS-B",
        bounds=Bounds(low, high),
        options={"ftol": 0.0, "gtol": GRADIENT_TOLERANCE, "maxiter": MOST_STEPS},
    )
    return np.asarray(result.x, dtype=np.float64)


def _listed(q: Floats, others: float, n: int) -> Objective:
    """Return the objective over all draws with a draft in ``q``, the rest among ``others``."""
    draws: list[tuple[Indices, Floats]] = []
    for k in range(1, n + 1) if others > 0 else (n,):
        members, ways = _multisets(len(q), k)
        chance = comb(n, k) * others ** (n - k) * ways
        for column in members.T:
            chance = chance * q[column]
        draws.append((members, chance))

    def objective(a: Floats) -> tuple[float, Floats]:
        weights = np.exp(a)
        value, probs = 0.0, np.zeros(len(q))
        for members, mass in draws:
            # A multiset is ascending, so a token counts where it differs from the one before.
            fresh = [True, *(members[:, 1:] != members[:, :-1]).T]
            columns = list(zip(members.T, fresh, strict=True))
            total = sum((weights[column] * new for column, new in columns), np.zeros(len(mass)))
            value += float(mass @ np.log(total))
            share = mass / total
            for column, new in columns:
                probs += np.bincount(column, share * new, len(q))
        return value, probs * weights

    return objective


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
