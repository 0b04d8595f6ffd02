"""Optimal transport at every node of an iid tree, by four solvers (Thomas & Pal, 2511.15898).

At a node with n drafts select one of them and accept it with min(1, p/b), b the law of the
selection; the residual is (p - b)+. Every solver proposes a selection *plan*; b is then the law of
that very plan, summed over all draft sets, so a solver's tolerance costs acceptance and never
losslessness.

* ``exact``: the transport of :mod:`~eaglegbv.verifiers.reference.transport`; no tolerance.
* ``convex``: weights exp(a_x), among the drafts above the critical prefix (all of them if none is
  above) one in proportion to its weight. The weights that give the optimal b minimise
  E[log of the sum of a set's weights] - sum b_x a_x, convex in at most V variables; L-BFGS-B
  within |a| <= 30 (laws on the boundary ask for infinite weights). Acceptance falls short of the
  optimum by at most half the L1 distance of the plan's law from b; above a tolerance the solver
  has failed and the node falls back to K-SEQ, which is counted.
* ``max_flow``: the linear program as an integer flow, capacities in units of 2^-30.
* ``lp``: the linear program, solved with HiGHS.

The last three list all draft sets: for tiny supports.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse import coo_array
from scipy.sparse.csgraph import maximum_flow

from eaglegbv.uniforms import Purpose
from eaglegbv.verifiers.reference.chooser import Chooser, selection_index
from eaglegbv.verifiers.reference.oracles import DraftSets, draft_sets_iid, transport_plan
from eaglegbv.verifiers.reference.probs import (
    Number,
    Prefix,
    Probs,
    magnitude,
    normalised,
    residual_or_target,
)
from eaglegbv.verifiers.reference.spectr import k_seq
from eaglegbv.verifiers.reference.transport import select, transport
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.reference.walk import Accepted, Rejected, accepts_draft, walk

TOLERANCE = 1e-3
"""Loss of acceptance above which a solver counts as failed."""

WEIGHT_RANGE = 30.0
UNITS = 1 << 30


class Solver(StrEnum):
    """How the selection of a node is found."""

    EXACT = "exact"
    CONVEX = "convex"
    MAX_FLOW = "max_flow"
    LP = "lp"


@dataclass(frozen=True, slots=True)
class Plan:
    """Which draft to select from every draft set.

    Attributes:
        rows: For each set the law of the token selected from it.
        law: b, the law of the token selected.
        shortfall: Bound on the acceptance lost against the optimum.
    """

    rows: Mapping[frozenset[int], Mapping[int, Number]]
    law: Probs
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
        return walk(tree, chooser, self._step)

    def _step(self, tree: ReferenceTree, prefix: Prefix, chooser: Chooser) -> Accepted | Rejected:
        p, q = tree.target_law(prefix), tree.draft_law(prefix)
        drafts = tree.drafts(prefix)
        if self.solver is Solver.EXACT or len(drafts) == 1:
            node = transport(p, q, len(drafts))
            x = select(node, drafts, len(prefix), len(tree.paths), chooser)
            return _accept(tree, prefix, x, node.law, chooser)
        plan = solve(self.solver, p, q, len(drafts))
        if plan.shortfall > self.tolerance:
            self.fallbacks += 1
            return k_seq(tree, prefix, chooser)
        children = tuple(tree.children(prefix))
        row = plan.rows[frozenset(children)]
        index = selection_index(len(tree.paths), len(prefix), 0, 0)
        chosen = chooser.choose([row.get(x, 0) for x in children], Purpose.SELECTION, index)
        return _accept(tree, prefix, children[chosen], plan.law, chooser)


def _accept(
    tree: ReferenceTree, prefix: Prefix, x: int, b: Probs, chooser: Chooser
) -> Accepted | Rejected:
    p = tree.target_law(prefix)
    path = tree.children(prefix)[x]
    h = min(1, p[x] / b[x]) if b[x] > 0 else 1
    if accepts_draft(tree, prefix, path, h, chooser):
        return Accepted(x)
    return Rejected(residual_or_target(1, p, b))


@lru_cache(maxsize=1 << 12)
def solve(solver: Solver, p: Probs, q: Probs, drafts: int) -> Plan:
    """Return a solver's plan for ``drafts`` draws from ``q``."""
    sets = draft_sets_iid(q, drafts)
    match solver:
        case Solver.CONVEX:
            rows = _softmax_rows(p, q, drafts, sets)
        case Solver.MAX_FLOW:
            rows = _rows_of_mass(_flow(p, sets), sets)
        case Solver.LP:
            rows = _rows_of_mass(transport_plan(p, sets), sets)
        case Solver.EXACT:
            raise ValueError("the exact transport needs no plan over draft sets")
    law: list[Number] = [0] * len(p)
    for drawn, mass in sets.items():
        for x, probability in rows[drawn].items():
            law[x] += mass * probability
    exact = transport(p, q, drafts)
    distance = sum(float(magnitude(b - c)) for b, c in zip(law, exact.law, strict=True))
    lost = float(exact.acceptance(p) - sum(min(px, b) for px, b in zip(p, law, strict=True)))
    bound = distance / 2 if solver is Solver.CONVEX else max(0.0, lost)
    return Plan(rows, tuple(law), bound)


def _rows_of_mass(
    mass: Mapping[tuple[frozenset[int], int], float], sets: DraftSets
) -> dict[frozenset[int], dict[int, Number]]:
    """Turn mass sent into selection probabilities; what a set does not send is spread evenly."""
    rows: dict[frozenset[int], dict[int, Number]] = {}
    for drawn, total in sets.items():
        sent = [max(0.0, mass[drawn, x]) for x in sorted(drawn)]
        spare = max(0.0, float(total) - sum(sent)) / len(drawn)
        law = normalised(weight + spare for weight in sent)
        rows[drawn] = dict(zip(sorted(drawn), law, strict=True))
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


def _softmax_rows(
    p: Probs, q: Probs, drafts: int, sets: DraftSets
) -> dict[frozenset[int], dict[int, Number]]:
    """Select by weights: one convex problem above the critical prefix, one below it."""
    node = transport(p, q, drafts)
    low = frozenset(_critical_prefix(p, q, drafts))
    eligible = {s: (s - low) or s for s in sets}
    weights: dict[int, float] = {}
    for group in (low, frozenset(node.order) - low):
        family: dict[frozenset[int], float] = {}
        for s, mass in sets.items():
            if eligible[s] <= group:
                family[eligible[s]] = family.get(eligible[s], 0.0) + float(mass)
        if family:
            weights |= _weights(family, sorted(group), [float(node.law[x]) for x in sorted(group)])
    rows: dict[frozenset[int], dict[int, Number]] = {}
    for s, chosen in eligible.items():
        tokens = sorted(chosen)
        top = max(weights[x] for x in tokens)
        law = normalised(float(np.exp(weights[x] - top)) for x in tokens)
        rows[s] = dict(zip(tokens, law, strict=True))
    return rows


def _critical_prefix(p: Probs, q: Probs, drafts: int) -> tuple[int, ...]:
    """Return the lowest-ranked tokens H that minimise P(H) - q(H)^n."""
    order = transport(p, q, drafts).order
    P = [0.0, *accumulate(float(p[x]) for x in order)]
    F = [0.0, *accumulate(float(q[x]) for x in order)]
    excess = [Px - Fx**drafts for Px, Fx in zip(P, F, strict=True)]
    return order[: excess.index(min(excess))]


def _weights(
    family: Mapping[frozenset[int], float], tokens: list[int], b: list[float]
) -> dict[int, float]:
    """Minimise E[log sum exp a] - b a over the weights a of ``tokens``."""
    column = {x: i for i, x in enumerate(tokens)}
    member = np.zeros((len(family), len(tokens)))
    for i, s in enumerate(family):
        member[i, [column[x] for x in s]] = 1.0
    mass, marginal = np.array(list(family.values())), np.array(b)

    def objective(a: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        top = a.max()
        each = member * np.exp(a - top)
        total = np.maximum(each.sum(1), 1e-300)
        value = float(mass @ (np.log(total) + top) - marginal @ a)
        return value, (mass / total) @ each - marginal

    result = minimize(
        objective,
        np.zeros(len(tokens)),
        jac=True,
        method="L-BFGS-B",
        bounds=[(-WEIGHT_RANGE, WEIGHT_RANGE)] * len(tokens),
        options={"ftol": 0.0, "gtol": 1e-12, "maxiter": 10_000, "maxfun": 20_000},
    )
    return dict(zip(tokens, result.x.tolist(), strict=True))
