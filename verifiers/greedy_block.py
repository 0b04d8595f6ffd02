"""Greedy block verification (Sun et al., ICLR 2025, Algorithms 4 to 6)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers.base import NodeFigures, Verdict, along_path, at_children
from eaglegbv.verifiers.block import longest_passed
from eaglegbv.verifiers.paths import (
    DraftedPath,
    Residual,
    draw_residual,
    pick_record,
    place_of,
    rows_at,
)
from eaglegbv.verifiers.proof.chooser import (
    Chooser,
    Number,
    Prefix,
    Probs,
    accepts,
    residual,
    residual_or_target,
)
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.stateful import (
    MOST_RHO,
    Debts,
    Layer,
    Layers,
    ModifiedNode,
    ModifiedTarget,
    Shifted,
    ShiftedStop,
    StatefulUniforms,
    StatefulVerdict,
    StatefulVerifier,
    committing_draw,
    drafts_on,
    entering_draw,
    rho_after,
)
from eaglegbv.verifiers.transport import (
    Drafts,
    RankedProbs,
    Transport,
    draw_multiplicity,
    labels,
    transport,
)


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
        target: M, its distribution.
        dist: b, the distribution of the child that was selected.
        drafts: n, the drafts in play.
    """

    state: ModifiedTarget
    target: Probs
    dist: Probs
    drafts: int


def greedy_block(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
    """Verify the tree's one path greedily, given the debts of earlier steps."""
    (path,) = tree.paths
    visits: list[Visit] = []
    state = target
    for depth, x in enumerate(path):
        p = tree.target_probs(path[:depth])
        visits.append(Visit(state, state.dist(p), tree.draft_probs(path[:depth]), 1))
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
    sum (b - rho_i M)+), h_L = min(1, rho_L); the correction token has the distribution (rho_tau M - b)+.
    """
    rho: list[Number] = [1]
    for visit, x in zip(visits, path, strict=True):
        # b = 0 marks a draft the distribution cannot produce: it happens by rounding only.
        factor = visit.target[x] / visit.dist[x] if visit.dist[x] > 0 else 1
        rho.append(rho[-1] * factor)
    for i in range(len(path), 0, -1):
        h = min(1, rho[i]) if i == len(path) else _acceptance(rho[i], visits[i])
        if accepts(chooser, h, Purpose.ACCEPTANCE, i - 1):
            return _commit(tree, path, visits, leaf, rho[i], i, chooser)
    return _commit(tree, path, visits, leaf, 1, 0, chooser)


def _acceptance(rho: Number, visit: Visit) -> Number:
    gain = sum(residual(rho, visit.target, visit.dist))
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
    p = tree.target_probs(path[:tau])
    draw = committing_draw(chooser)
    if tau == len(path):
        token = chooser.choose(leaf.dist(p), Purpose.CORRECTION, 0)
        return Step(Outcome(path, token), leaf.entered(p, token, draw))
    visit = visits[tau]
    weights = residual_or_target(rho, visit.target, visit.dist)
    token = chooser.choose(weights, Purpose.CORRECTION, 0)
    state = visit.state.entered(p, token, draw)
    count = len(visit.state.layers)
    layer = _new_layer(tree, visit, path[:tau], token, rho, lambda dist: draw(count, dist))
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
    if remaining == 0 or tree.stop((*prefix, token)) or not visit.dist[token] > 0:
        return None
    root = len(visit.state.context) - len(prefix)
    return Layer(
        rho=rho * visit.target[token] / visit.dist[token],
        drafts=drafts_on(visit.target, tree.draft_probs(prefix), visit.drafts, token, draw),
        remaining=remaining,
        draft_probs=Shifted(tree.draft_probs, root),
        stop=ShiftedStop(tree.stop, root),
    )


# Greedy block verification of a path selected for the modified target.
#
# Sun et al., Block Verification, ICLR 2025 (2403.10444), Algorithms 4 to 6, for paths selected by
# exact optimal transport among several.


@dataclass(frozen=True, slots=True)
class BatchVisit:
    """A node on the way down, one per request.

    Attributes:
        node: ``[batch]`` int64.
        modified: The modified target there; its ``probs`` are M at the node's draft ids.
        ranked: ``[batch, width]``: M and q there, ranked.
        plan: ``[batch, width]``: b, the distribution of the child selected.
        drafts: ``[batch]`` int64, n, the drafts in play; 0 at a leaf.
    """

    node: Tensor
    modified: ModifiedNode
    ranked: RankedProbs
    plan: Transport
    drafts: Tensor


@dataclass(frozen=True, slots=True)
class Descent:
    """The nodes visited, root first, and the ranks of the tokens that lead on.

    Attributes:
        visits: length + 1 visits; those after a path's end mean nothing.
        chosen: length ranks, ``[batch]`` int64 each.
        lengths: ``[batch]`` int64, length of the path selected.
    """

    visits: Sequence[BatchVisit]
    chosen: Sequence[Tensor]
    lengths: Tensor


def verify_greedily(
    tree: DraftTree, target: TargetProbs, uniforms: StatefulUniforms, debts: Debts
) -> StatefulVerdict:
    """Select a path for the modified target, keep its longest accepted prefix, and settle up.

    ``rho_i`` is the product of M/b without the minimum of block verification;
    ``h_i = min(1, sum (rho_i M - b)+ / sum (b - rho_i M)+)`` and ``h_L = min(1, rho_L)``.
    """
    descent = _descend(tree, target, uniforms, debts)
    rho, accepted = torch.ones_like(uniforms.plain.correction), torch.zeros_like(descent.lengths)
    figures: Callable[[], NodeFigures] = dict
    if tree.length > 0:
        path = _path(descent)
        products = path.ratios().clamp(max=MOST_RHO).cumprod(dim=1).clamp(max=MOST_RHO)
        products = torch.cat((rho.unsqueeze(1), products), dim=1)
        chances = _chances(path, products)
        accepted = longest_passed(chances, path.lengths, uniforms.plain.acceptance)
        rho = products.gather(1, accepted.unsqueeze(1)).squeeze(1)
        figures = partial(_figures, tree, path, products, chances)
    stop: BatchVisit = pick_record(descent.visits, accepted)
    bonus = accepted == descent.lengths
    token_ids = _last_token(stop, rho, bonus, target, uniforms.plain.correction)
    verdict = Verdict(
        path_nodes=torch.stack([v.node for v in descent.visits], dim=1)[:, 1:],
        accepted=accepted,
        token_ids=token_ids,
    )
    new = torch.where(bonus, 0, tree.length - accepted - 1)
    layers = _settle(stop, rho, token_ids, new, uniforms.leaving, tree.paths)
    return StatefulVerdict(verdict, layers, figures)


def _figures(tree: DraftTree, path: DraftedPath, products: Tensor, chances: Tensor) -> NodeFigures:
    """Return the modified target M and the distribution b at the path's nodes and beside it, rho and h."""
    return {
        "M": at_children(tree, path, path.target),
        "b": at_children(tree, path, path.draft),
        "rho": along_path(tree, path, products[:, 1:]),
        "h": along_path(tree, path, chances.clamp(max=1.0)),
    }


def _descend(
    tree: DraftTree, target: TargetProbs, uniforms: StatefulUniforms, debts: Debts
) -> Descent:
    node, lengths = torch.zeros_like(tree.num_nodes), torch.zeros_like(tree.num_nodes)
    layers, tokens = debts.layers, tree.token_ids[:, :0]
    alive = torch.ones_like(tree.path_lengths, dtype=torch.bool)
    visits, chosen = [], []
    for depth in range(tree.length + 1):
        alive = alive & (tree.path_lengths > depth)
        ids, q = _row_at(tree.draft_ids, node), _row_at(tree.draft_probs, node)
        modified = ModifiedNode.at(target, node, layers, debts.dists.after(tokens), ids)
        ranked = RankedProbs.of(ids, q, modified.probs)
        drafts = alive.sum(dim=1)
        visit = BatchVisit(node, modified, ranked, transport(ranked, drafts), drafts)
        visits.append(visit)
        if depth == tree.length:
            break
        child, rank = _select(tree, visit, depth, alive, uniforms.plain.selection[:, depth])
        chosen.append(rank)
        token = tree.token_ids.gather(1, child.unsqueeze(1))
        tokens = torch.cat((tokens, token), dim=1)
        layers = modified.entered(token.squeeze(1), uniforms.entering[:, depth])
        node = torch.where(drafts > 0, child, node)
        lengths = lengths + (drafts > 0)
        alive = alive & (tree.path_nodes[:, :, depth] == child.unsqueeze(1))
    return Descent(visits, chosen, lengths)


def _row_at(table: Tensor, node: Tensor) -> Tensor:
    """Return the rows of ``table`` at ``node``; trees without draft distributions get one empty column."""
    row = rows_at(table, node.unsqueeze(1)).squeeze(1)
    return row if row.shape[1] else torch.nn.functional.pad(row, (0, 1))


def _select(
    tree: DraftTree, visit: BatchVisit, depth: int, alive: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the child selected and the rank of its token, ``[batch]`` each."""
    children = tree.path_nodes[:, :, depth]
    tokens = tree.token_ids.gather(1, children)
    ranks = place_of(tokens, visit.ranked.ids.unsqueeze(1), visit.ranked.draft.unsqueeze(1))
    label = labels(
        RankedProbs(
            visit.ranked.ids.unsqueeze(1),
            visit.ranked.draft.unsqueeze(1),
            visit.ranked.target.unsqueeze(1),
        ),
        Transport(visit.plan.dist.unsqueeze(1), visit.plan.highest.unsqueeze(1)),
        Drafts(nodes=torch.zeros_like(ranks), ranks=ranks),
        uniforms,
    )
    # The highest label wins, the first drafted among equals.
    first = torch.arange(tree.paths - 1, -1, -1, device=label.device)
    winner = torch.where(alive, label * tree.paths + first, -1).argmax(dim=1, keepdim=True)
    return children.gather(1, winner).squeeze(1), ranks.gather(1, winner).squeeze(1)


def _path(descent: Descent) -> DraftedPath:
    inner = descent.visits[:-1]
    return DraftedPath(
        nodes=torch.stack([v.node for v in descent.visits], dim=1),
        lengths=descent.lengths,
        ids=torch.stack([v.ranked.ids for v in inner], dim=1),
        draft=torch.stack([v.plan.dist for v in inner], dim=1),
        target=torch.stack([v.ranked.target for v in inner], dim=1),
        chosen=torch.stack(tuple(descent.chosen), dim=1),
    )


def _chances(path: DraftedPath, products: Tensor) -> Tensor:
    """Return h_1 ... h_L, ``[batch, length]``, given rho_0 ... rho_L."""
    inner = products[:, 1:-1]
    scaled = inner.unsqueeze(2) * path.target[:, 1:]
    draft = path.draft[:, 1:]
    beside = (1 - path.target[:, 1:].sum(dim=2)).clamp(min=0)
    gain = (scaled - draft).clamp(min=0).sum(dim=2) + inner * beside
    loss = (draft - scaled).clamp(min=0).sum(dim=2)
    tests = torch.where(loss == 0, 1.0, gain / loss)  # so that NaN passes no test
    chances = torch.cat((tests, products[:, -1:]), dim=1)
    depths = torch.arange(1, chances.shape[1] + 1, device=chances.device)
    return torch.where(depths == path.lengths.unsqueeze(1), products[:, 1:], chances)


def _last_token(
    stop: BatchVisit, rho: Tensor, bonus: Tensor, target: TargetProbs, uniforms: Tensor
) -> Tensor:
    """Draw from (rho M - b)+ over the whole vocabulary; from M after a whole path."""
    residual = Residual(
        nodes=stop.node,
        weight=torch.where(bonus, 1.0, rho),
        ids=stop.ranked.ids,
        draft=stop.plan.dist.masked_fill(bonus.unsqueeze(1), 0.0),
    )
    return draw_residual(stop.modified.whole(target, stop.node), residual, uniforms)


def _settle(
    stop: BatchVisit, rho: Tensor, tokens: Tensor, new: Tensor, uniforms: Tensor, paths: int
) -> Layers:
    """Return the debts after the last token, the one of this step in the last column.

    Args:
        stop: The visit the step stopped at.
        rho: ``[batch]`` float64 there.
        tokens: ``[batch]`` int64, the last token.
        new: ``[batch]`` int64, how many tokens this step's debt would cover.
        uniforms: ``[batch, layers + 1]``.
        paths: Paths of the tree.
    """
    most = max(stop.modified.layers.most_drafts, paths)
    old = stop.modified.entered(tokens, uniforms)
    ranks = place_of(tokens, stop.ranked.ids, stop.ranked.draft).unsqueeze(1)
    found = stop.ranked.ids.gather(1, ranks).squeeze(1) == tokens
    b = torch.where(found, stop.plan.dist.gather(1, ranks).squeeze(1), 0.0)
    turn = stop.modified.active.sum(dim=1, keepdim=True)
    drafts = draw_multiplicity(
        stop.ranked,
        stop.plan,
        stop.drafts,
        ranks.squeeze(1),
        uniforms.gather(1, turn).squeeze(1),
        most,
    )
    lasts = (new > 0) & (b > 0)
    grown = rho_after(rho, stop.ranked.target.gather(1, ranks).squeeze(1), b)
    return Layers(
        rho=_joined(old.rho, torch.where(lasts, grown, 0.0)),
        drafts=_joined(old.drafts, torch.where(lasts, drafts, 1)),
        remaining=_joined(old.remaining, torch.where(lasts, new, 0)),
        most_drafts=most,
    )


def _joined(columns: Tensor, last: Tensor) -> Tensor:
    return torch.cat((columns, last.unsqueeze(1)), dim=1)


# Greedy block verification: a step accepts more, and the next ones pay it back.


class GreedyBlockVerifier(StatefulVerifier):
    """Test prefixes by the products of p/q without a minimum; the next tokens repay the surplus."""

    name: ClassVar[str] = "greedy_block"
    source: ClassVar[str] = "Sun et al., Block Verification, ICLR 2025 (2403.10444), Algorithms 4-6"
    cost: ClassVar[str] = "O(L^2 W^2) with full debts and one row of the vocabulary"
    draft_samplings: ClassVar[frozenset[DraftSampling]] = frozenset({DraftSampling.IID})
    max_paths: ClassVar[int | None] = 1

    def verify(
        self, tree: DraftTree, target: TargetProbs, uniforms: StatefulUniforms, debts: Debts
    ) -> StatefulVerdict:
        """Judge one path per request; the test of depth i uses acceptance number i - 1."""
        if tree.length > 0:
            self.check_sampling(tree.draft_sampling, tree.paths)
        return verify_greedily(tree, target, uniforms, debts)
