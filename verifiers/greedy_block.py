"""Greedy block verification (Sun et al., ICLR 2025, 2403.10444, Algorithms 4 to 6).

Prefixes are tested by the products of p/q without a minimum. A step accepts more, and the next ones
make up for it: they follow a modified target (:mod:`eaglegbv.verifiers.stateful`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from eaglegbv.config import DraftSampling
from eaglegbv.devices import entry_at
from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.base import NodeStats
from eaglegbv.verifiers.block import along_path, at_children, longest_passed, with_whole_paths
from eaglegbv.verifiers.otbv import select_child
from eaglegbv.verifiers.paths import DraftedPath, Residual, draw_residual, place_of, rows_at
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
    Layer,
    LayerProbs,
    Layers,
    ModifiedNode,
    ModifiedTarget,
    Shifted,
    StatefulUniforms,
    StatefulVerdict,
    StatefulVerifier,
    Step,
    committing_draw,
    drafts_on,
    entering_draw,
)
from eaglegbv.verifiers.transport import (
    RankedProbs,
    Transport,
    labels,
    transport,
)


@dataclass(frozen=True, slots=True)
class Visit:
    """An inner node of the path under test."""

    state: ModifiedTarget  # the modified target there
    target: Probs  # M, its distribution
    probs: Probs  # b, the distribution of the child that was selected
    drafts: int  # n, the drafts in play


def greedy_block(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
    """Verify a path greedily, given what earlier steps left: the only one, where b is q.

    Of several (:mod:`eaglegbv.verifiers.spectr_gbv`) one is selected for the modified target.
    """
    path: Prefix = ()
    visits: list[Visit] = []
    state = target
    while drafts := tree.drafts(path):
        p = tree.target_probs(path)
        M = state.probs(p)
        x, b = select_child(tree, path, M, chooser)
        visits.append(Visit(state, M, b, len(drafts)))
        state = state.entered(p, x, entering_draw(tree, chooser, len(path), len(target.layers)))
        path = (*path, x)
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
    sum (b - rho_i M)+), h_L = min(1, rho_L); the correction token follows (rho_tau M - b)+.
    """
    rho: list[Number] = [1]
    for visit, x in zip(visits, path, strict=True):
        # b = 0 marks a draft the distribution cannot produce: it happens by rounding only.
        factor = visit.target[x] / visit.probs[x] if visit.probs[x] > 0 else 1
        rho.append(rho[-1] * factor)
    tau = 0
    for i in range(len(path), 0, -1):
        h = min(1, rho[i])
        if i < len(path):
            gain = sum(residual(rho[i], visits[i].target, visits[i].probs))
            loss = gain + 1 - rho[i]  # sum (b - rho M)+, as M and b sum to 1
            h = min(1, gain / loss) if loss > 0 else 1
        if accepts(chooser, h, Purpose.ACCEPTANCE, i - 1):
            tau = i
            break
    p = tree.target_probs(path[:tau])
    draw = committing_draw(chooser)
    if tau == len(path):
        token = chooser.choose(leaf.probs(p), Purpose.CORRECTION, 0)
        return Step(Outcome(path, token), leaf.entered(p, token, draw))
    visit = visits[tau]
    weights = residual_or_target(rho[tau], visit.target, visit.probs)
    token = chooser.choose(weights, Purpose.CORRECTION, 0)
    after = visit.state.entered(p, token, draw)
    new = partial(draw, len(visit.state.layers))
    layer = _new_layer(tree, visit, path[:tau], token, rho[tau], new)
    layers = after.layers if layer is None else (*after.layers, layer)
    return Step(Outcome(path[:tau], token), replace(after, layers=layers))


def _new_layer(
    tree: ReferenceTree,
    visit: Visit,
    prefix: Prefix,
    token: int,
    rho: Number,
    draw: Callable[[Probs], int],
) -> Layer | None:
    """Return what a step leaves that stopped after ``prefix`` with the correction ``token``."""
    remaining = tree.length - len(prefix) - 1
    if remaining == 0 or tree.stop((*prefix, token)) or not visit.probs[token] > 0:
        return None
    root = len(visit.state.context) - len(prefix)
    return Layer(
        rho=rho * visit.target[token] / visit.probs[token],
        drafts=drafts_on(visit.target, tree.draft_probs(prefix), visit.drafts, token, draw),
        remaining=remaining,
        draft_probs=Shifted(tree.draft_probs, root),
        stop=Shifted(tree.stop, root),
    )


# The same for batches, for a path selected among several by exact optimal transport.
class GreedyBlockVerifier(StatefulVerifier):
    """Verify the only path. O(L^2 W^2) under as many layers as there can be, and one row."""

    name = "greedy_block"
    draft_samplings = frozenset({DraftSampling.IID})
    any_widths = frozenset()
    max_paths: ClassVar[int | None] = 1

    def verify(
        self,
        tree: DraftTree,
        target: TargetProbs,
        uniforms: StatefulUniforms,
        layers: Layers,
        layer_probs: LayerProbs,
    ) -> StatefulVerdict:
        """Select a path for the modified target, and keep its longest accepted prefix.

        Selection and tests use the numbers that otbv uses. ``rho_i`` is the product of M/b without
        the minimum of block verification; ``h_i = min(1, sum (rho_i M - b)+ / sum (b - rho_i M)+)``
        and ``h_L = min(1, rho_L)``.
        """
        plain = uniforms.plain
        rho = torch.ones_like(plain.correction)
        accepted = torch.zeros_like(tree.num_nodes)
        lengths = accepted
        stats: Callable[[], NodeStats] = dict
        if tree.length > 0:
            self.check_sampling(tree.draft_sampling, tree.drafts, columns=tree.columns)
        visits, chosen = _descend(tree, target, uniforms, layers, layer_probs)
        nodes = torch.stack([visit.node for visit in visits], dim=1)
        if tree.length > 0:
            path = _path(nodes, visits, chosen)
            lengths = path.lengths
            products = path.ratios().clamp(max=MOST_RHO).cumprod(dim=1).clamp(max=MOST_RHO)
            products = torch.cat((rho.unsqueeze(1), products), dim=1)
            chances = _chances(path, products)
            accepted = longest_passed(chances, lengths, plain.acceptance)
            rho = entry_at(products, accepted)
            stats = partial(_node_stats, tree, path, products, chances)
        stop: BatchVisit = _pick(visits, accepted)
        bonus = accepted == lengths
        # From (rho M - b)+ over the whole vocabulary; from M after a whole path.
        weight = torch.where(bonus, 1.0, rho)
        b = stop.plan.selected.masked_fill(bonus.unsqueeze(1), 0.0)
        M = stop.modified.whole(target, stop.node)
        residual = Residual(stop.node, weight, stop.plan.ids, b)
        token_ids = draw_residual(M, residual, plain.correction)
        new = torch.where(bonus, 0, tree.length - accepted - 1)
        left = _layers_after(stop, rho, token_ids, new, uniforms.leaving, tree.drafts)
        return StatefulVerdict(nodes[:, 1:], accepted, token_ids, left, stats)


@dataclass(frozen=True, slots=True)
class BatchVisit:
    """A node on the way down, one per request."""

    node: Tensor  # [batch] int64
    modified: ModifiedNode  # the modified target there; its ``probs`` are M at the node's draft ids
    # [batch, width]: M and q there, ranked, and b, the distribution of the child selected
    plan: Transport
    drafts: Tensor  # [batch] int64, n, the drafts in play; 0 at a leaf


def _descend(
    tree: DraftTree,
    target: TargetProbs,
    uniforms: StatefulUniforms,
    layers: Layers,
    layer_probs: LayerProbs,
) -> tuple[list[BatchVisit], list[Tensor]]:
    """Return length + 1 visits, root first, and the ranks ``[batch]`` of the tokens that lead on.

    What comes after a path's end means nothing.
    """
    node = torch.zeros_like(tree.num_nodes)
    tokens = tree.token_ids[:, :0]
    none = node.new_zeros((tree.batch, tree.drafts))
    alive = torch.ones_like(none, dtype=torch.bool)
    visits = []
    chosen = []
    for depth in range(tree.length + 1):
        draws = none if depth == tree.length else tree.draws[:, depth]
        alive = alive & (draws > 0)
        ids = _row_at(tree.draft_ids, node)
        q = _row_at(tree.draft_probs, node)
        modified = ModifiedNode.at(target, node, layers, layer_probs.after(tokens), ids)
        drafts = alive.sum(dim=1)
        plan = transport(RankedProbs.of(ids, q, modified.probs), drafts)
        visits.append(BatchVisit(node, modified, plan, drafts))
        if depth == tree.length:
            break
        child, rank = _select(tree, plan, draws, alive, uniforms.plain.selection[:, depth])
        chosen.append(rank)
        token = tree.token_ids.gather(1, child.unsqueeze(1))
        tokens = torch.cat((tokens, token), dim=1)
        layers = modified.entered(token.squeeze(1), uniforms.entering[:, depth])
        node = torch.where(drafts > 0, child, node)
        alive = alive & (draws == child.unsqueeze(1))
    return visits, chosen


def _row_at(table: Tensor, node: Tensor) -> Tensor:
    """Return the rows of ``table`` at ``node``; trees without draft lists get one empty column."""
    row = rows_at(table, node.unsqueeze(1)).squeeze(1)
    return row if row.shape[1] else pad(row, (0, 1))


def _select(
    tree: DraftTree, plan: Transport, children: Tensor, alive: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the child selected and the rank of its token, ``[batch]`` each."""
    tokens = tree.token_ids.gather(1, children)
    one = plan.mapped(lambda tensor: tensor.unsqueeze(1))
    ranks = place_of(tokens, one.ids, one.draft)
    label = labels(one, torch.zeros_like(ranks), ranks, uniforms)
    # The highest label wins, the first drafted among equals.
    first = torch.arange(tree.drafts - 1, -1, -1, device=label.device)
    winner = torch.where(alive, label * tree.drafts + first, -1).argmax(dim=1)
    return entry_at(children, winner), entry_at(ranks, winner)


def _path(nodes: Tensor, visits: Sequence[BatchVisit], chosen: Sequence[Tensor]) -> DraftedPath:
    inner = [visit.plan for visit in visits[:-1]]
    return DraftedPath(
        nodes=nodes,
        lengths=torch.stack([visit.drafts > 0 for visit in visits[:-1]], dim=1).sum(dim=1),
        ids=torch.stack([plan.ids for plan in inner], dim=1),
        draft=torch.stack([plan.selected for plan in inner], dim=1),
        target=torch.stack([plan.target for plan in inner], dim=1),
        chosen=torch.stack(tuple(chosen), dim=1),
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
    return with_whole_paths(tests, path, products)


def _node_stats(tree: DraftTree, path: DraftedPath, products: Tensor, chances: Tensor) -> NodeStats:
    """Return M and b at the path's nodes and beside it, rho and h along it."""
    return {
        "M": at_children(tree, path, path.target),
        "b": at_children(tree, path, path.draft),
        "rho": along_path(tree, path, products[:, 1:]),
        "h": along_path(tree, path, chances.clamp(max=1.0)),
    }


def _pick(values: Sequence[Any], numbers: Tensor) -> Any:  # noqa: ANN401
    """Return, for request b, what ``values[numbers[b]]`` holds for it.

    ``values`` are tensors ``[batch, ...]`` of equal shapes, dataclasses of such, or all equal.
    """
    first = values[0]
    if isinstance(first, Tensor):
        stacked = torch.stack(tuple(values), dim=1)
        at = numbers.view(-1, *(1,) * (stacked.dim() - 1))
        return stacked.gather(1, at.expand(-1, 1, *stacked.shape[2:])).squeeze(1)
    if not is_dataclass(first) or isinstance(first, type):
        return first
    columns = {f.name: [getattr(value, f.name) for value in values] for f in fields(first)}
    return type(first)(**{name: _pick(parts, numbers) for name, parts in columns.items()})


def _layers_after(
    stop: BatchVisit, rho: Tensor, tokens: Tensor, new: Tensor, uniforms: Tensor, paths: int
) -> Layers:
    """Return the layers after the last ``tokens`` ``[batch]``, that of this step as the last.

    ``new`` ``[batch]`` int64 is how many tokens this step's layer would cover, ``rho`` the factor
    at the stop; ``uniforms`` is ``[batch, layers + 1]``.
    """
    layers = stop.modified.layers
    together = Layers(
        rho=_joined(layers.rho, rho),
        drafts=_joined(layers.drafts, stop.drafts),
        remaining=_joined(layers.remaining, new + 1),
        most_drafts=max(layers.most_drafts, paths),
    )
    columns = zip(stop.modified.plan.tensors.values(), stop.plan.tensors.values(), strict=True)
    plan = Transport(*(_joined(*column) for column in columns))
    return replace(stop.modified, layers=together, plan=plan).entered(tokens, uniforms)


def _joined(columns: Tensor, last: Tensor) -> Tensor:
    """Join ``[batch, layers, ...]`` and one more column; lists are padded to the wider ones."""
    last = last.unsqueeze(1)
    if last.dim() > 2:
        width = max(columns.shape[2], last.shape[2])
        columns = pad(columns, (0, width - columns.shape[2]))
        last = pad(last, (0, width - last.shape[2]))
    return torch.cat((columns, last), dim=1)
