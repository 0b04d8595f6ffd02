"""Solvers of optimal transport at a node of independent drafts, timed.

Every solver gets the two distributions on the draft's support and n drafts, and selects one of the
drafts. The measured time is the process's processor time, so that other users of the machine do not
count.

The distribution of what a node commits is computed from what the solver does, not from what it aims
at: from the distribution of its selection (for the exact solver, from its relabelling of drafts),
the acceptance that its own distribution b prescribes, and the residual. So a solver's tolerance
costs acceptance and never losslessness. K-SEQ takes a solver's place where its loss of acceptance
may exceed the tolerance.

The convex programme is this project's own. Let H be the prefix of the tokens by p/q ascending that
minimises P(H) - q(H)^n, so that alpha* = 1 + P(H) - q(H)^n. Of the different tokens drafted above H
(of all, if none is) x is selected in proportion to exp(a(x)). The weights minimise, over a >= 0
on H and a <= 0 above it,

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from math import comb, inf
from statistics import median
from time import process_time
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, minimize
from scipy.sparse import coo_array
from scipy.sparse.csgraph import maximum_flow
from scipy.special import softmax

from eaglegbv.config import Plan
from eaglegbv.eval.experiment import Part
from eaglegbv.eval.figures import Sums
from eaglegbv.eval.observations import Observation
from eaglegbv.eval.settings import Setting
from eaglegbv.eval.ways.nodes import NodeProbs, harvest, optimum_iid
from eaglegbv.eval.ways.places import Sampling, Text
from eaglegbv.loading import Pair
from eaglegbv.utils import require_integer
from eaglegbv.verifiers.proof.chooser import Number, Probs, normalised, support
from eaglegbv.verifiers.proof.lp import DraftSets, draft_sets_iid, transport_plan
from eaglegbv.verifiers.spectr import k_seq
from eaglegbv.verifiers.transport import (
    RankedProbs,
    Transport,
    exact_transport,
    labels,
    transport,
)

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]
TOLERANCE = 1e-3  # loss of acceptance above which a solver counts as failed
MOST_SETS = 1000  # draft sets that `max_flow` and `lp` take at most: their matrices are dense
UNITS = 1 << 30
SPREAD, NOISE = 0.85, 0.8  # of random nodes' logits
NODES = 10  # most nodes of a size that solvers get of a part of the texts


class Solver(StrEnum):
    """How the selection of a node is found."""

    EXACT = "exact"
    CONVEX = "convex"
    MAX_FLOW = "max_flow"
    LP = "lp"


@dataclass(frozen=True, slots=True)
class Node:
    """A node of n independent drafts."""

    target: Floats  # [vocab] float64, p
    ids: NDArray[np.int64]  # [width] int64, the draft distribution's support, ascending
    draft: Floats  # [width] float64, q at `ids`
    drawn: NDArray[np.int64]  # [drafts] int64, the drafts, as indices into `ids`
    uniforms: Floats  # [drafts, 2] float64, for the selection

    @property
    def wanted(self) -> Floats:
        """Target probabilities p at ``ids``."""
        return np.asarray(self.target[self.ids])


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a solver at a node."""

    seconds: float  # time until a draft was selected
    accepted: Floats  # [width] float64, the probability that this token is selected and accepted
    residual: Floats  # [vocab] float64, weights of the committed token when no draft is accepted
    # Bound on the acceptance lost against the optimum; None after a fall-back.
    shortfall: float | None

    @property
    def acceptance(self) -> float:
        """The probability that a draft is accepted."""
        return float(self.accepted.sum())

    def deviation(self, node: Node) -> float:
        """Return the L1 distance of the committed distribution from the target's."""
        rest = self.residual if self.residual.sum() > 0 else node.target
        committed = max(0.0, 1 - float(self.accepted.sum())) * rest / rest.sum()
        committed[node.ids] += self.accepted
        return float(np.abs(committed - node.target).sum())


def random_nodes(vocab: int, drafts: int, width: int, instances: int, seed: int) -> Iterator[Node]:
    """Return random nodes; the same arguments give the same nodes."""
    for number in range(instances):
        key = (seed, vocab, drafts, width, number)
        rng = np.random.default_rng(key)
        logits = SPREAD * np.sqrt(2 * np.log(vocab)) * rng.standard_normal(vocab)
        noisy = logits + NOISE * rng.standard_normal(vocab)
        ids = np.sort(np.argsort(-noisy, kind="stable")[:width])
        draft = softmax(noisy[ids])
        yield Node(
            target=softmax(logits),
            ids=ids,
            draft=draft,
            drawn=rng.choice(width, size=drafts, p=draft),
            uniforms=rng.random((drafts, 2)),
        )


def solve_all(
    solver: Solver, given: Sequence[Node], *, tolerance: float = TOLERANCE
) -> list[Answer | None]:
    """Give every node to one solver; the answer is None where a node is too large for it.

    A first call sets things up, so it is not measured: the first node is solved once more. Where a
    solver's loss of acceptance is above ``tolerance``, K-SEQ takes its place.
    """
    if solver is not Solver.EXACT:
        return [planned(node, solver, tolerance) for node in given]
    exact(given[0])
    return [exact(node) for node in given]


def optimal_acceptance(node: Node) -> float:
    """Return alpha* for the node's number of drafts."""
    columns = (node.ids, node.draft, node.wanted)
    nodes = NodeProbs(*(torch.from_numpy(column).unsqueeze(0) for column in columns))
    return optimum_iid(nodes, len(node.drawn)).item()


def exact(node: Node) -> Answer:
    """Select by the exact transport, as the batched verifiers do."""
    start = process_time()
    columns = (node.ids, node.draft, node.wanted)
    ranked = RankedProbs.of(*(torch.from_numpy(column).view(1, 1, -1) for column in columns))
    drafts = torch.tensor([[len(node.drawn)]])
    plan = transport(ranked, drafts)
    tokens = torch.from_numpy(node.ids[node.drawn])
    ranks = (ranked.ids.view(-1, 1) == tokens).to(torch.int64).argmax(dim=0).view(1, -1)
    uniforms = torch.from_numpy(node.uniforms).unsqueeze(0)
    int(labels(plan, torch.zeros_like(ranks), ranks, uniforms).argmax())
    seconds = process_time() - start

    places = np.searchsorted(node.ids, ranked.ids.numpy().ravel())
    b, selected = np.zeros(len(node.ids)), np.zeros(len(node.ids))
    b[places] = plan.selected.numpy().ravel()
    selected[places] = _probs_by_labels(plan, len(node.drawn))
    return _answer(node, seconds, b, selected, 0.0)


def _probs_by_labels(plan: Transport, n: int) -> Floats:
    """Return the distribution of the selected draft, from how drafts are relabelled.

    A draft of rank x has label y with probability K(x, y). With l(y) = sum_x q(x) K(x, y), the
    highest of n labels is y with probability L(y)^n - L(y-)^n, where L is the cdf of l, and the
    token under it is x with probability q(x) K(x, y) / l(y).
    """
    q = plan.draft.numpy().ravel()
    v = plan.highest.numpy().ravel()
    moved = plan.selected.numpy().ravel() - v
    gives, receives = np.maximum(-moved, 0).cumsum(), np.maximum(moved, 0).cumsum()
    # Givers and receivers are matched by cumulative sums: between two cuts, one meets one.
    end = min(gives[-1], receives[-1])
    cuts = np.unique(np.clip(np.concatenate((gives, receives)), 0.0, end))
    cuts = np.concatenate(([0.0], cuts[cuts > 0]))
    middle, amount = (cuts[1:] + cuts[:-1]) / 2, np.diff(cuts)
    giver, receiver = np.searchsorted(gives, middle), np.searchsorted(receives, middle)
    gap = v[giver] / q[giver] - v[receiver] / q[receiver]
    used = (giver > receiver) & (gap > 0)
    giver, receiver, amount, gap = giver[used], receiver[used], amount[used], gap[used]
    # q(x) eps(x, y), the same in both directions; a probability eps is at most 1.
    exchanged = np.minimum(amount / gap, np.minimum(q[giver], q[receiver]))
    own = q.copy()
    np.subtract.at(own, giver, exchanged)
    np.subtract.at(own, receiver, exchanged)
    label = own.copy()
    np.add.at(label, giver, exchanged)
    np.add.at(label, receiver, exchanged)
    L = label.cumsum()
    before = np.concatenate(([0.0], L[:-1]))
    density = sum(L**k * before ** (n - 1 - k) for k in range(n))
    probs = own * density
    np.add.at(probs, receiver, exchanged * density[giver])
    np.add.at(probs, giver, exchanged * density[receiver])
    return np.asarray(probs)


def planned(node: Node, solver: Solver, tolerance: float) -> Answer | None:
    """Select by a plan, or by K-SEQ if the plan may lose too much; None if the node is too big."""
    start = process_time()
    n = len(node.drawn)
    plan = solve(solver, tuple(node.wanted.tolist()), tuple(node.draft.tolist()), n)
    if plan is None:
        return None
    if plan.shortfall > tolerance:
        return _k_seq(node, start)
    chances = np.array(plan.chances(node.drawn.tolist()), dtype=np.float64)
    int(np.searchsorted(chances.cumsum(), node.uniforms[0, 0] * chances.sum()))
    seconds = process_time() - start
    selected = np.array(plan.probs, dtype=np.float64)
    return _answer(node, seconds, selected, selected, plan.shortfall)


def _answer(node: Node, seconds: float, b: Floats, selected: Floats, bound: float) -> Answer:
    """Accept with min(1, p/b), a draft that was selected with probabilities ``selected``."""
    h = np.divide(node.wanted, b, out=np.ones_like(b), where=b > 0)
    residual = node.target.copy()
    residual[node.ids] = np.maximum(node.wanted - b, 0.0)
    return Answer(seconds, selected * np.minimum(h, 1.0), residual, bound)


def _k_seq(node: Node, start: float) -> Answer:
    """Accept the drafts in order with min(1, p / (rho q))."""
    p, q = torch.from_numpy(node.wanted).view(1, 1, -1), torch.from_numpy(node.draft).view(1, 1, -1)
    rho_of_node, served = k_seq(p, q, torch.tensor([[len(node.drawn)]]))
    rho = float(rho_of_node)
    np.argmax(node.uniforms[:, 0] < node.wanted[node.drawn] / (rho * node.draft[node.drawn]))
    seconds = process_time() - start
    once = node.draft * np.minimum(1.0, node.wanted / (rho * node.draft))
    tries = sum((1 - once.sum()) ** k for k in range(len(node.drawn)))
    residual = node.target.copy()
    residual[node.ids] = np.maximum(node.wanted - served.numpy().ravel(), 0.0)
    return Answer(seconds, once * tries, residual, None)


def nodes_of(probs: NodeProbs, *, width: int, drafts: int, count: int, seed: int) -> list[Node]:
    """Return at most ``count`` nodes for the solvers, spread evenly over the places.

    Draft distributions keep the ``width`` most likely tokens; n ``drafts`` are drawn.
    """
    probs = probs.top(width)
    last = probs.count - 1
    places = np.unique(np.linspace(0, last, min(count, last + 1)).astype(np.int64))
    nodes = []
    for place in places.tolist():
        rng = np.random.default_rng((seed, place, width, drafts))
        q, p = probs.draft[place].numpy(), probs.target[place].numpy()
        kept = np.flatnonzero(q)
        q = q[kept]
        # One token at the end stands for all tokens that the drafter cannot propose.
        target = np.append(p[kept], max(0.0, 1 - p[kept].sum()))
        nodes.append(
            Node(
                # The target's own sum is 1 except for the rounding of its logits.
                target=target / target.sum(),
                ids=np.arange(len(q)),
                draft=q,
                drawn=rng.choice(len(q), size=drafts, p=q / q.sum()),
                uniforms=rng.random((drafts, 2)),
            )
        )
    return nodes


# The solvers but the exact one.


@dataclass(frozen=True, slots=True)
class Selection:
    """Which of the drafts to select."""

    # drafted tokens -> the probability with which each of these drafts is selected
    chances: Callable[[Sequence[int]], Sequence[Number]]
    probs: Probs  # b, the distribution of the token selected
    shortfall: float  # bound on the acceptance lost against the optimum


@lru_cache(maxsize=1 << 12)
def solve(solver: Solver, p: Probs, q: Probs, drafts: int) -> Selection | None:
    """Return a selection for so many draws from ``q``; None if ``q`` is too wide for the solver."""
    if solver is Solver.CONVEX:
        selection = weighted_selection(np.array(p, np.float64), np.array(q, np.float64), drafts)
        return Selection(selection.chances, tuple(selection.probs.tolist()), selection.shortfall)
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
    return Selection(chances, tuple(probs), max(0.0, lost))


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


# Solvers as settings: their verifiers are solvers, their paths drafts.


def timed_solvers(
    pair: Pair, texts: Sequence[Text], settings: Sequence[Setting], sampling: Sampling
) -> list[Observation]:
    """Give some places of texts to solvers: acceptance and seconds of each node."""
    found = harvest(pair, texts, settings, sampling)
    observations = []
    for setting in settings:
        plan = setting.plan
        given = nodes_of(
            found.probs,
            width=plan.draft_width,
            drafts=plan.paths,
            count=NODES,
            seed=texts[0].seed,
        )
        observations += solved(setting, given, texts[0].name)
    return observations


@dataclass(frozen=True, slots=True)
class RandomNodes:
    """Solvers on random nodes of each size; the vocabulary is the setting's context."""

    instances: int
    seed: int
    time_limit: float  # seconds after which a node counts as not solved; nothing is interrupted

    def __call__(self, settings: Sequence[Setting]) -> Iterator[Part]:
        """Yield a part for each setting."""
        for setting in settings:
            yield Part(setting.name, 1, partial(self._measure, setting))

    def _measure(self, setting: Setting) -> list[Observation]:
        plan, vocab = setting.plan, setting.context
        given = random_nodes(vocab, plan.paths, plan.draft_width, self.instances, self.seed)
        return solved(setting, list(given), "node", self.time_limit)


def solved(
    setting: Setting, given: Sequence[Node], unit: str, time_limit: float = inf
) -> list[Observation]:
    """Give nodes to a setting's solver; those that are too large for it have no step."""
    answers = solve_all(Solver(setting.plan.verifier), given)
    return [
        Observation(
            setting=setting.name, unit=f"{unit} {number}", sums=_sums(node, answer, time_limit)
        )
        for number, (node, answer) in enumerate(zip(given, answers, strict=True))
    ]


def _sums(node: Node, answer: Answer | None, time_limit: float) -> dict[str, float]:
    if answer is None:
        return {"given": 1.0, "refused": 1.0}
    sums = {
        "given": 1.0,
        "steps": 1.0,
        "tokens": answer.acceptance,
        "seconds": answer.seconds,
        "deviation": answer.deviation(node),
        "optimum": optimal_acceptance(node),
    }
    late = answer.seconds > time_limit
    if late:
        sums["late"] = 1.0
    if answer.shortfall is None:
        return sums | {"fallbacks": 1.0}
    return sums | {"solved": float(not late), "shortfall": answer.shortfall}


HEADINGS = ["V", "width", "n", "solver", "ms/token", "success", "too large", "fall-backs", "late"]
HEADINGS += ["L1 deviation", "acceptance", "optimum", "bound"]


def solver_table(sums: Sums, settings: Sequence[Setting]) -> list[list[str]]:
    """Return a row for each setting of :class:`RandomNodes`, headings first."""
    return [HEADINGS, *(_row(sums, setting) for setting in settings)]


def _row(sums: Sums, setting: Setting) -> list[str]:
    plan, name = setting.plan, setting.name

    def share(part: str, layout: str, below: str = "steps") -> str:
        count = sums.total(name, below)
        return format(sums.total(name, part) / count, layout) if count else "-"

    def most(part: str) -> str:
        values = sums.column(name, part)
        return f"{max(values):.1e}" if values else "-"

    seconds = sums.column(name, "seconds")
    counts = (f"{sums.total(name, part):.0f}" for part in ("refused", "fallbacks", "late"))
    return [
        *map(str, (setting.context, plan.draft_width, plan.paths, plan.verifier)),
        f"{1e3 * median(seconds):.2f}" if seconds else "-",
        share("solved", ".0%", "given"),
        *counts,
        most("deviation"),
        share("tokens", ".4f"),
        share("optimum", ".4f"),
        most("shortfall"),
    ]


STANDARD = (
    *((10, n) for n in (2, 3, 4, 5)),
    *((100, n) for n in (2, 3)),
    (1000, 2),
    *((32_000, n) for n in (2, 3, 4)),
)
"""The sizes (V, n) of random nodes measured by default."""


def random_settings(
    solvers: Sequence[Solver], sizes: Sequence[tuple[int, int]], widths: Sequence[int | None]
) -> tuple[Setting, ...]:
    """Return every solver at every size (V, n) with every width; None, or above V, keeps all."""
    for vocab, drafts in sizes:
        require_integer("vocab", vocab, 2, 1 << 20)
        require_integer("drafts", drafts, 2, 16)
    kept = [(v, n, v if w is None else min(v, w)) for v, n in sizes for w in widths]
    return tuple(
        Setting(
            plan=Plan(verifier=solver, paths=n, depth=1, draft_width=width),
            context=vocab,
        )
        for vocab, n, width in dict.fromkeys(kept)
        for solver in solvers
    )
