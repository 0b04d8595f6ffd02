"""Optimal transport at every node of an iid tree, by five solvers (Thomas & Pal, 2511.15898).

At a node with n drafts select one of them and accept it with min(1, p/b), b the law of the
selection; the residual is (p - b)+. Every solver proposes a selection *plan*; b is then the law of
that very plan, summed over all draft sets, so a solver's tolerance costs acceptance and never
losslessness.

* ``exact``: the transport of :mod:`~eaglegbv.verifiers.reference.transport`; no tolerance.
* ``convex``: weights found by a truncated convex programme, with a bound on the acceptance lost
  (:mod:`~eaglegbv.verifiers.reference.convex_selection`).
* ``race``: likewise, with weights of drafts in place of those of their different tokens
  (:mod:`~eaglegbv.verifiers.reference.race_selection`).
* ``max_flow``: the linear program as an integer flow, capacities in units of 2^-30.
* ``lp``: the linear program, solved with HiGHS.

The last two list all draft sets, of which there may be a thousand. A solver has failed where its
loss of acceptance may exceed a tolerance, or where it cannot be run; the node falls back to K-SEQ
then, which is counted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import comb
from types import MappingProxyType

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import maximum_flow

from eaglegbv.uniforms import Purpose
from eaglegbv.verifiers.reference.chooser import Chooser, selection_index
from eaglegbv.verifiers.reference.convex_selection import (
    ConvexSelection,
    Floats,
    convex_selection,
)
from eaglegbv.verifiers.reference.oracles import DraftSets, draft_sets_iid, transport_plan
from eaglegbv.verifiers.reference.probs import (
    Number,
    Prefix,
    Probs,
    normalised,
    residual_or_target,
    support,
)
from eaglegbv.verifiers.reference.race_selection import RaceSelection, race_selection
from eaglegbv.verifiers.reference.spectr import k_seq
from eaglegbv.verifiers.reference.transport import select, transport
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.reference.walk import Accepted, Rejected, accepts_draft, walk

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
        law: b, the law of the token selected.
        shortfall: Bound on the acceptance lost against the optimum.
    """

    chances: Callable[[Sequence[int]], Sequence[Number]]
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
        if plan is None or plan.shortfall > self.tolerance:
            self.fallbacks += 1
            return k_seq(tree, prefix, chooser)
        tokens = tuple(drafts.values())
        row: dict[int, Number] = dict.fromkeys(tree.children(prefix), 0)
        for x, chance in zip(tokens, plan.chances(tokens), strict=True):
            row[x] += chance
        index = selection_index(len(tree.paths), len(prefix), 0, 0)
        chosen = chooser.choose(list(row.values()), Purpose.SELECTION, index)
        return _accept(tree, prefix, tuple(row)[chosen], plan.law, chooser)


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
def solve(solver: Solver, p: Probs, q: Probs, drafts: int) -> Plan | None:
    """Return a solver's plan for ``drafts`` draws from ``q``; None where the support is too large.

    Raises:
        ValueError: The exact transport needs no plan.
    """
    if solver is Solver.EXACT:
        raise ValueError("the exact transport needs no plan over draft sets")
    if solver in _WEIGHING:
        found = _WEIGHING[solver](np.array(p, np.float64), np.array(q, np.float64), drafts)
        return Plan(found.chances, tuple(found.law.tolist()), found.shortfall)
    if count_draft_sets(len(support(q)), drafts) > MOST_SETS:
        return None
    sets = draft_sets_iid(q, drafts)
    sent = _flow(p, sets) if solver is Solver.MAX_FLOW else transport_plan(p, sets)
    rows = _rows_of_mass(sent, sets)
    law: list[Number] = [0] * len(p)
    for drawn, mass in sets.items():
        for x, probability in rows[drawn].items():
            law[x] += mass * probability

    def chances(tokens: Sequence[int]) -> list[Number]:
        row = rows[frozenset(tokens)]
        return [row[x] if x not in tokens[:i] else 0 for i, x in enumerate(tokens)]

    accepted = sum(min(px, b) for px, b in zip(p, law, strict=True))
    lost = float(transport(p, q, drafts).acceptance(p) - accepted)
    return Plan(chances, tuple(law), max(0.0, lost))


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
