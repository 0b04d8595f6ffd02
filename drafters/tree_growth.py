"""Draft trees, grown level by level in tensors of fixed sizes, for a batch on the host or a device.

A tree grows from a *frontier* of rows. The drafter computes a distribution for each row, the row's
node gets children by it, and some of the children are the next frontier:

    sampling         children of a row                              next frontier
    iid              K of the root, one of a path; drawn            all
    wor, greedy      K of the root, all different, and one below    all
    the same, widths widths[d] of each row of depth d               all
    hub              a pair: a drawn token and the most likely one  the K // 2 most likely
    fixed            the ``beam`` most likely tokens, in order      the ``beam`` most likely
    fixed, a shape   the ranks that the shape names                 those that the shape continues

K is the number of paths. A row stands for a draw, so a node has as many rows as drafts equal to it.
All children of a node are drawn at once, and whether a node goes on depends only on earlier draws,
not on its own children: that is what keeps verification lossless.

A request's tree has its own matrix of uniform numbers ``[K, L]``, K the most draws of a level;
column d draws the children of nodes of depth d. Which number a draw uses depends on what was drawn
before, never on its own outcome, and none is used twice.

Growing reads nothing on the host: rows that have ended continue as meaningless ones, and missing
nodes are padding. So a recorded loop (:mod:`eaglegbv.drafters.graph_drafting`) runs every row,
and :func:`draft_trees` asks a frontier which rows it has to run.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from eaglegbv.attention.base import Segment
from eaglegbv.compiling import EXAMPLE_WIDTH, compile_graph, making_graphs
from eaglegbv.config import Plan, Shape
from eaglegbv.devices import fetch, first_true, most_likely_first, send, upload
from eaglegbv.request import Request
from eaglegbv.rng import Purpose
from eaglegbv.sampling import SamplingParams, WarpSettings, warp
from eaglegbv.sampling_params import COLDEST, HOTTEST
from eaglegbv.token_rules import GrowingRows
from eaglegbv.tree import DraftSampling, DraftTree


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """Distributions of the next drafted token, one per row."""

    # [rows, width] int64 target token ids: the most likely ones, in an order that depends on the
    # row alone, or the whole draft vocabulary in its order.
    ids: Tensor
    # [rows, width] float64, normalised once; these very numbers are sampled from and passed to the
    # verifier.
    probs: Tensor


def draft_probs(
    logits: Tensor, settings: WarpSettings, *, width: int, draft_to_target: Tensor
) -> DraftProbs:
    """Keep the ``width`` most likely tokens of ``logits`` ``[rows, draft_vocab]``, warped.

    A vocabulary no larger is kept whole, and not sorted. ``settings`` have an entry per row;
    ``draft_to_target`` ``[draft_vocab]`` int64 is the target's id of each draft token.
    """
    if width >= logits.shape[1]:
        ids = draft_to_target.expand(logits.shape)
        return DraftProbs(ids, warp(logits, settings).softmax(dim=1, dtype=torch.float64))
    likely = _most_likely(logits, width)
    probs = warp(logits.gather(1, likely), settings).softmax(dim=1, dtype=torch.float64)
    return DraftProbs(draft_to_target.take(likely), probs)


def _most_likely(logits: Tensor, width: int) -> Tensor:
    """Return the places ``[rows, width]`` of each row's largest logits; NaN counts as largest.

    On a CPU a partition takes a third of the time of PyTorch's top-k.
    """
    if logits.device.type != "cpu":
        return logits.topk(width, dim=1).indices
    others = logits.shape[1] - width
    places = np.argpartition(logits.float().numpy(), others, axis=1)[:, others:]
    places.sort(axis=1)
    return torch.from_numpy(places)


def log_probs(logits: Tensor, *, width: int, draft_to_target: Tensor) -> DraftProbs:
    """Return the ``width`` best tokens with their log-probabilities (in ``probs``), untempered."""
    values, index = logits.float().log_softmax(dim=1).topk(min(width, logits.shape[1]), dim=1)
    return DraftProbs(draft_to_target[index], values.to(torch.float64))


def support(plan: Plan, draft_sampling: DraftSampling, vocab: int) -> int:
    """Return the number of candidates a row's distribution keeps of ``vocab`` draft tokens."""
    if draft_sampling is not DraftSampling.FIXED:
        return plan.list_width(vocab)
    if plan.shape:
        return min(1 + max(max(ranks) for ranks in plan.shape), vocab)
    return min(plan.fixed_beam, vocab)


def frontier_rows(plan: Plan, draft_sampling: DraftSampling) -> int:
    """Return the number of rows of a frontier below the root; not of trees of a given shape."""
    if draft_sampling is DraftSampling.FIXED:
        return plan.fixed_beam
    return plan.paths // 2 if draft_sampling is DraftSampling.HUB else plan.paths


def in_columns(plan: Plan, draft_sampling: DraftSampling) -> bool:
    """Return whether trees are K paths that fork at the root alone, each a column of draws."""
    return draft_sampling not in {DraftSampling.FIXED, DraftSampling.HUB} and not plan.widths


def most_draws(plan: Plan, draft_sampling: DraftSampling) -> int:
    """Return the most draws of a level of sampled trees."""
    if draft_sampling is DraftSampling.HUB:
        return 2 * max(1, plan.paths // 2)
    return max(plan.level_draws)


def draft_params(params: SamplingParams, plan: Plan) -> SamplingParams:
    """Return a request's own warping at the plan's draft temperature, a multiple of its own.

    It keeps within what logits can be divided by. Drafts may follow any distribution.
    """
    temperature = params.temperature * plan.draft_temperature
    kept = min(HOTTEST, max(COLDEST, temperature))
    return _warping(kept, params.top_k, params.top_p, params.min_p)


@lru_cache(maxsize=1024)
def _warping(temperature: float, top_k: int | None, top_p: float, min_p: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


@dataclass(frozen=True, slots=True)
class ProbsSettings:
    """What turns the logits of a step into its draft distributions."""

    params: SamplingParams  # the request's own warping at the plan's draft temperature
    width: int  # candidates kept

    @classmethod
    def of(cls, request: Request, vocab: int) -> Self:
        """Return the settings of a request's steps; ``vocab`` tokens can be drafted."""
        return cls(draft_params(request.params, request.plan), request.plan.list_width(vocab))


def replayed_probs(
    logits: Tensor, settings: Sequence[ProbsSettings], draft_to_target: Tensor
) -> DraftProbs:
    """Return distributions of rows of different steps, padded with probability 0 to the widest.

    ``logits`` are ``[rows, draft_vocab]``, each row with its step's settings; ``draft_to_target``
    is ``[draft_vocab]`` int64.
    """
    widest = max(s.width for s in settings)
    ids = logits.new_zeros((len(settings), widest), dtype=torch.int64)
    probs = torch.zeros_like(ids, dtype=torch.float64)
    for width in {s.width for s in settings}:
        rows = [i for i, s in enumerate(settings) if s.width == width]
        params = [settings[i].params for i in rows]
        warping = WarpSettings.of(params, [1] * len(rows), device=logits.device)
        own = draft_probs(logits[rows], warping, width=width, draft_to_target=draft_to_target)
        ids[rows, :width], probs[rows, :width] = own.ids, own.probs
    return DraftProbs(ids, probs)


# One level of drawn paths as a function of tensors: most of the work of a recorded loop.
#
# Plans affect only the sizes of tensors here, so one compiled function serves all of them.
# Compiling fuses some forty small kernels into a handful.

_LAST = 1 << 62  # sorts after every real key


class Rows(NamedTuple):
    """The rows of a frontier, or the children of one, of a batch of trees."""

    node: Tensor  # [batch, rows] int64, the node of each; its parent's for a child yet to be drawn
    leader: Tensor  # [batch, rows] int64, the first row of the frontier at the same node
    alive: Tensor  # [batch, rows] bool, False where there is no such row, or its path has ended
    nodes: Tensor  # [batch] int64, nodes of each tree

    @classmethod
    def at_root(cls, roots: Tensor) -> Self:
        """Return one row at the root of each tree; ``roots`` ``[batch]`` int64."""
        node = torch.zeros_like(roots).unsqueeze(1)
        alive = torch.ones_like(node, dtype=torch.bool)
        return cls(node, torch.zeros_like(node), alive, torch.ones_like(roots))

    def split(self, width: int) -> Self:
        """Return ``width`` children of each row, side by side."""
        if width == 1:
            return self
        node, leader, alive = (
            x.repeat_interleave(width, dim=1) for x in (self.node, self.leader, self.alive)
        )
        return self._replace(node=node, leader=leader, alive=alive)


class Children(NamedTuple):
    """What a level adds to a batch of trees."""

    rows: Rows  # the children as rows; all that were alive still are
    token_ids: Tensor  # [batch, children] int64
    leads: Tensor  # [batch, children] bool, True where a child is the first at a new node
    values: Tensor  # [batch, children] float64, their probabilities, or log-probabilities


DrawPaths: TypeAlias = Callable[[Rows, Tensor, Tensor, Tensor], Children]  # see `draw_paths`


def draw_paths(rows: Rows, ids: Tensor, probs: Tensor, uniforms: Tensor) -> Children:
    """Draw one token for each row from its leader's distribution; equal siblings share a node.

    Args:
        rows: The rows, at the parents.
        ids: ``[batch, frontier, width]`` int64, the tokens of the frontier's distributions.
        probs: ``[batch, frontier, width]`` float64, their probabilities.
        uniforms: ``[batch, rows]`` float64 in [0, 1), the numbers that draw the tokens.
    """
    at = rows.leader.unsqueeze(2).expand(-1, -1, ids.shape[2])
    ids, probs = ids.gather(1, at), probs.gather(1, at)
    places = pick_places(probs, uniforms).unsqueeze(2)
    tokens, values = ids.gather(2, places).squeeze(2), probs.gather(2, places).squeeze(2)
    alive, parent, count = rows.alive, rows.node, rows.node.shape[1]
    same = (parent.unsqueeze(2) == parent.unsqueeze(1)) & alive.unsqueeze(1)
    first = first_true(same & (tokens.unsqueeze(2) == tokens.unsqueeze(1)))
    numbers = torch.arange(count, device=parent.device)
    leads = alive & (first == numbers)
    # New nodes are numbered by their parents, then by their first rows.
    key = torch.where(leads, parent * count + numbers, _LAST)
    rank = (key.unsqueeze(1) < key.unsqueeze(2)).sum(dim=2)
    node = (rows.nodes.unsqueeze(1) + rank).gather(1, first)
    after = Rows(
        node=torch.where(alive, node, parent),
        leader=torch.where(alive, first, numbers),
        alive=alive,
        nodes=rows.nodes + leads.sum(dim=1),
    )
    return Children(after, tokens, leads, values)


def pick_places(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return the places that ``uniforms`` ``[...]`` select in ``probs`` ``[..., width]``.

    By inverse CDF; never a place of probability 0, whatever the rounding of a parallel sum, unless
    there is no other.
    """
    cumulative = probs.cumsum(dim=-1) * (probs > 0)
    total = cumulative.amax(dim=-1)
    threshold = uniforms * total
    limit = torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total)))
    return first_true(cumulative > limit.unsqueeze(-1))


_SIZES = (1, 1), (1, 3), (7, 1), (7, 3)
"""Numbers of trees and paths to make graphs from, which treat a size of 1 as a constant."""


@lru_cache(maxsize=8)
def compiled_draw_paths(backend: str | None, device: torch.device) -> DrawPaths:
    """Return :func:`draw_paths`, compiled now by a backend of ``torch.compile`` unless it is None.

    It is compiled once for all engines.

    Raises:
        InvalidArgument: There is no such backend.
    """
    if backend is None:
        return draw_paths
    compiled = compile_graph(draw_paths, backend)

    def draw(rows: Rows, ids: Tensor, probs: Tensor, uniforms: Tensor) -> Children:
        if ids.shape[2] == 1:  # nothing is drawn, and separate graphs would be needed
            return draw_paths(rows, ids, probs, uniforms)
        # Graphs are made for contiguous tensors of inference mode, as many of rows as of children.
        shape = (*uniforms.shape, ids.shape[2])
        if ids.shape != shape or not (ids.is_inference() and ids.is_contiguous()):
            ids = ids.expand(shape).clone(memory_format=torch.contiguous_format)
        found: Children = compiled(rows, ids, probs.expand(shape).contiguous(), uniforms)
        return found

    with torch.inference_mode(), making_graphs():
        for batch, count in _SIZES:
            ids = torch.arange(EXAMPLE_WIDTH, device=device).repeat(batch, count, 1)
            probs = torch.full_like(ids, 1 / EXAMPLE_WIDTH, dtype=torch.float64)
            uniforms = torch.zeros((batch, count), dtype=torch.float64, device=device)
            roots = torch.zeros(batch, dtype=torch.int64, device=device)
            draw(Rows.at_root(roots).split(count), ids, probs, uniforms)
    return draw


# The children of a node that are different tokens: ``[batch, rows, width]`` places in the rows'
# distributions, in draft order, and which of them there are.

Siblings: TypeAlias = tuple[Tensor, Tensor]


def _without_replacement(probs: Tensor, numbers: Tensor, kept: Sequence[Tensor]) -> Siblings:
    """Return the places ``kept`` (``[batch, rows]`` each), then places drawn from ``probs``.

    ``probs`` are ``[batch, rows, width]``; of ``numbers`` ``[batch, rows, children]`` float64, the
    first are used.
    """
    places, there = [], []
    for child in range(numbers.shape[2]):
        there.append((probs > 0).any(dim=2))
        drawn = child - len(kept)
        places.append(pick_places(probs, numbers[..., drawn]) if drawn >= 0 else kept[child])
        probs = probs.scatter(2, places[-1].unsqueeze(2), 0.0)
    return torch.stack(places, dim=2), torch.stack(there, dim=2)


def _hub_pairs(probs: Tensor, numbers: Tensor, hubs: Tensor, alive: Tensor) -> Siblings:
    """Return pairs: a drawn token and the hub; where that was drawn, it and one of the rest.

    A row of ``probs`` ``[batch, rows, width]`` uses one of its tree's ``numbers`` ``[batch, K]``,
    or two where its hub (``hubs`` ``[batch, rows]``) was drawn and there is a rest; the next row
    uses those that follow, and rows that are not ``alive`` use none.
    """
    rest = probs.scatter(2, hubs.unsqueeze(2), 0.0)
    more = (rest > 0).any(dim=2)
    used = torch.zeros_like(hubs[:, :1])
    places, there = [], []
    for row, hub in enumerate(hubs.unbind(1)):
        first = pick_places(probs[:, row], numbers.gather(1, used).squeeze(1))
        second = pick_places(rest[:, row], numbers.gather(1, used + 1).squeeze(1))
        again = first == hub
        places += [first, torch.where(again, second, hub)]
        there += [torch.ones_like(again), ~again | more[:, row]]
        used = used + (alive[:, row] * (1 + (again & more[:, row]))).unsqueeze(1)
    shape = (*hubs.shape, 2)
    return torch.stack(places, dim=1).view(shape), torch.stack(there, dim=1).view(shape)


@dataclass(frozen=True, slots=True)
class Frontier:
    """What the drafter continues: a fixed number of rows per request, some of them meaningless."""

    token_ids: Tensor  # [batch, rows] int64
    # [batch, rows] int64, the row of the previous frontier that each continues; None where each
    # continues the row of its own number, or the root.
    parents: Tensor | None
    leaders: Tensor  # [batch, rows] int64, the first row at the same node
    alive: Tensor  # [batch, rows] bool, whether the row goes on


class _Level(NamedTuple):
    """A level that has been grown: its frontier, distributions, and children with their scores."""

    rows: Rows
    probs: DraftProbs
    parents: Tensor
    children: Children
    scores: Tensor


class TreeGrowth:
    """The trees of a batch in the making. What a level adds is kept until the trees are finished.

    Paths of ``iid`` that begin alike share nodes, and go on independently; none is dropped because
    of a drawn token, a path only stops before one. Pairs of ``hub`` are SpecHub's (arXiv
    2411.05289). Of the nodes of a ``fixed`` tree without a shape, those with the largest product of
    draft probabilities are kept, as in EAGLE-2 (arXiv 2406.16858, section 4): a child's never
    exceeds its parent's, so they are a tree.
    """

    def __init__(
        self,
        plan: Plan,
        draft_sampling: DraftSampling,
        roots: Tensor,
        uniforms: Tensor | None,
        *,
        draw: DrawPaths = draw_paths,
    ) -> None:
        """Start trees at ``roots`` ``[batch]`` int64, token ids.

        ``uniforms`` ``[batch, paths, depth]`` float64 are each request's numbers, None for
        ``fixed``; ``draw`` is :func:`draw_paths`, compiled or not.
        """
        self._plan = plan
        self._sampling = draft_sampling
        self._roots = roots
        self._draw = draw
        self._fixed = draft_sampling is DraftSampling.FIXED
        self._numbers: Sequence[Tensor] = ()
        if uniforms is not None:  # each level's are contiguous, as graphs are made for strides
            by_level = uniforms.permute(2, 0, 1)
            self._numbers = by_level.clone(memory_format=torch.contiguous_format).unbind(0)
        floor = plan.min_confidence
        self._floor = (math.log(floor) if self._fixed else floor) if floor > 0 else None
        self._shape = _ShapeLevel.of(plan.shape) if self._fixed else []
        self._rows = Rows.at_root(roots)
        start = torch.zeros if self._fixed else torch.ones
        self._scores = start(self._rows.node.shape, dtype=torch.float64, device=roots.device)
        self._levels: list[_Level] = []

    def grow(self, probs: DraftProbs) -> Frontier:
        """Give the frontier children by its distributions; return the next one.

        They are ``[batch * rows, width]``, at first of the roots; log-probabilities, the best
        first, for ``fixed``.
        """
        batch, rows = self._rows.node.shape
        probs = DraftProbs(probs.ids.view(batch, rows, -1), probs.probs.view(batch, rows, -1))
        width = self._width(probs)
        parents = self._rows.split(width)
        if self._fixed or (width > 1 and self._sampling is not DraftSampling.IID):
            children = self._siblings(parents, probs)
        else:
            children = self._draw(parents, probs.ids, probs.probs, self._numbers_of(width))
        above = self._scores if width == 1 else self._scores.repeat_interleave(width, dim=1)
        scores = above + children.values if self._fixed else above * children.values
        self._levels.append(_Level(self._rows, probs, parents.node, children, scores))
        return self._advance(children, scores, width)

    def _width(self, probs: DraftProbs) -> int:
        """Return the number of children of each row, some of which there may not be."""
        if self._shape:
            return len(self._shape[len(self._levels)].ranks[0])
        if self._fixed:
            return probs.ids.shape[2]
        if self._sampling is DraftSampling.HUB:
            return 2
        if self._plan.widths:
            return self._plan.widths[len(self._levels)]
        return 1 if self._levels else self._plan.paths

    def _numbers_of(self, width: int) -> Tensor:
        """Return the numbers of children, in the order of rows; ended rows use none."""
        numbers, alive = self._numbers[len(self._levels)], self._rows.alive
        if self._sampling is DraftSampling.IID:
            return numbers[:, : alive.shape[1] * width]
        first = (alive.cumsum(1) - 1).clamp(min=0) * width
        each = first.unsqueeze(2) + torch.arange(width, device=first.device)
        return numbers.gather(1, each.flatten(1))

    def _siblings(self, parents: Rows, probs: DraftProbs) -> Children:
        """Give every row different children, in draft order."""
        places, there = self._places(probs)
        tokens = probs.ids.gather(2, places).flatten(1)
        values = probs.probs.gather(2, places).flatten(1)
        leads = parents.alive & there.flatten(1)
        node = torch.where(leads, parents.nodes.unsqueeze(1) + leads.cumsum(1) - 1, parents.node)
        # Leaders are made anew, not expanded: graphs are made for strides.
        leader = torch.zeros_like(node) + torch.arange(leads.shape[1], device=node.device)
        after = Rows(node, leader, leads, parents.nodes + leads.sum(dim=1))
        return Children(after, tokens, leads, values)

    def _places(self, probs: DraftProbs) -> Siblings:
        if self._shape:
            return self._shape[len(self._levels)].places(probs.ids)
        if self._fixed:
            places = torch.arange(probs.ids.shape[2], device=probs.ids.device)
            every = places.expand_as(probs.ids)
            return every, torch.ones_like(every, dtype=torch.bool)
        # NaN from a broken head must not draw a token twice; the verifier finds it.
        possible = probs.probs.nan_to_num(nan=0.0)
        popular: Sequence[Tensor] = ()
        if self._sampling is not DraftSampling.WOR:
            popular = most_likely_first(probs.ids, possible).unbind(2)
        if self._sampling is DraftSampling.HUB:
            numbers = self._numbers[len(self._levels)]
            return _hub_pairs(possible, numbers, popular[0], self._rows.alive)
        width = self._width(probs)
        numbers = self._numbers_of(width).view(*possible.shape[:2], width)
        places, there = _without_replacement(possible, numbers, popular[: width - 1])
        there[..., 0] = True  # so that a distribution of NaN alone draws something, and is found
        return places, there

    def _advance(self, children: Children, scores: Tensor, width: int) -> Frontier:
        """Choose the next frontier among the children."""
        rows, tokens, parents = children.rows, children.token_ids, None
        chosen = self._chosen(rows.alive, scores)
        if chosen is None:  # paths: every child goes on
            if len(self._levels) > 1 and width > 1:
                parents = torch.arange(tokens.shape[1], device=tokens.device) // width
                parents = parents.expand_as(tokens)
        else:
            places, there = chosen
            node, alive, tokens, scores = (
                x.gather(1, places) for x in (rows.node, rows.alive, tokens, scores)
            )
            leader = torch.arange(places.shape[1], device=places.device).expand_as(places)
            rows, parents = Rows(node, leader, alive & there, rows.nodes), places // width
        if self._floor is not None:
            rows = rows._replace(alive=rows.alive & ~(scores < self._floor))
        self._rows, self._scores = rows, scores
        return Frontier(tokens, parents, rows.leader, rows.alive)

    def _chosen(self, real: Tensor, scores: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return places ``[batch, rows]`` of the next rows, and which exist; None for all."""
        if self._shape:
            going = self._shape[len(self._levels) - 1].going
            places = upload(going, dtype=torch.int64, device=real.device).expand(len(real), -1)
            return places, torch.ones_like(places, dtype=torch.bool)
        if not self._fixed and self._sampling is not DraftSampling.HUB:
            return None
        count = frontier_rows(self._plan, self._sampling)
        places = _best(scores, real, count)
        missing = (0, count - places.shape[1])
        return pad(places, missing), pad(torch.ones_like(places, dtype=torch.bool), missing)

    def finish(self) -> DraftTree:
        """Return the trees, padded to the most nodes they can have."""
        plan, levels = self._plan, self._levels
        children = [level.children for level in levels]
        number = children[-1].rows.nodes
        most = 1 + sum(own.leads.shape[1] for own in children)
        # One node more than there can be: what is written there is discarded.
        new = torch.cat([torch.where(own.leads, own.rows.node, most) for own in children], dim=1)
        depths = [torch.full_like(own.token_ids, d) for d, own in enumerate(children, start=1)]
        token_ids = _scattered(new, [own.token_ids for own in children], most)
        token_ids[:, 0] = self._roots
        parents = _scattered(new, [level.parents for level in levels], most)
        depth = _scattered(new, depths, most)
        if self._fixed:
            if not plan.shape:  # keep the best nodes, and number them anew
                scores = _scattered(new, [level.scores for level in levels], most)
                real = torch.arange(1, most, device=new.device) < number.unsqueeze(1)
                kept = pad(1 + _best(scores[:, 1:], real, plan.fixed_nodes), (1, 0))
                places = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
                places = torch.zeros_like(parents).scatter(1, kept, places)
                parents = places.gather(1, parents.gather(1, kept))
                token_ids, depth = token_ids.gather(1, kept), depth.gather(1, kept)
                number = (kept < number.unsqueeze(1)).sum(dim=1)
            return _fixed_tree(token_ids, parents, depth, number, plan.fixed_nodes, plan.depth)
        known = torch.cat([_leading(level.rows, most) for level in levels], dim=1)
        return DraftTree(
            self._sampling,
            token_ids,
            parents,
            depth,
            number,
            self._draws(children),
            draft_ids=_scattered(known, [level.probs.ids for level in levels], most),
            draft_probs=_scattered(known, [level.probs.probs for level in levels], most),
            columns=in_columns(plan, self._sampling),
        )

    def _draws(self, children: Sequence[Children]) -> Tensor:
        """Return ``[batch, depth, drafts]`` int64: the child of every draw of each level."""
        most = most_draws(self._plan, self._sampling)
        nodes = torch.stack([_widened(level.rows.node, most) for level in children], dim=1)
        alive = torch.stack([_widened(level.rows.alive, most) for level in children], dim=1)
        missing = self._plan.depth - len(children)
        draws = nodes * alive
        return pad(draws, (0, 0, 0, missing)) if missing else draws


def _widened(rows: Tensor, width: int) -> Tensor:
    """Return ``rows`` ``[batch, rows]`` with so many columns, the last of them 0."""
    missing = width - rows.shape[1]
    return pad(rows, (0, missing)) if missing else rows


class _ShapeLevel(NamedTuple):
    """A level of a static tree (EAGLE-1, arXiv 2401.15077, section 3.2).

    A node of the shape is named by the ranks of the children that lead to it: (1, 0) is the most
    likely child of the root's second most likely one. A node whose rank the vocabulary does not
    have is left out, with all below it.
    """

    ranks: list[list[int]]  # the ranks of each row's children, padded with -1 to the same number
    going: list[int]  # the places of the children that have children

    @classmethod
    def of(cls, shape: Shape) -> list[Self]:
        """Return the levels of a shape."""
        below: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for node in shape:
            below.setdefault(node[:-1], []).append(node)
        levels: list[Self] = []
        frontier: list[tuple[int, ...]] = [()] if shape else []
        while frontier:
            width = max(len(below[node]) for node in frontier)
            ranks = [[child[-1] for child in below[node]] for node in frontier]
            going = {
                row * width + place: child
                for row, node in enumerate(frontier)
                for place, child in enumerate(below[node])
                if child in below
            }
            levels.append(cls([own + [-1] * (width - len(own)) for own in ranks], [*going]))
            frontier = [*going.values()]
        return levels

    def places(self, ids: Tensor) -> Siblings:
        """Return the children of rows with candidates ``ids`` ``[batch, rows, width]``."""
        ranks = upload(self.ranks, dtype=torch.int64, device=ids.device)
        ranks = ranks.expand(len(ids), -1, -1)
        there = (ranks >= 0) & (ranks < ids.shape[2])
        return torch.where(there, ranks, 0), there


_LOWEST = -1e300
"""Score of candidates of probability 0 or NaN, which ranks them after all others that exist."""


def _best(scores: Tensor, real: Tensor, count: int) -> Tensor:
    """Return the places of the best ``count``, in the order found: ``[batch, count or fewer]``."""
    keys = torch.where(real, scores.nan_to_num(nan=_LOWEST, neginf=_LOWEST), -torch.inf)
    order = keys.sort(dim=1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=1).values


def _leading(rows: Rows, spare: int) -> Tensor:
    """Return ``[batch, rows]``: the nodes of the first rows there, ``spare`` for all others."""
    own = torch.arange(rows.node.shape[1], device=rows.node.device)
    return torch.where(rows.alive & (rows.leader == own), rows.node, spare)


def _scattered(places: Tensor, parts: Sequence[Tensor], most: int) -> Tensor:
    """Return ``[batch, most, ...]``: ``parts``, together ``[batch, n, ...]``, at ``places``."""
    values = torch.cat(list(parts), dim=1)
    batch, _, *shape = values.shape
    index = places.view(*places.shape, *(1 for _ in shape)).expand_as(values)
    room = values.new_zeros((batch, most + 1, *shape))
    return room.scatter_(1, index, values)[:, :most]


def _fixed_tree(
    token_ids: Tensor, parents: Tensor, depth: Tensor, number: Tensor, most: int, length: int
) -> DraftTree:
    """Return trees of draft sampling ``fixed``: no distributions, and a draw for every node.

    A verifier finds its random numbers by a draw's place, so ``most``, the padded number of a
    level's draws, and ``length`` must depend on the plan alone and not on the batch.
    """
    none = token_ids.new_zeros((*token_ids.shape, 0))
    same = depth.unsqueeze(2) == depth.unsqueeze(1)
    place = same.tril(-1).sum(dim=2)  # nodes of the same depth before each
    nodes = torch.arange(depth.shape[1], device=depth.device).expand_as(depth)
    # Padding and the root, of depth 0, go to a level that is cut off.
    draws = token_ids.new_zeros((len(depth), (length + 1) * most))
    draws.scatter_(1, depth * most + place * (depth > 0), nodes)
    return DraftTree(
        DraftSampling.FIXED,
        token_ids,
        parents,
        depth,
        number,
        draws.view(-1, length + 1, most)[:, 1:],
        draft_ids=none,
        draft_probs=none.to(torch.float64),
    )


def given_trees(
    trees: Sequence[tuple[Sequence[int], Sequence[int]]], *, drafts: int, length: int
) -> DraftTree:
    """Return ``fixed`` trees on the host, of each request's tokens, root first, and parents."""
    nodes = max(len(tokens) for tokens, _ in trees)
    numbers = np.zeros((3, len(trees), nodes), dtype=np.int64)
    for b, (tokens, above) in enumerate(trees):
        numbers[0, b, : len(tokens)], numbers[1, b, : len(above)] = tokens, above
        for node in range(1, len(above)):
            numbers[2, b, node] = numbers[2, b, above[node]] + 1
    sizes = torch.tensor([len(tokens) for tokens, _ in trees])
    token_ids, parents, depth = torch.from_numpy(numbers)
    return _fixed_tree(token_ids, parents, depth, sizes, drafts, length)


# Growing trees on the host: a forward runs the rows that go on, one for each node.
@dataclass(frozen=True, slots=True)
class NewRows:
    """The new nodes of one level that a forward runs, request after request."""

    counts: list[int]  # rows of each request
    token_ids: Tensor  # [rows] int64, on the host
    # [rows] int64, on the host: the row of the level before that each continues; on the first
    # level, the number of its request.
    parents: Tensor


FollowRows: TypeAlias = Callable[[NewRows], Tensor]
"""Runs new rows; returns the logits ``[rows, draft_vocab]`` of what follows them."""


@dataclass(frozen=True, slots=True)
class DraftCall:
    """What to draft: one tree for each of some requests."""

    requests: Sequence[Request]  # with at least one committed token each
    plan: Plan  # paths, depth, width and draft temperature, shared by all of them
    draft_sampling: DraftSampling  # how children arise
    tree_slots: Sequence[Tensor]  # for each request [plan.tree_slots - 1] KV slots to overwrite

    @property
    def ruled(self) -> bool:
        """Whether drafts obey the requests' rules: all have some, and no step replays drafts."""
        return self.requests[0].rules is not None and not self.requests[0].replayed


def draft_trees(
    call: DraftCall, draft_to_target: Tensor, logits: Tensor, follow: FollowRows
) -> DraftTree:
    """Draft one tree per request; the trees are on the host, padded to the largest.

    ``draft_to_target`` ``[draft_vocab]`` int64 is the target's id of each draft token, ``logits``
    ``[requests, draft_vocab]`` are of what follows the roots, and ``follow`` runs new nodes.
    """
    requests, plan, draft_sampling = call.requests, call.plan, call.draft_sampling
    batch, device = len(requests), logits.device
    width = support(plan, draft_sampling, len(draft_to_target))
    params = [draft_params(request.params, plan) for request in requests]

    ruled = GrowingRows([request.ruled_row() for request in requests]) if call.ruled else None

    def probs_of(logits: Tensor, counts: Sequence[int]) -> DraftProbs:
        if ruled is not None:
            logits = ruled.obey(logits, draft_to_target)
        if draft_sampling is DraftSampling.FIXED:
            return log_probs(logits, width=width, draft_to_target=draft_to_target)
        settings = WarpSettings.of(params, counts, device=device)
        return draft_probs(logits, settings, width=width, draft_to_target=draft_to_target)

    uniforms = None
    if draft_sampling is not DraftSampling.FIXED:
        uniforms = send(draft_numbers(requests, plan), device)
    roots = upload([r.token_ids[-1] for r in requests], dtype=torch.int64, device=device)
    growth = TreeGrowth(plan, draft_sampling, roots, uniforms)
    frontier = growth.grow(probs_of(logits, [1] * batch))
    row_of = torch.arange(batch).unsqueeze(1)  # the packed row of each frontier row's node
    for _ in range(plan.depth - 1):
        rows = torch.arange(frontier.token_ids.shape[1], device=device)
        runs, leaders, tokens = fetch(
            frontier.alive & (frontier.leaders == rows), frontier.leaders, frontier.token_ids
        )
        counts = runs.sum(dim=1).tolist()
        if not any(counts):
            break
        if frontier.parents is not None:
            row_of = row_of.gather(1, *fetch(frontier.parents))
        new = NewRows(counts, tokens[runs], row_of.expand_as(runs)[runs])
        if ruled is not None:
            ruled.extend(new.token_ids.tolist(), new.parents.tolist())
        own = probs_of(follow(new), counts)
        row_of = (runs.flatten().cumsum(0) - 1).clamp(min=0).view_as(runs).gather(1, leaders)
        at = send(row_of.flatten(), device)
        frontier = growth.grow(
            DraftProbs(own.ids.index_select(0, at), own.probs.index_select(0, at))
        )
    tree = growth.finish()
    on_host = zip(tree.tensors, fetch(*tree.tensors.values()), strict=True)
    return trimmed(replace(tree, **dict[str, Any](on_host)))


def draft_numbers(requests: Sequence[Request], plan: Plan) -> Tensor:
    """Return ``[requests, paths, depth]`` float64 on the host: each request's own numbers."""
    count = plan.paths * plan.depth
    rows = [request.rng.draw(request.step, Purpose.DRAFT, count) for request in requests]
    return torch.from_numpy(np.stack(rows)).view(len(requests), plan.paths, plan.depth)


def trimmed(tree: DraftTree) -> DraftTree:
    """Return trees of the host padded to the largest, and count the forks of independent drafts."""
    most, forks = int(tree.num_nodes.max()), None
    if tree.draft_sampling is DraftSampling.IID:
        forks = int((tree.draft_counts() > 1).sum(dim=1).max())
    names = ("token_ids", "parents", "depth", "draft_ids", "draft_probs")
    kept: dict[str, Any] = {name: tree.tensors[name][:, :most] for name in names}
    # Graphs are made for strides: those of a lone row must not be those of the buffer it is in.
    contiguous = torch.contiguous_format
    return replace(tree, **kept, forks=forks).mapped(lambda x: x.clone(memory_format=contiguous))


class DraftedRows:
    """The drafted rows of a batch: their slots, and which rows each one sees."""

    def __init__(self, contexts: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
        """Start without rows.

        ``contexts`` are the slots of what all rows of a request see, positions 0 ... c - 1;
        ``slots`` are those that its rows take, in order.
        """
        self._contexts = contexts
        self._slots = slots
        self._positions: list[list[int]] = [[] for _ in contexts]
        self._seen = np.zeros((len(contexts), max(map(len, slots))), dtype=np.bool_)
        self._levels = 0

    def segments(self, rows: NewRows) -> list[Segment]:
        """Add new rows; return the segments of the requests that have any."""
        self._seen = self._seen[rows.parents.numpy()]
        found: list[Segment] = []
        spans = pairwise(accumulate(rows.counts, initial=0))
        for b, (first, end) in enumerate(spans):
            known, count = len(self._positions[b]), end - first
            if not count:
                continue
            self._positions[b] += [len(self._contexts[b]) + self._levels] * count
            every = known + count
            seen = self._seen[first:end]
            seen[:, known:every] |= np.eye(count, dtype=np.bool_)
            positions = torch.tensor(self._positions[b])
            found.append(
                Segment(
                    token_ids=rows.token_ids[first:end],
                    positions=positions[known:],
                    context_slots=self._contexts[b],
                    tree_slots=self._slots[b][:every],
                    tree_positions=positions,
                    visible=torch.from_numpy(seen[:, :every]),
                )
            )
        self._levels += 1
        return found
