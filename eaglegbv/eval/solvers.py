"""Comparison of the solvers of optimal transport at a node of independent drafts.

Distributions are random (docs/inside/solvers.md). Every solver gets the two distributions on the
draft's support and n drafts, and selects one of the drafts. The measured time is the process's
processor time, so that other users of the machine do not count.

The distribution of what a node commits is computed from what the solver does, not from what it aims
at: from the distribution of its selection (for the exact solver, from its relabelling of drafts),
the acceptance that its own distribution b prescribes, and the residual.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median
from time import process_time
from typing import TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.node_acceptance import NodeProbs, optimum_iid
from eaglegbv.utils import require_integer, require_integers
from eaglegbv.verifiers.global_resolution import TOLERANCE, Solver, solve
from eaglegbv.verifiers.spectr import k_seq
from eaglegbv.verifiers.transport import RankedProbs, Transport, labels, transport

Floats: TypeAlias = NDArray[np.float64]

STANDARD = (
    *((10, n) for n in (2, 3, 4, 5)),
    *((100, n) for n in (2, 3)),
    (1000, 2),
    *((32_000, n) for n in (2, 3, 4)),
)
"""The sizes (V, n) measured by default."""

WIDTH = 64  # number of tokens that a top-k draft distribution keeps
SPREAD, NOISE = 0.85, 0.8


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Size of a node.

    Raises:
        InvalidArgument: A value is out of range.
    """

    vocab: int  # number of tokens, V
    drafts: int  # number of drafts, n
    width: int  # number of most likely tokens that the draft distribution keeps

    def __post_init__(self) -> None:
        require_integers(self, vocab=(2, 1 << 20), drafts=(2, 16), width=(1, self.vocab))


class Row(Setting, frozen=True, kw_only=True):
    """Results of one solver on the nodes of one size; those that it refused have no figures."""

    solver: str
    instances: int
    # Median milliseconds of processor time from the two distributions and the drafts to the
    # selected draft.
    median_ms: float | None
    success: float  # share of the nodes solved in time and within the tolerance
    refused: int  # number of nodes that were too large for the solver; they count in `success`
    # Number of nodes at which the solver's loss of acceptance was above the tolerance, so that
    # K-SEQ took its place.
    fallbacks: int
    late: int  # number of nodes that took longer than the time limit
    deviation: float | None  # largest L1 distance of the committed distribution from the target's
    acceptance: float | None  # mean acceptance probability
    optimum: float | None  # mean of alpha* over the same nodes
    # Largest bound on the lost acceptance that a solver gave without falling back.
    shortfall: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison; see :func:`compare`."""

    seed: int
    time_limit_ms: float
    tolerance: float
    rows: tuple[Row, ...]


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


def settings_of(
    sizes: Iterable[tuple[int, int]] = STANDARD, widths: Sequence[int | None] = (None, WIDTH)
) -> list[Setting]:
    """Return every size (V, n) with every width, each once; None, or more than V, keeps all."""
    wanted = [(v, n, v if w is None else min(v, w)) for v, n in sizes for w in widths]
    return [Setting(vocab=v, drafts=n, width=w) for v, n, w in dict.fromkeys(wanted)]


def compare(
    settings: Sequence[Setting],
    solvers: Sequence[Solver] = tuple(Solver),
    *,
    instances: int = 10,
    seed: int = 0,
    time_limit: float = 1.0,
    tolerance: float = TOLERANCE,
    on_row: Callable[[Row], object] = lambda _: None,
) -> Report:
    """Give the same nodes to every solver, and return the results.

    A node counts as not solved above ``time_limit`` seconds of processor time (nothing is
    interrupted), or if its loss of acceptance is above ``tolerance``.

    Raises:
        InvalidArgument: ``instances`` or ``time_limit`` is not positive.
    """
    require_integer("instances", instances, 1)
    if not time_limit > 0:
        raise InvalidArgument("time_limit", time_limit, "a positive number")
    rows = []
    for setting, solver in product(settings, solvers):
        given = list(nodes(setting, instances, seed))
        answered = solve_all(solver, given, tolerance=tolerance)
        answers = [(node, a) for node, a in zip(given, answered, strict=True) if a is not None]
        bounds = [a.shortfall for _, a in answers if a.shortfall is not None]
        solved = [a for _, a in answers if a.shortfall is not None and a.seconds <= time_limit]
        seconds = [a.seconds for _, a in answers]
        row = Row(
            **msgspec.structs.asdict(setting),
            solver=str(solver),
            instances=instances,
            median_ms=1e3 * median(seconds) if answers else None,
            success=len(solved) / instances,
            refused=instances - len(answers),
            fallbacks=len(answers) - len(bounds),
            late=sum(one > time_limit for one in seconds),
            deviation=max(a.deviation(node) for node, a in answers) if answers else None,
            acceptance=fmean(a.acceptance for _, a in answers) if answers else None,
            optimum=fmean(optimal_acceptance(node) for node, _ in answers) if answers else None,
            shortfall=max(bounds, default=None),
        )
        rows.append(row)
        on_row(row)
    return Report(seed=seed, time_limit_ms=1e3 * time_limit, tolerance=tolerance, rows=tuple(rows))


def nodes(setting: Setting, instances: int, seed: int) -> Iterator[Node]:
    """Return random nodes; the same arguments give the same nodes."""
    for number in range(instances):
        key = (seed, setting.vocab, setting.drafts, setting.width, number)
        rng = np.random.default_rng(key)
        logits = SPREAD * np.sqrt(2 * np.log(setting.vocab)) * rng.standard_normal(setting.vocab)
        noisy = logits + NOISE * rng.standard_normal(setting.vocab)
        ids = np.sort(np.argsort(-noisy, kind="stable")[: setting.width])
        draft = softmax(noisy[ids])
        yield Node(
            target=softmax(logits),
            ids=ids,
            draft=draft,
            drawn=rng.choice(setting.width, size=setting.drafts, p=draft),
            uniforms=rng.random((setting.drafts, 2)),
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
