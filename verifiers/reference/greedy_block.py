"""Greedy block verification (Sun et al., ICLR 2025, Algorithms 4 to 6)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eaglegbv.uniforms import Purpose
from eaglegbv.verifiers.reference.chooser import Chooser, accepts
from eaglegbv.verifiers.reference.modified_target import (
    Layer,
    ModifiedTarget,
    Shifted,
    ShiftedStop,
    committing_draw,
    drafts_on,
    entering_draw,
)
from eaglegbv.verifiers.reference.probs import Number, Prefix, Probs, residual, residual_or_target
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree


@dataclass(frozen=True, slots=True)
class Step:
    """What a verification with state commits, and the target that follows."""

    outcome: Outcome
    target: ModifiedTarget


@dataclass(frozen=True, slots=True)
class Visit:
    """An inner node of the path under test.

    Attributes:
        state: The modified target there.
        target: M, its law.
        law: b, the law of the child that was selected.
        drafts: n, the drafts in play.
    """

    state: ModifiedTarget
    target: Probs
    law: Probs
    drafts: int


def greedy_block(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
    """Verify the tree's one path greedily, given the debts of earlier steps."""
    (path,) = tree.paths
    visits: list[Visit] = []
    state = target
    for depth, x in enumerate(path):
        p = tree.target_law(path[:depth])
        visits.append(Visit(state, state.law(p), tree.draft_law(path[:depth]), 1))
        state = state.entered(p, x, entering_draw(tree, chooser, depth, len(target.layers)))
    return greedy_verification(tree, path, visits, state, chooser)


def greedy_verification(
    tree: ReferenceTree,
    path: Prefix,
    visits: Sequence[Visit],
    leaf: ModifiedTarget,
    chooser: Chooser,
) -> Step:
    """Keep the longest accepted prefix of ``path``.

    rho_i is the product of M/b without the minimum; h_i = min(1, sum (rho_i M - b)+ /
    sum (b - rho_i M)+), h_L = min(1, rho_L); the correction token has the law (rho_tau M - b)+.
    """
    rho: list[Number] = [1]
    for visit, x in zip(visits, path, strict=True):
        # b = 0 marks a draft the law cannot produce: it happens by rounding only.
        factor = visit.target[x] / visit.law[x] if visit.law[x] > 0 else 1
        rho.append(rho[-1] * factor)
    for i in range(len(path), 0, -1):
        h = min(1, rho[i]) if i == len(path) else _acceptance(rho[i], visits[i])
        if accepts(chooser, h, Purpose.ACCEPTANCE, i - 1):
            return _commit(tree, path, visits, leaf, rho[i], i, chooser)
    return _commit(tree, path, visits, leaf, 1, 0, chooser)


def _acceptance(rho: Number, visit: Visit) -> Number:
    gain = sum(residual(rho, visit.target, visit.law))
    loss = gain + 1 - rho  # sum (b - rho M)+, as M and b sum to 1
    return min(1, gain / loss) if loss > 0 else 1


def _commit(
    tree: ReferenceTree,
    path: Prefix,
    visits: Sequence[Visit],
    leaf: ModifiedTarget,
    rho: Number,
    tau: int,
    chooser: Chooser,
) -> Step:
    p = tree.target_law(path[:tau])
    draw = committing_draw(chooser)
    if tau == len(path):
        token = chooser.choose(leaf.law(p), Purpose.CORRECTION, 0)
        return Step(Outcome(path, token), leaf.entered(p, token, draw))
    visit = visits[tau]
    weights = residual_or_target(rho, visit.target, visit.law)
    token = chooser.choose(weights, Purpose.CORRECTION, 0)
    state = visit.state.entered(p, token, draw)
    count = len(visit.state.layers)
    layer = _new_layer(tree, visit, path[:tau], token, rho, lambda law: draw(count, law))
    layers = state.layers if layer is None else (*state.layers, layer)
    return Step(Outcome(path[:tau], token), ModifiedTarget(state.context, layers))


def _new_layer(
    tree: ReferenceTree,
    visit: Visit,
    prefix: Prefix,
    token: int,
    rho: Number,
    draw: Callable[[Probs], int],
) -> Layer | None:
    """Return the debt of a step that stopped after ``prefix`` with the correction ``token``."""
    remaining = tree.length - len(prefix) - 1
    if remaining == 0 or tree.stop((*prefix, token)) or not visit.law[token] > 0:
        return None
    root = len(visit.state.context) - len(prefix)
    return Layer(
        rho=rho * visit.target[token] / visit.law[token],
        drafts=drafts_on(visit.target, tree.draft_law(prefix), visit.drafts, token, draw),
        remaining=remaining,
        draft_law=Shifted(tree.draft_law, root),
        stop=ShiftedStop(tree.stop, root),
    )
