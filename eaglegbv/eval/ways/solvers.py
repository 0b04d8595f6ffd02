"""Solvers of optimal transport at a node of independent drafts, timed.

Every solver gets the two distributions on the draft's support and n drafts, and selects one of the
drafts. The measured time is the process's processor time, so that other users of the machine do not
count. What is committed at a node is computed from what a solver's plan does, not from what it aims
at: a plan is b, the probability with which each token is selected, and the token committed
otherwise is drawn from (p - b)+. A plan with b <= p is lossless whatever it loses of acceptance.
K-SEQ takes the place of a plan that loses more than the tolerance.

``published`` is Algorithm 1 of Thomas & Pal (arXiv 2511.15898). Let H be the prefix of the tokens
by p/q ascending that minimises P(H) - q(H)^n. Drafts with a token off H are *outer*, and one of
their tokens off H is selected; of *inner* drafts, all in H, one is selected or none. Weights
exp(a), one for each token of a truncated set T, decide:

- c is what outer drafts give to the tokens off H: consecutive differences of cumulative minima
  (Theorem 6.2 and Lemma 6.3). Then a minimises E[log sum exp(a)] - sum c a over the outer drafts
  (Theorem 6.4), where the sum is over their tokens in T;
- a minimises E[log(1 + sum exp(a))] - sum p a over the inner drafts (Theorem 6.5).

L-BFGS-B takes at most 25 iterations (Appendix K). A node is not solved where T would be above a
limit by n, or a gradient stays above the threshold; a token is then drawn from p. Both limits and
both tolerances are blank in the paper's text: those here are this project's. Because b may exceed p
by as much as the tolerance, what is committed deviates from p by as much: it is an approximation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import combinations
from math import comb, inf
from time import process_time
from typing import TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, minimize
from scipy.sparse import coo_array
from scipy.sparse.csgraph import maximum_flow
from scipy.special import softmax

from eaglegbv.config import Plan
from eaglegbv.eval.figures import Estimate, Figure, Sums
from eaglegbv.eval.observations import Observation
from eaglegbv.eval.settings import Setting
from eaglegbv.eval.tables import Cell, Column, counted, valued
from eaglegbv.eval.ways.nodes import NodeProbs, harvest, optimum_iid
from eaglegbv.eval.ways.places import Sampling, Text
from eaglegbv.loading import Pair
from eaglegbv.utils import require_integer, require_integers, require_number
from eaglegbv.verifiers.proof.chooser import Probs
from eaglegbv.verifiers.proof.lp import DraftSets, draft_sets_iid, transport_plan
from eaglegbv.verifiers.spectr import k_seq
from eaglegbv.verifiers.transport import RankedProbs, labels, transport

Floats: TypeAlias = NDArray[np.float64]
Edges: TypeAlias = Mapping[tuple[frozenset[int], int], float]
"""The mass that each set of different drafted tokens sends to each of its tokens."""

TOLERANCE = 1e-3  # loss of acceptance above which a solver counts as failed
UNITS = 1 << 30
SPREAD = 0.85  # of random nodes' logits
NOISE = 0.8
NODES = 10  # most nodes of a size that solvers get of a part of the texts


class Solver(StrEnum):
    """How the selection of a node is found."""

    EXACT = "exact"
    MAX_FLOW = "max_flow"
    OPTIMISED = "optimised_max_flow"  # outer and inner drafts apart (section 5.3)
    LP = "lp"
    LOOSER = "published_looser"
    TIGHTER = "published_tighter"


MOST_SETS: Mapping[Solver, int] = {
    Solver.LP: 1000,
    Solver.MAX_FLOW: 6000,
    Solver.OPTIMISED: 6000,
}
"""Draft sets that solvers take at most: programs are dense, and flows list all edges."""

EPSILONS: Mapping[Solver, float] = {Solver.LOOSER: 1e-1, Solver.TIGHTER: 1e-2}
"""The tolerances of the published algorithm, L1."""

MOST_TOKENS: Mapping[int, int] = {2: 64, 3: 28, 4: 18, 5: 14}
"""The published algorithm's limits on T, by n; for more drafts that of 5."""

ITERATIONS = 25
FAR = 50.0  # bound on |a|, which keeps exp(a) finite


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
    # Acceptance lost against the optimum; None where the solver failed.
    shortfall: float | None

    @property
    def acceptance(self) -> float:
        """The probability that a draft is accepted."""
        return float(self.accepted.sum())

    def deviation(self, node: Node) -> float:
        """Return the L1 distance of the committed distribution from the target's."""
        rest = self.residual if self.residual.sum() > 0 else node.target
        committed = max(0.0, 1 - self.acceptance) * rest / rest.sum()
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
    if solver in EPSILONS:
        solve: Callable[[Node], Answer | None] = partial(published, epsilon=EPSILONS[solver])
    elif solver is Solver.EXACT:
        solve = exact
    else:
        solve = partial(planned, solver=solver, tolerance=tolerance)
    solve(given[0])
    return [solve(node) for node in given]


def optimal_acceptance(node: Node) -> float:
    """Return alpha* for the node's number of drafts."""
    columns = (node.ids, node.draft, node.wanted)
    nodes = NodeProbs(*(torch.from_numpy(column).unsqueeze(0) for column in columns))
    return optimum_iid(nodes, len(node.drawn)).item()


def _answer(node: Node, seconds: float, b: Floats, *, failed: bool = False) -> Answer:
    """Return the answer of a solver that selects tokens with probabilities b."""
    residual = node.target.copy()
    residual[node.ids] = np.maximum(node.wanted - b, 0.0)
    lost = max(0.0, optimal_acceptance(node) - float(b.sum()))
    return Answer(seconds, b, residual, None if failed else lost)


def exact(node: Node) -> Answer:
    """Select by the exact transport, as the batched verifiers do."""
    start = process_time()
    columns = (node.ids, node.draft, node.wanted)
    ranked = RankedProbs.of(*(torch.from_numpy(column).view(1, 1, -1) for column in columns))
    plan = transport(ranked, torch.tensor([[len(node.drawn)]]))
    tokens = torch.from_numpy(node.ids[node.drawn])
    ranks = (ranked.ids.view(-1, 1) == tokens).to(torch.int64).argmax(dim=0).view(1, -1)
    uniforms = torch.from_numpy(node.uniforms).unsqueeze(0)
    int(labels(plan, torch.zeros_like(ranks), ranks, uniforms).argmax())
    seconds = process_time() - start
    b = np.zeros(len(node.ids))
    b[np.searchsorted(node.ids, ranked.ids.numpy().ravel())] = plan.selected.numpy().ravel()
    return _answer(node, seconds, np.minimum(b, node.wanted))


def planned(node: Node, solver: Solver, tolerance: float) -> Answer | None:
    """Select by a plan, or by K-SEQ if the plan loses too much; None if the node is too big.

    The optimised flow has a network for inner drafts and one for outer ones, in which their tokens
    off H alone count. Where a network is one, H is empty.
    """
    start = process_time()
    n = len(node.drawn)
    if count_draft_sets(len(node.ids), n) > MOST_SETS[solver]:
        return None
    send = transport_plan if solver is Solver.LP else _flow
    p = tuple(node.wanted.tolist())
    drawn = frozenset(node.drawn.tolist())
    low: frozenset[int] = frozenset()
    if solver is Solver.OPTIMISED:
        low = frozenset(np.flatnonzero(_sides(node)[0]).tolist())
    networks: dict[bool, dict[frozenset[int], float]] = {}
    for tokens, mass in draft_sets_iid(tuple(node.draft.tolist()), n).items():
        eligible = tokens - low or tokens
        network = networks.setdefault(tokens <= low, {})
        network[eligible] = network.get(eligible, 0.0) + float(mass)
    edges: Edges = send(p, networks.pop(drawn <= low))
    eligible = drawn - low or drawn
    chances = np.array([edges.get((eligible, token), 0.0) for token in sorted(eligible)])
    int(np.searchsorted(chances.cumsum(), node.uniforms[0, 0] * chances.sum()))
    seconds = process_time() - start
    b = np.zeros(len(p))
    for sent in (edges, *(send(p, other) for other in networks.values())):
        for (_, token), mass in sent.items():
            b[token] += max(0.0, mass)
    answer = _answer(node, seconds, np.minimum(b, node.wanted))
    assert answer.shortfall is not None  # it did not fail
    return answer if answer.shortfall <= tolerance else _k_seq(node, start)


def count_draft_sets(width: int, drafts: int) -> int:
    """Return how many sets of different tokens ``drafts`` draws from ``width`` tokens can form."""
    return sum(comb(width, size) for size in range(1, drafts + 1))


def _k_seq(node: Node, start: float) -> Answer:
    """Accept the drafts in order with min(1, p / (rho q))."""
    p = torch.from_numpy(node.wanted).view(1, 1, -1)
    q = torch.from_numpy(node.draft).view(1, 1, -1)
    rho, served = k_seq(p, q, torch.tensor([[len(node.drawn)]]))
    chances = node.wanted[node.drawn] / (float(rho) * node.draft[node.drawn])
    np.argmax(node.uniforms[:, 0] < chances)
    return _answer(node, process_time() - start, served.numpy().ravel(), failed=True)


def _flow(p: Probs, sets: DraftSets) -> Edges:
    """Send integer units from the source through sets and tokens to the sink."""
    source = 0
    first = 1 + len(sets)
    sink = 1 + len(sets) + len(p)
    edges = [(source, 1 + i, int(float(mass) * UNITS)) for i, mass in enumerate(sets.values())]
    edges += [(1 + i, first + x, UNITS) for i, drawn in enumerate(sets) for x in sorted(drawn)]
    edges += [(first + x, sink, int(float(mass) * UNITS)) for x, mass in enumerate(p)]
    rows, columns, capacity = np.array(edges, dtype=np.int32).T
    graph = coo_array((capacity, (rows, columns)), shape=(sink + 1, sink + 1)).tocsr()
    flow = maximum_flow(graph, source, sink).flow.tocoo()
    names = list(sets)
    return {
        (names[row - 1], int(column) - first): float(units) / UNITS
        for row, column, units in zip(*flow.coords, flow.data, strict=True)
        if units > 0 and row != source and column != sink
    }


# The published algorithm.


def _sides(node: Node) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return H as a mask over ``node.ids``, and all tokens by p/q ascending."""
    with np.errstate(over="ignore"):  # ties by token id
        order = np.argsort(node.wanted / node.draft, kind="stable")
    excess = _excess(node, order)
    inner = np.zeros(len(order), dtype=np.bool_)
    inner[order[: int(excess.argmin())]] = True
    return inner, order


def _excess(node: Node, order: NDArray[np.int64]) -> Floats:
    """Return P(H) - q(H)^n of every prefix H, the empty one first."""
    p = node.wanted[order].cumsum()
    q = node.draft[order].cumsum()
    return np.concatenate(([0.0], p - q ** len(node.drawn)))


def published(node: Node, epsilon: float) -> Answer:
    """Select by Algorithm 1 of Thomas & Pal, within an L1 tolerance, or draw from p if it fails."""
    start = process_time()
    width = len(node.ids)
    inner, order = _sides(node)
    excess = _excess(node, order)
    # r of the tokens off H, along the order: differences of minima over longer prefixes.
    minima = np.minimum.accumulate(excess[::-1])[::-1]
    wanted = node.wanted.copy()
    wanted[order] -= np.where(inner[order], 0.0, np.maximum(np.diff(minima), 0.0))
    b = np.zeros(width)
    a = np.full(width, -inf)
    for side, slack in ((inner, 1.0), (~inner, 0.0)):
        known = 0.0 if slack else float(node.draft[inner].sum())
        solved = _solve_side(node, wanted, side, known, slack, epsilon / 2)
        if solved is None:
            return _answer(node, process_time() - start, np.zeros(width), failed=True)
        kept, a[kept], b[kept] = solved
    drawn = np.unique(node.drawn)
    outer = drawn[~inner[drawn]]
    weights = np.exp(a[outer if len(outer) else drawn])
    none = float(len(outer) == 0)
    int(np.searchsorted(weights.cumsum(), node.uniforms[0, 0] * (weights.sum() + none)))
    return _answer(node, process_time() - start, b)


Side: TypeAlias = tuple[NDArray[np.int64], Floats, Floats]
"""The tokens of T, a at them, and b."""


def _solve_side(
    node: Node, wanted: Floats, side: NDArray[np.bool_], known: float, slack: float, epsilon: float
) -> Side | None:
    """Return a solution for the drafts of one side, the rest of which are ``known`` of q.

    T is so large that the rest of ``wanted`` is at most half of the tolerance.
    """
    tokens = np.flatnonzero(side)
    n = len(node.drawn)
    tokens = tokens[np.argsort(-wanted[tokens], kind="stable")]
    left = wanted[tokens].sum() - wanted[tokens].cumsum()
    kept = tokens[: 1 + int((left > epsilon / 2).sum())]
    if len(kept) > MOST_TOKENS[min(n, max(MOST_TOKENS))]:
        return None
    if not len(kept):
        return kept, np.zeros(0), np.zeros(0)
    others = known + float(node.draft[side].sum() - node.draft[kept].sum())
    terms = list(_terms(node.draft[kept], others, n))

    def objective(a: Floats) -> tuple[float, Floats]:
        weights = np.exp(a)
        value = -float(wanted[kept] @ a)
        probs = np.zeros(len(a))
        for members, mass in terms:
            total = slack + weights[members].sum(axis=1)
            value += float(mass @ np.log(total))
            for column in members.T:
                probs += np.bincount(column, mass / total, len(a))
        return value, probs * weights - wanted[kept]

    result = minimize(
        objective,
        np.zeros(len(kept)),
        jac=True,
        method="L-BFGS-B",
        bounds=Bounds(-FAR, FAR),
        options={"maxiter": ITERATIONS, "gtol": epsilon / (2 * len(kept)), "ftol": 0.0},
    )
    gradient = objective(result.x)[1]
    if np.abs(gradient).sum() > epsilon / 2:
        return None
    return kept, result.x, gradient + wanted[kept]


def _terms(q: Floats, others: float, n: int) -> Iterator[tuple[NDArray[np.int64], Floats]]:
    """Yield sets of tokens ``[sets, size]`` with the chance that they, and others, are drawn.

    The chance that n drafts are exactly these tokens of T and any of the others follows from
    inclusion and exclusion.
    """
    for size in range(1, min(n, len(q)) + 1):
        members = np.array(list(combinations(range(len(q)), size)))
        chance = np.zeros(len(members))
        for part in range(size + 1):
            for subset in combinations(range(size), part):
                mass = q[members[:, list(subset)]].sum(axis=1) + others
                chance += (-1) ** (size - part) * mass**n
        yield members, np.maximum(chance, 0.0)


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
        q = probs.draft[place].numpy()
        p = probs.target[place].numpy()
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


class RandomNodes(msgspec.Struct, frozen=True, kw_only=True):
    """Random nodes of each size for solvers; the vocabulary is the setting's context.

    Attributes:
        instances: Number of random nodes of each size.
        time_limit: Milliseconds after which a solver fails; nothing is interrupted.
        seed: Seed of all random numbers.
    """

    instances: int = 10
    time_limit: float = 1000.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_integers(self, instances=(1, None))
        require_number("time_limit", self.time_limit, 0, inf, open_low=True)

    def measure(self, setting: Setting) -> list[Observation]:
        """Give a setting's solver its nodes."""
        plan = setting.plan
        vocab = setting.context
        given = random_nodes(vocab, plan.paths, plan.draft_width, self.instances, self.seed)
        return solved(setting, list(given), "node", self.time_limit / 1e3)


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
    late = answer.seconds > time_limit
    sums = {
        "given": 1.0,
        "steps": 1.0,
        "tokens": answer.acceptance,
        "seconds": answer.seconds,
        "deviation": answer.deviation(node),
        "optimum": optimal_acceptance(node),
        "late": float(late),
    }
    if answer.shortfall is None:
        return sums | {"fallbacks": 1.0}
    return sums | {"solved": float(not late), "shortfall": answer.shortfall}


def _most(part: str) -> Column:
    def cell(sums: Sums, setting: Setting) -> Cell:
        values = sums.column(setting.name, part)
        return f"{max(values):.1e}" if values else None

    return cell


def _median_milliseconds(sums: Sums, setting: Setting) -> Cell:
    seconds = sums.column(setting.name, "seconds")
    return Estimate.exactly(1e3 * float(np.median(seconds))) if seconds else None


SOLVED = Figure("solved", "solved", "given", scale=100, digits=0)
SOLVER_COLUMNS: Mapping[str, Column] = {
    "V": lambda _, setting: setting.context,
    "width": lambda _, setting: setting.plan.draft_width,
    "n": lambda _, setting: setting.plan.paths,
    "solver": lambda _, setting: setting.plan.verifier,
    "ms/token": _median_milliseconds,
    "success, %": valued(SOLVED),
    "too large": counted("refused"),
    "fall-backs": counted("fallbacks"),
    "late": counted("late"),
    "L1 deviation": _most("deviation"),
    "acceptance": valued(Figure("", "tokens", "steps", digits=4)),
    "optimum": valued(Figure("", "optimum", "steps", digits=4)),
    "bound": _most("shortfall"),
}
"""What a table shows of a setting of :class:`RandomNodes`."""


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
