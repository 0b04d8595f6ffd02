"""Draft trees, grown level by level in tensors of fixed sizes, for a batch on the host or a device.

A tree grows from a *frontier* of rows. The drafter computes a distribution for each row, the row
draws children by it, and some of the children are the next frontier. A table of levels
(:class:`LevelTable`) says how many, and that is all in which trees differ:

    sampling         draws of a row                                 next frontier
    iid              K of the root, one of a path; drawn            all
    wor, greedy      K of the root, all different, and one below    all
    the same, widths widths[d] of each row of depth d               all
    hub              a pair: a drawn token and the most likely one  the K // 2 most likely
    fixed            the ``beam`` most likely tokens, in order      the ``beam`` most likely
    fixed, a shape   the ranks that the shape names                 those that the shape continues

K is the number of paths. A row stands for a draw, so a node has as many rows as drafts equal to it.
All children of a node are drawn at once, and whether a node goes on depends only on earlier draws,
not on its own children: that is what keeps verification lossless.

Every draw has a *number* from the start: 0 is the root, and the draws follow level by level in the
order of rows. Equal siblings stand at the number of the first of them. The numbers at which no node
stands are left out at the end, and nodes of a depth are put in the order of their parents.

A request's tree has its own matrix of uniform numbers ``[K, L]``, K the most draws of a level;
column d draws the children of nodes of depth d. Which number a draw uses depends on what was drawn
before, never on its own outcome, and none is used twice.

Growing reads nothing on the host: rows that have ended continue as meaningless ones, and missing
nodes are padding. So a recorded loop (:mod:`eaglegbv.drafters.graph_drafting`) runs every row, and
a loop on the host (:mod:`eaglegbv.drafters.host_drafting`) asks which rows it has to run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from eaglegbv.config import DraftSampling, Plan, Shape
from eaglegbv.devices import first_true, most_likely_first, upload
from eaglegbv.drafters.draft_probs import DraftProbs, pick_places
from eaglegbv.tree import DraftTree


def in_columns(plan: Plan, draft_sampling: DraftSampling) -> bool:
    """Return whether trees are K paths that fork at the root alone, each a column of draws."""
    shaped = draft_sampling in {DraftSampling.FIXED, DraftSampling.HUB}
    return not shaped and not plan.widths


class Level(NamedTuple):
    """What the rows of a frontier draw, and which of the children go on."""

    rows: int  # rows of the frontier
    draws: int  # draws of each row
    best: int | None = None  # how many children go on, the most likely; None for all
    # Of a given shape, [rows, draws] int64: the children's places among a row's candidates; and
    # [rows, draws] bool: which of them there are.
    places: Tensor | None = None
    real: Tensor | None = None
    going: Tensor | None = None  # [rows] int64, the children that go on; None as `best` says

    @property
    def children(self) -> int:
        """Number of draws of all rows."""
        return self.rows * self.draws

    @property
    def next_rows(self) -> int:
        """Rows of the next frontier."""
        if self.going is not None:
            return len(self.going)
        return self.children if self.best is None else min(self.best, self.children)


@dataclass(frozen=True, slots=True, eq=False)
class LevelTable:
    """The levels of a plan's trees."""

    plan: Plan
    draft_sampling: DraftSampling
    levels: tuple[Level, ...]
    depths: Tensor  # [numbers] int64, the depth of every number
    # [depth * most draws] int64, the numbers of each level's draws, 0 where there are no more.
    draws: Tensor

    @property
    def most_rows(self) -> int:
        """Most rows of a frontier below the root."""
        return max((level.next_rows for level in self.levels[:-1]), default=1)


@lru_cache(maxsize=256)
def level_table(
    plan: Plan, draft_sampling: DraftSampling, device: torch.device, *, width: int = 0
) -> LevelTable:
    """Return the levels of a plan's trees; for ``fixed``, of ``width`` candidates a row."""
    if draft_sampling is DraftSampling.FIXED and plan.shape:
        levels = _shape_levels(plan.shape, device, width)
    else:
        levels = _plan_levels(plan, draft_sampling, width)
    depths = [0]
    draws: list[int] = []
    most = max(level.children for level in levels)
    if draft_sampling is DraftSampling.HUB:  # whatever the depth, as verifiers' numbers have places
        most = 2 * (plan.paths // 2)
    for depth, level in enumerate(levels, start=1):
        first = len(depths)
        depths += [depth] * level.children
        draws += range(first, len(depths))
        draws += [0] * (most - level.children)
    return LevelTable(
        plan,
        draft_sampling,
        tuple(levels),
        upload(depths, dtype=torch.int64, device=device),
        upload(draws, dtype=torch.int64, device=device),
    )


def _plan_levels(plan: Plan, draft_sampling: DraftSampling, width: int) -> list[Level]:
    draws = plan.widths or (plan.paths, *[1] * (plan.depth - 1))
    best: int | None = None
    if draft_sampling is DraftSampling.HUB:
        draws = (2,) * plan.depth
        best = plan.paths // 2
    if draft_sampling is DraftSampling.FIXED:
        draws = (width,) * plan.depth
        best = plan.fixed_beam
    levels: list[Level] = []
    rows = 1
    for count in draws:
        level = Level(rows, count, best)
        levels.append(level)
        rows = level.next_rows
    return levels


def _shape_levels(shape: Shape, device: torch.device, width: int) -> list[Level]:
    """Return the levels of a static tree (EAGLE-1, arXiv 2401.15077, section 3.2).

    A node of the shape is named by the ranks of the children that lead to it: (1, 0) is the most
    likely child of the root's second most likely one. A node whose rank the vocabulary does not
    have is left out, with all below it.
    """
    below: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for node in shape:
        below.setdefault(node[:-1], []).append(node)
    levels: list[Level] = []
    frontier: list[tuple[int, ...]] = [()]
    while frontier:
        draws = max(len(below[node]) for node in frontier)
        ranks: list[list[int]] = []
        going: list[int] = []
        continued: list[tuple[int, ...]] = []
        for row, node in enumerate(frontier):
            missing = draws - len(below[node])
            ranks.append([child[-1] for child in below[node]] + [width] * missing)
            for place, child in enumerate(below[node]):
                if child in below:
                    going.append(row * draws + place)
                    continued.append(child)
        places = upload(ranks, dtype=torch.int64, device=device)
        level = Level(
            rows=len(frontier),
            draws=draws,
            places=places.where(places < width, 0),
            real=places < width,
            going=upload(going, dtype=torch.int64, device=device),
        )
        levels.append(level)
        frontier = continued
    return levels


class Frontier(NamedTuple):
    """Rows of a batch of trees: what the drafter continues, some of them meaningless."""

    token_ids: Tensor  # [batch, rows] int64
    alive: Tensor | None = None  # [batch, rows] bool, whether the row goes on; None for all
    # [batch, rows] int64, the first row at the same node; None where all nodes differ.
    leaders: Tensor | None = None
    # [batch, rows] float64, the product of the draft probabilities down to each, or its logarithm
    # for `fixed`; None where nothing depends on it.
    scores: Tensor | None = None
    # [batch, rows] int64, which children of the previous frontier these are; None for all of them.
    chosen: Tensor | None = None
    # [batch, rows] int64, the row of the previous frontier that each continues; None where each
    # continues the row of its own number, or the root.
    parents: Tensor | None = None

    def runs(self) -> Tensor:
        """Return ``[batch, rows]`` bool: the rows to be run, one for each node that goes on."""
        runs = torch.ones_like(self.token_ids, dtype=torch.bool)
        if self.leaders is not None:
            runs = self.leaders == self.every()
        return runs if self.alive is None else runs & self.alive

    def every(self) -> Tensor:
        """Return ``[batch, rows]`` int64, the numbers of the rows."""
        rows = torch.arange(self.token_ids.shape[1], device=self.token_ids.device)
        return rows.expand_as(self.token_ids)

    def places(self) -> Tensor:
        """Return ``[batch, rows]`` int64: as which child of the previous frontier a node stands."""
        if self.chosen is not None:
            return self.chosen
        return self.every() if self.leaders is None else self.leaders


class _Grown(NamedTuple):
    """A level that has been grown: its frontier, distributions, and children."""

    level: Level
    rows: Frontier
    probs: DraftProbs
    children: Frontier
    above: int  # the first number of the level above
    first: int  # and of this one

    def parents(self) -> Tensor:
        """Return ``[batch, rows]`` int64, the numbers of the nodes at which draws are made."""
        return self.above + self.rows.places()

    def led_to(self) -> Tensor:
        """Return ``[batch, draws]`` int64, the numbers of the nodes to which draws led."""
        return self.first + self.children.places()


class NodeFacts(NamedTuple):
    """The nodes of finished trees, ``[batch, nodes]`` int64 each."""

    token_ids: Tensor
    parents: Tensor
    depth: Tensor


class TreeGrowth:
    """The trees of a batch in the making. What a level adds is kept until the trees are finished.

    Paths of ``iid`` that begin alike share nodes, and go on independently; none is dropped because
    of a drawn token, a path only stops before one. Pairs of ``hub`` are SpecHub's (arXiv
    2411.05289). Of the nodes of a ``fixed`` tree without a shape, those with the largest product of
    draft probabilities are kept, as in EAGLE-2 (arXiv 2406.16858, section 4): a child's never
    exceeds its parent's, so they are a tree.
    """

    def __init__(self, table: LevelTable, roots: Tensor, uniforms: Tensor | None) -> None:
        """Start trees at ``roots`` ``[batch]`` int64, token ids.

        ``uniforms`` ``[batch, paths, depth]`` float64 are each request's numbers, None for
        ``fixed``.
        """
        self._table = table
        self._sampling = table.draft_sampling
        self._fixed = table.draft_sampling is DraftSampling.FIXED
        self._uniforms: Sequence[Tensor] = () if uniforms is None else uniforms.unbind(2)
        floor = table.plan.min_confidence
        self._floor: float | None = None
        if floor > 0:
            self._floor = math.log(floor) if self._fixed else floor
        scores: Tensor | None = None
        if self._floor is not None or table.levels[0].best is not None:
            start = 0 if self._fixed else 1
            scores = torch.full_like(roots, start, dtype=torch.float64).unsqueeze(1)
        self._frontier = Frontier(roots.unsqueeze(1), scores=scores)
        self._grown: list[_Grown] = []

    def grow(self, probs: DraftProbs) -> Frontier:
        """Give the frontier children by its distributions; return the next one.

        They are ``[batch * rows, width]``, at first of the roots; log-probabilities, the best
        first, for ``fixed``.
        """
        level = self._table.levels[len(self._grown)]
        rows = self._frontier
        shape = (*rows.token_ids.shape, -1)
        probs = DraftProbs(probs.ids.view(shape), probs.probs.view(shape))
        if rows.leaders is not None:  # rows at one node draw from one distribution
            probs = probs.at(rows.leaders)
        children = self._children(level, probs)
        above = self._grown[-1].first if self._grown else 0
        first = above + (self._grown[-1].level.children if self._grown else 1)
        self._grown.append(_Grown(level, rows, probs, children, above, first))
        self._frontier = self._going(level, children)
        return self._frontier

    def _children(self, level: Level, probs: DraftProbs) -> Frontier:
        """Return the children of the frontier's rows, each from its own distribution."""
        rows = self._frontier
        places, real = self._places(level, probs)
        token_ids = probs.ids
        values = probs.probs
        if places is not None:
            token_ids = token_ids.gather(2, places)
        scores: Tensor | None = None
        if rows.scores is not None:
            if places is not None:
                values = values.gather(2, places)
            above = rows.scores.unsqueeze(2)
            scores = above + values if self._fixed else above * values
            scores = scores.flatten(1)
        alive = _both(_repeated(rows.alive, level.draws), real)
        children = Frontier(token_ids.flatten(1), alive, scores=scores)
        if self._sampling is not DraftSampling.IID or level.children == 1:
            return children
        leaders = first_equal(children, _repeated(rows.leaders, level.draws))
        return children._replace(leaders=leaders)

    def _places(self, level: Level, probs: DraftProbs) -> tuple[Tensor | None, Tensor | None]:
        """Return the places ``[batch, rows, draws]`` of the children among a row's candidates.

        None is all candidates in order. And ``[batch, rows * draws]`` bool: which of the children
        there are; None for all.
        """
        rows = self._frontier
        if self._fixed and level.places is None:
            return None, None
        if level.places is not None and level.real is not None:
            batch = len(rows.token_ids)
            return level.places.expand(batch, -1, -1), level.real.flatten().expand(batch, -1)
        if self._sampling is DraftSampling.IID or level.draws == 1:
            return pick_places(probs.probs.unsqueeze(2), self._uniforms_of(level)), None
        # NaN from a broken head must not draw a token twice; the verifier finds it.
        possible = probs.probs.nan_to_num(nan=0.0)
        popular: Sequence[Tensor] = ()
        if self._sampling is not DraftSampling.WOR:
            popular = most_likely_first(probs.ids, possible).unbind(2)
        if self._sampling is DraftSampling.HUB:
            uniforms = self._uniforms[len(self._grown)]
            places, real = _hub_pairs(possible, uniforms, popular[0], rows.alive)
        else:
            kept = popular[: level.draws - 1]
            places, real = _without_replacement(possible, self._uniforms_of(level), kept)
            real[..., 0] = True  # so that a distribution of NaN alone draws something, and is found
        return places, real.flatten(1)

    def _uniforms_of(self, level: Level) -> Tensor:
        """Return the numbers ``[batch, rows, draws]`` of a level; of `iid`, by the draws' places.

        Otherwise rows that have ended use none.
        """
        uniforms = self._uniforms[len(self._grown)]
        alive = self._frontier.alive
        shape = (len(uniforms), level.rows, level.draws)
        if alive is None or self._sampling is DraftSampling.IID:
            return uniforms[:, : level.children].view(shape)
        first = (alive.cumsum(1) - 1).clamp(min=0) * level.draws
        each = first.unsqueeze(2) + torch.arange(level.draws, device=first.device)
        return uniforms.gather(1, each.flatten(1)).view(shape)

    def _going(self, level: Level, children: Frontier) -> Frontier:
        """Return the next frontier: the children that go on."""
        chosen: Tensor | None = None
        if level.going is not None:
            chosen = level.going.expand(len(children.token_ids), -1)
        elif level.best is not None and children.scores is not None:
            chosen = _best(children.scores, children.alive, level.best)
        if chosen is not None:
            children = Frontier(
                children.token_ids.gather(1, chosen),
                None if children.alive is None else children.alive.gather(1, chosen),
                scores=None if children.scores is None else children.scores.gather(1, chosen),
                chosen=chosen,
                parents=chosen // level.draws,
            )
        elif level.draws > 1 and len(self._grown) > 1:
            children = children._replace(parents=children.every() // level.draws)
        if self._floor is None or children.scores is None:
            return children
        confident = ~(children.scores < self._floor)
        return children._replace(alive=_both(children.alive, confident))

    def most_likely(self) -> tuple[Tensor, Tensor]:
        """Return the numbers of the most likely nodes of a ``fixed`` tree, and their token ids.

        Both are ``[batch, nodes]`` int64, without the root and in order; a number at which nothing
        stands is among them only if there are not as many nodes.
        """
        children = [level.children for level in self._grown]
        scores = _joined([level.scores for level in children if level.scores is not None])
        best = _best(scores, _all_alive(children), self._table.plan.fixed_nodes)
        return 1 + best, _joined([level.token_ids for level in children]).gather(1, best)

    def finish(self) -> DraftTree:
        """Return the trees, padded to the most nodes they can have."""
        return self._finish_fixed() if self._fixed else self._finish_drawn()

    def _finish_fixed(self) -> DraftTree:
        plan = self._table.plan
        stands = self._stands(_joined([level.led_to() for level in self._grown]))
        if not plan.shape:
            kept, _ = self.most_likely()
            stands = stands & torch.zeros_like(stands).scatter(1, kept - 1, value=True)
        stands = pad(stands, (1, 0), value=True)
        most = min(stands.shape[1], 1 + plan.fixed_nodes)
        parents = [level.parents() for level in self._grown]
        facts = self._facts(stands, stands.cumsum(dim=1) - 1, parents, most)
        return fixed_tree(*facts, stands.sum(dim=1), plan.fixed_nodes, plan.depth)

    def _finish_drawn(self) -> DraftTree:
        levels = self._grown
        led_to = [level.led_to() for level in levels]
        parents = [level.parents() for level in levels]
        children = _joined(led_to)
        stands = pad(self._stands(children), (1, 0), value=True)
        most = stands.shape[1]
        if self._sampling is DraftSampling.IID and levels[-1].level.children > 1:
            nodes = self._nodes_of_paths(stands, led_to)
        else:
            nodes = stands.cumsum(dim=1) - 1
        facts = self._facts(stands, nodes, parents, most)
        known = nodes.gather(1, _joined(parents))
        alive = _all_alive([level.rows for level in levels])
        if alive is not None:
            known = torch.where(alive, known, most)
        return DraftTree(
            self._sampling,
            *facts,
            stands.sum(dim=1),
            self._draws(nodes.gather(1, children)),
            draft_ids=_placed(known, _joined([level.probs.ids for level in levels]), most),
            draft_probs=_placed(known, _joined([level.probs.probs for level in levels]), most),
            columns=in_columns(self._table.plan, self._sampling),
        )

    def _stands(self, children: Tensor) -> Tensor:
        """Return ``[batch, draws]`` bool: whether a node stands at the number of each draw.

        ``children`` ``[batch, draws]`` int64 are the numbers of the nodes to which draws led.
        """
        stands = children == torch.arange(1, 1 + children.shape[1], device=children.device)
        alive = _all_alive([level.children for level in self._grown])
        return stands if alive is None else stands & alive

    def _nodes_of_paths(self, stands: Tensor, children: Sequence[Tensor]) -> Tensor:
        """Return ``[batch, numbers]`` int64, the node at each number where one stands.

        Rows of nodes that several draws led to may lie between those of other nodes.
        """
        leaves = children[-1].shape[1]
        repeats = [leaves // level.shape[1] for level in children]
        levels = zip(children, repeats, strict=True)
        paths = torch.stack([level.repeat_interleave(n, dim=1) for level, n in levels], dim=2)
        apart = paths.unsqueeze(2) - paths.unsqueeze(1)
        fork = first_true(apart != 0).unsqueeze(3)
        ranks = (apart.gather(3, fork).squeeze(3) > 0).sum(dim=2)  # of paths, by their forks
        of_numbers = pad(_joined([ranks[:, ::n] for n in repeats]), (1, 0))
        count = stands.shape[1]
        keys = self._table.depths[:count] * leaves + of_numbers
        order = torch.where(stands, keys, _LAST).argsort(dim=1)
        every = torch.arange(count, device=order.device).expand_as(order)
        return torch.empty_like(order).scatter_(1, order, every)

    def _facts(
        self, stands: Tensor, nodes: Tensor, parents: Sequence[Tensor], most: int
    ) -> NodeFacts:
        """Return what is known of ``most`` nodes, those that stand at a number."""
        token_ids = [self._grown[0].rows.token_ids]
        above = [torch.zeros_like(token_ids[0])]
        for level, rows in zip(self._grown, parents, strict=True):
            token_ids.append(level.children.token_ids)
            above.append(rows.repeat_interleave(level.level.draws, dim=1))
        depths = self._table.depths[: nodes.shape[1]].expand_as(nodes)
        facts = torch.stack((_joined(token_ids), nodes.gather(1, _joined(above)), depths), dim=2)
        return NodeFacts(*_placed(torch.where(stands, nodes, most), facts, most).unbind(2))

    def _draws(self, children: Tensor) -> Tensor:
        """Return ``[batch, depth, drafts]`` int64: the child of every draw of each level."""
        alive = _all_alive([level.children for level in self._grown])
        if alive is not None:
            children = children * alive
        ungrown = len(self._table.depths) - 1 - children.shape[1]
        by_number = pad(children, (1, ungrown))
        draws = by_number.index_select(1, self._table.draws)
        return draws.view(len(draws), self._table.plan.depth, -1)


def _repeated(rows: Tensor | None, draws: int) -> Tensor | None:
    """Return ``[batch, rows * draws]``: what belongs to each row, for each of its draws."""
    return rows if rows is None or draws == 1 else rows.repeat_interleave(draws, dim=1)


def _both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return where both are true; None is true everywhere."""
    if first is None or second is None:
        return second if first is None else first
    return first & second


def _all_alive(levels: Sequence[Frontier]) -> Tensor | None:
    """Return which rows of all levels are alive, joined; None for all."""
    if all(level.alive is None for level in levels):
        return None
    everywhere = [torch.ones_like(level.token_ids, dtype=torch.bool) for level in levels]
    alive = [level.alive for level in levels]
    return _joined([a if b is None else b for a, b in zip(everywhere, alive, strict=True)])


def first_equal(rows: Frontier, above: Tensor | None = None) -> Tensor:
    """Return ``[batch, rows]``, the first row alive of the same token below the same row.

    ``above`` ``[batch, rows]`` are the first rows at their parents; None below a single row.
    """
    same = rows.token_ids.unsqueeze(2) == rows.token_ids.unsqueeze(1)
    if above is not None:
        same = same & (above.unsqueeze(2) == above.unsqueeze(1))
    if rows.alive is not None:
        same = same & rows.alive.unsqueeze(1)
    return first_true(same)


def _without_replacement(
    probs: Tensor, uniforms: Tensor, kept: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the places ``kept`` (``[batch, rows]`` each), then places drawn from ``probs``.

    ``probs`` are ``[batch, rows, width]``; of ``uniforms`` ``[batch, rows, draws]`` float64, the
    first are used. The result is ``[batch, rows, draws]``, and which children there are.
    """
    places: list[Tensor] = []
    real: list[Tensor] = []
    for child in range(uniforms.shape[2]):
        real.append((probs > 0).any(dim=2))
        drawn = child - len(kept)
        place = pick_places(probs, uniforms[..., drawn]) if drawn >= 0 else kept[child]
        places.append(place)
        probs = probs.scatter(2, place.unsqueeze(2), 0.0)
    return torch.stack(places, dim=2), torch.stack(real, dim=2)


def _hub_pairs(
    probs: Tensor, uniforms: Tensor, hubs: Tensor, alive: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return pairs: a drawn token and the hub; where that was drawn, it and one of the rest.

    A row of ``probs`` ``[batch, rows, width]`` uses one of its tree's ``uniforms`` ``[batch, K]``,
    or two where its hub (``hubs`` ``[batch, rows]``) was drawn and there is a rest; the next row
    uses those that follow, and rows that are not ``alive`` (None for all) use none.
    """
    rest = probs.scatter(2, hubs.unsqueeze(2), 0.0)
    more = (rest > 0).any(dim=2)
    used = torch.zeros_like(hubs[:, :1])
    places: list[Tensor] = []
    real: list[Tensor] = []
    for row, hub in enumerate(hubs.unbind(1)):
        first = pick_places(probs[:, row], uniforms.gather(1, used).squeeze(1))
        second = pick_places(rest[:, row], uniforms.gather(1, used + 1).squeeze(1))
        again = first == hub
        places += [first, torch.where(again, second, hub)]
        real += [torch.ones_like(again), ~again | more[:, row]]
        spent = 1 + (again & more[:, row])
        if alive is not None:
            spent = spent * alive[:, row]
        used = used + spent.unsqueeze(1)
    shape = (*hubs.shape, 2)
    return torch.stack(places, dim=1).view(shape), torch.stack(real, dim=1).view(shape)


_LAST = 1 << 62  # sorts after every real key
_LOWEST = -1e300
"""Score of candidates of probability 0 or NaN, which ranks them after all others that exist."""


def _best(scores: Tensor, real: Tensor | None, count: int) -> Tensor:
    """Return the places of the best ``count``, in the order found: ``[batch, count or fewer]``.

    Those that are not ``real`` (None for all) come last.
    """
    keys = scores.nan_to_num(nan=_LOWEST, neginf=_LOWEST)
    if real is not None:
        keys = torch.where(real, keys, -torch.inf)
    order = keys.sort(dim=1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=1).values


def _joined(levels: Sequence[Tensor]) -> Tensor:
    """Return what the levels have, ``[batch, rows, ...]`` each, one after the other."""
    return torch.cat(list(levels), dim=1)


def _placed(places: Tensor, values: Tensor, most: int) -> Tensor:
    """Return ``[batch, most, width]``: ``values`` ``[batch, n, width]`` at ``places``.

    What is placed at ``most`` ``[batch, n]`` is discarded. Equal places have equal values.
    """
    batch, _, width = values.shape
    room = values.new_zeros((batch, most + 1, width))
    return room.scatter_(1, places.unsqueeze(2).expand_as(values), values)[:, :most]


def fixed_tree(
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
