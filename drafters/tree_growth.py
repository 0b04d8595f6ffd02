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

from eaglegbv.config import Plan, Shape
from eaglegbv.devices import first_true, most_likely_first, upload
from eaglegbv.drafters.draft_probs import DraftProbs, pick_places
from eaglegbv.tree import DraftSampling, DraftTree


def in_columns(plan: Plan, draft_sampling: DraftSampling) -> bool:
    """Return whether trees are K paths that fork at the root alone, each a column of draws."""
    shaped = draft_sampling in {DraftSampling.FIXED, DraftSampling.HUB}
    return not shaped and not plan.widths


def most_draws(plan: Plan, draft_sampling: DraftSampling) -> int:
    """Return the most draws of a level of sampled trees."""
    if draft_sampling is DraftSampling.HUB:
        return 2 * max(1, plan.paths // 2)
    return max(plan.level_draws)


class Level(NamedTuple):
    """What the rows of a frontier draw, and which of the children go on."""

    rows: int  # rows of the frontier
    draws: int  # draws of each row
    best: int | None = None  # how many children go on, the most likely; None for all
    # Where nothing is drawn, [rows, draws] int64: the children's places among a row's candidates;
    # and [rows, draws] bool: which of them there are.
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
        levels = _plan_levels(plan, draft_sampling, device, width)
    depths = [0]
    draws: list[int] = []
    most = max(level.children for level in levels)
    if draft_sampling is not DraftSampling.FIXED:
        most = most_draws(plan, draft_sampling)
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


def _plan_levels(
    plan: Plan, draft_sampling: DraftSampling, device: torch.device, width: int
) -> list[Level]:
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
        if draft_sampling is DraftSampling.FIXED:
            every = torch.arange(count, device=device).expand(rows, -1)
            level = level._replace(places=every, real=torch.ones_like(every, dtype=torch.bool))
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
        places: list[list[int]] = []
        real: list[list[bool]] = []
        going: list[int] = []
        continued: list[tuple[int, ...]] = []
        for row, node in enumerate(frontier):
            ranks = [child[-1] for child in below[node]]
            ranks += [width] * (draws - len(ranks))
            places.append([rank if rank < width else 0 for rank in ranks])
            real.append([rank < width for rank in ranks])
            for place, child in enumerate(below[node]):
                if child in below:
                    going.append(row * draws + place)
                    continued.append(child)
        level = Level(
            rows=len(frontier),
            draws=draws,
            places=upload(places, dtype=torch.int64, device=device),
            real=upload(real, dtype=torch.bool, device=device),
            going=upload(going, dtype=torch.int64, device=device),
        )
        levels.append(level)
        frontier = continued
    return levels


class Frontier(NamedTuple):
    """Rows of a batch of trees: what the drafter continues, some of them meaningless."""

    token_ids: Tensor  # [batch, rows] int64
    numbers: Tensor  # [batch, rows] int64, the numbers at which the rows' nodes stand
    alive: Tensor  # [batch, rows] bool, whether the row goes on
    # [batch, rows] int64, the first row at the same node; None where all nodes differ.
    leaders: Tensor | None = None
    # [batch, rows] float64, the product of the draft probabilities down to each, or its logarithm
    # for `fixed`; None where nothing depends on it.
    scores: Tensor | None = None
    # [batch, rows] int64, the row of the previous frontier that each continues; None where each
    # continues the row of its own number, or the root.
    parents: Tensor | None = None

    def runs(self) -> Tensor:
        """Return ``[batch, rows]`` bool: the rows to be run, one for each node that goes on."""
        if self.leaders is None:
            return self.alive
        rows = torch.arange(self.leaders.shape[1], device=self.leaders.device)
        return self.alive & (self.leaders == rows)

    def at(self, rows: Tensor) -> "Frontier":
        """Return ``rows`` ``[batch, rows]`` int64 of rows at different nodes."""
        return Frontier(
            self.token_ids.gather(1, rows),
            self.numbers.gather(1, rows),
            self.alive.gather(1, rows),
            scores=None if self.scores is None else self.scores.gather(1, rows),
        )


class _Grown(NamedTuple):
    """A level that has been grown: its frontier, distributions, and children."""

    rows: Frontier
    probs: DraftProbs
    parents: Tensor  # [batch, children] int64, the number of each child's parent
    children: Frontier
    stands: Tensor  # [batch, children] bool, where a node stands at the child's own number


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
        self._roots = roots
        self._fixed = table.draft_sampling is DraftSampling.FIXED
        self._uniforms: Sequence[Tensor] = () if uniforms is None else uniforms.unbind(2)
        floor = table.plan.min_confidence
        self._floor: float | None = None
        if floor > 0:
            self._floor = math.log(floor) if self._fixed else floor
        root = torch.zeros_like(roots).unsqueeze(1)
        scores: Tensor | None = None
        if self._floor is not None or table.levels[0].best is not None:
            scores = torch.full_like(root, 0 if self._fixed else 1, dtype=torch.float64)
        alive = torch.ones_like(root, dtype=torch.bool)
        self._frontier = Frontier(roots.unsqueeze(1), root, alive, scores=scores)
        self._grown: list[_Grown] = []
        self._numbers = 1  # given so far

    def grow(self, probs: DraftProbs) -> Frontier:
        """Give the frontier children by its distributions; return the next one.

        They are ``[batch * rows, width]``, at first of the roots; log-probabilities, the best
        first, for ``fixed``.
        """
        level = self._table.levels[len(self._grown)]
        rows = self._frontier
        shape = (len(self._roots), level.rows, -1)
        probs = DraftProbs(probs.ids.view(shape), probs.probs.view(shape))
        if rows.leaders is not None:  # rows at one node draw from one distribution
            probs = probs.at(rows.leaders)
        grown = self._children(level, probs)
        self._grown.append(grown)
        self._numbers += level.children
        self._frontier = self._going(level, grown.children)
        return self._frontier

    def _children(self, level: Level, probs: DraftProbs) -> "_Grown":
        """Draw the children of the frontier's rows, each from its own distribution."""
        rows = self._frontier
        places, real = self._places(level, probs)
        token_ids = probs.ids.gather(2, places).flatten(1)
        parents = _repeated(rows.numbers, level.draws)
        alive = _repeated(rows.alive, level.draws)
        if real is not None:
            alive = alive & real.flatten(1)
        scores = rows.scores
        if scores is not None:
            above = _repeated(scores, level.draws)
            values = probs.probs.gather(2, places).flatten(1)
            scores = above + values if self._fixed else above * values
        stands = alive
        leaders: Tensor | None = None
        first = torch.arange(level.children, device=alive.device).expand_as(alive)
        if self._table.draft_sampling is DraftSampling.IID and level.children > 1:
            leaders = _first_equal(parents, token_ids, alive)
            stands = alive & (leaders == first)
            first = leaders
        children = Frontier(token_ids, self._numbers + first, alive, leaders, scores)
        return _Grown(rows, probs, parents, children, stands)

    def _places(self, level: Level, probs: DraftProbs) -> tuple[Tensor, Tensor | None]:
        """Return the places ``[batch, rows, draws]`` of the children among a row's candidates.

        And ``[batch, rows, draws]`` bool: which of them there are; None for all.
        """
        if level.places is not None and level.real is not None:
            batch = len(self._roots)
            return level.places.expand(batch, -1, -1), level.real.expand(batch, -1, -1)
        draft_sampling = self._table.draft_sampling
        if draft_sampling is DraftSampling.IID or level.draws == 1:
            return pick_places(probs.probs.unsqueeze(2), self._uniforms_of(level)), None
        # NaN from a broken head must not draw a token twice; the verifier finds it.
        possible = probs.probs.nan_to_num(nan=0.0)
        popular: Sequence[Tensor] = ()
        if draft_sampling is not DraftSampling.WOR:
            popular = most_likely_first(probs.ids, possible).unbind(2)
        if draft_sampling is DraftSampling.HUB:
            uniforms = self._uniforms[len(self._grown)]
            return _hub_pairs(possible, uniforms, popular[0], self._frontier.alive)
        kept = popular[: level.draws - 1]
        places, real = _without_replacement(possible, self._uniforms_of(level), kept)
        real[..., 0] = True  # so that a distribution of NaN alone draws something, and is found
        return places, real

    def _uniforms_of(self, level: Level) -> Tensor:
        """Return the numbers ``[batch, rows, draws]`` of a level; of `iid`, by the draws' places.

        Otherwise rows that have ended use none.
        """
        uniforms = self._uniforms[len(self._grown)]
        alive = self._frontier.alive
        shape = (len(alive), level.rows, level.draws)
        if self._table.draft_sampling is DraftSampling.IID:
            return uniforms[:, : level.children].view(shape)
        first = (alive.cumsum(1) - 1).clamp(min=0) * level.draws
        each = first.unsqueeze(2) + torch.arange(level.draws, device=first.device)
        return uniforms.gather(1, each.flatten(1)).view(shape)

    def _going(self, level: Level, children: Frontier) -> Frontier:
        """Return the next frontier: the children that go on."""
        parents: Tensor | None = None
        places: Tensor | None = None
        if level.going is not None:
            places = level.going.expand(len(self._roots), -1)
        elif level.best is not None:
            assert children.scores is not None
            places = _best(children.scores, children.alive, level.best)
        if places is not None:
            children = children.at(places)
            parents = places // level.draws
        elif level.draws > 1 and len(self._grown) > 1:
            every = torch.arange(level.children, device=children.alive.device)
            parents = (every // level.draws).expand_as(children.alive)
        alive = children.alive
        if self._floor is not None and children.scores is not None:
            alive = alive & ~(children.scores < self._floor)
        return children._replace(parents=parents, alive=alive)

    def finish(self) -> DraftTree:
        """Return the trees, padded to the most nodes they can have."""
        plan = self._table.plan
        stands = pad(_joined([level.stands for level in self._grown]), (1, 0), value=True)
        most = self._numbers
        if self._fixed:
            most = min(most, 1 + plan.fixed_nodes)
            stands = self._most_likely(stands)
        nodes = self._nodes(stands)
        token_ids, parents, depth = self._arranged(torch.where(stands, nodes, most), nodes, most)
        count = stands.sum(dim=1)
        if self._fixed:
            return fixed_tree(token_ids, parents, depth, count, plan.fixed_nodes, plan.depth)
        alive = _joined([level.rows.alive for level in self._grown])
        numbers = _joined([level.rows.numbers for level in self._grown])
        known = torch.where(alive, nodes.gather(1, numbers), most)
        return DraftTree(
            self._table.draft_sampling,
            token_ids,
            parents,
            depth,
            count,
            self._draws(nodes),
            draft_ids=_placed(known, _joined([level.probs.ids for level in self._grown]), most),
            draft_probs=_placed(known, _joined([level.probs.probs for level in self._grown]), most),
            columns=in_columns(plan, self._table.draft_sampling),
        )

    def _nodes(self, stands: Tensor) -> Tensor:
        """Return ``[batch, numbers]`` int64, the node at each number where one ``stands``."""
        leaves = self._table.levels[len(self._grown) - 1].children
        if self._table.draft_sampling is not DraftSampling.IID or leaves == 1:
            return stands.cumsum(dim=1) - 1
        # Rows of nodes that several draws led to may lie between those of other nodes.
        numbers = [level.children.numbers for level in self._grown]
        repeats = [leaves // level.shape[1] for level in numbers]
        paths = torch.stack(
            [_repeated(level, times) for level, times in zip(numbers, repeats, strict=True)], dim=2
        )
        apart = paths.unsqueeze(2) - paths.unsqueeze(1)
        fork = first_true(apart != 0).unsqueeze(3)
        ranks = (apart.gather(3, fork).squeeze(3) > 0).sum(dim=2)  # of paths, by their forks
        of_numbers = pad(_joined([ranks[:, ::times] for times in repeats]), (1, 0))
        keys = self._table.depths[: self._numbers] * leaves + of_numbers
        order = torch.where(stands, keys, _LAST).argsort(dim=1)
        every = torch.arange(self._numbers, device=order.device).expand_as(order)
        return torch.empty_like(order).scatter_(1, order, every)

    def _most_likely(self, stands: Tensor) -> Tensor:
        """Return where nodes stand ``[batch, numbers]`` if only the most likely are kept."""
        if self._table.plan.shape:
            return stands
        found = stands[:, 1:]
        scores = torch.cat(
            [s for level in self._grown if (s := level.children.scores) is not None], dim=1
        )
        best = _best(scores, found, self._table.plan.fixed_nodes)
        kept = torch.zeros_like(found).scatter(1, best, value=True)
        return pad(found & kept, (1, 0), value=True)

    def _arranged(self, places: Tensor, nodes: Tensor, most: int) -> Sequence[Tensor]:
        """Return token ids, parents and depths ``[batch, most]`` of the nodes.

        ``places`` ``[batch, numbers]`` are the nodes at the numbers, ``most`` where none stands.
        """
        token_ids = _joined([level.children.token_ids for level in self._grown])
        above = nodes.gather(1, _joined([level.parents for level in self._grown]))
        facts = torch.stack(
            (
                torch.cat((self._roots.unsqueeze(1), token_ids), dim=1),
                pad(above, (1, 0)),
                self._table.depths[: self._numbers].expand_as(places),
            ),
            dim=2,
        )
        return _placed(places, facts, most).unbind(2)

    def _draws(self, nodes: Tensor) -> Tensor:
        """Return ``[batch, depth, drafts]`` int64: the child of every draw of each level."""
        alive = _joined([level.children.alive for level in self._grown])
        numbers = _joined([level.children.numbers for level in self._grown])
        led_to = nodes.gather(1, numbers) * alive
        ungrown = len(self._table.depths) - self._numbers
        by_number = pad(led_to, (1, ungrown))
        draws = by_number.index_select(1, self._table.draws)
        return draws.view(len(draws), self._table.plan.depth, -1)


def _repeated(rows: Tensor, draws: int) -> Tensor:
    """Return ``[batch, rows * draws]``: what belongs to each row, for each of its draws."""
    return rows if draws == 1 else rows.repeat_interleave(draws, dim=1)


def _first_equal(parents: Tensor, token_ids: Tensor, alive: Tensor) -> Tensor:
    """Return the first row alive that is equal to each, of rows ``[batch, rows]``."""
    same = token_ids.unsqueeze(2) == token_ids.unsqueeze(1)
    same = same & (parents.unsqueeze(2) == parents.unsqueeze(1))
    return first_true(same & alive.unsqueeze(1))


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
    probs: Tensor, uniforms: Tensor, hubs: Tensor, alive: Tensor
) -> tuple[Tensor, Tensor]:
    """Return pairs: a drawn token and the hub; where that was drawn, it and one of the rest.

    A row of ``probs`` ``[batch, rows, width]`` uses one of its tree's ``uniforms`` ``[batch, K]``,
    or two where its hub (``hubs`` ``[batch, rows]``) was drawn and there is a rest; the next row
    uses those that follow, and rows that are not ``alive`` use none.
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
        spent = alive[:, row] * (1 + (again & more[:, row]))
        used = used + spent.unsqueeze(1)
    shape = (*hubs.shape, 2)
    return torch.stack(places, dim=1).view(shape), torch.stack(real, dim=1).view(shape)


_LAST = 1 << 62  # sorts after every real key
_LOWEST = -1e300
"""Score of candidates of probability 0 or NaN, which ranks them after all others that exist."""


def _best(scores: Tensor, real: Tensor, count: int) -> Tensor:
    """Return the places of the best ``count``, in the order found: ``[batch, count or fewer]``."""
    keys = torch.where(real, scores.nan_to_num(nan=_LOWEST, neginf=_LOWEST), -torch.inf)
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
