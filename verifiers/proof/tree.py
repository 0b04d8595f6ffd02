"""One request's draft tree as plain draws of tokens, and the outcome of a verification."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import TypeAlias

from eaglegbv.config import DraftSampling
from eaglegbv.errors import InvalidArgument
from eaglegbv.rng import Purpose
from eaglegbv.verifiers.proof.chooser import (
    Chooser,
    Number,
    Prefix,
    Probs,
    ProbsAt,
    accepts,
    most_likely,
)

Stop: TypeAlias = Callable[[Prefix], bool]
"""Whether paths end after a prefix (an end-of-sequence token, say)."""


def never(prefix: Prefix) -> bool:
    """Never stop early."""
    del prefix
    return False


Draws: TypeAlias = tuple[tuple[Prefix | None, ...], ...]
"""The draws of one tree, level by level in the order drawn: what each led to; None for no draw."""


@dataclass(frozen=True, slots=True)
class ReferenceTree:
    """The draws for one request, with what they were drawn from and are judged by."""

    draft_sampling: DraftSampling  # how children arise
    draws: Draws
    target_probs: ProbsAt  # p(. | prefix), over the whole vocabulary
    draft_probs: ProbsAt  # q(. | prefix), over the whole vocabulary, 0 off its support
    # number of each node in a batched tree, keyed by prefix; by default nodes are numbered by
    # depth, then by first draw
    node_numbers: Mapping[Prefix, int] = field(default_factory=dict)
    # length the tree was drawn to, unless it stopped early; by default that of the longest path
    reach: int = 0
    stop: Stop = never  # the rule by which paths stop early
    # makes the draws when they are asked for; ``draws`` are empty then
    drawing: "Drawing | None" = None

    @property
    def length(self) -> int:
        """Length the tree was drawn to."""
        return self.reach or len(self.draws)

    @property
    def most_draws(self) -> int:
        """Most draws of a level, by which uniforms are numbered; K for K paths."""
        if self.drawing is not None:
            return prod(self.drawing.widths)
        return max(map(len, self.draws), default=0)

    def drafts(self, prefix: Prefix) -> dict[int, int]:
        """Return the drafts at a node: number of the draw in its level -> token."""
        if self.drawing is not None:
            return self.drawing.drafts(prefix)
        level = self.draws[len(prefix)] if len(prefix) < len(self.draws) else ()
        children: dict[int, int] = {}
        for number, child in enumerate(level):
            if child is not None and child[:-1] == prefix:
                children[number] = child[-1]
        return children

    def children(self, prefix: Prefix) -> dict[int, int]:
        """Return the children of a node: token -> number of the first draw that led to it."""
        children: dict[int, int] = {}
        for number, token in self.drafts(prefix).items():
            children.setdefault(token, number)
        return children

    @property
    def paths(self) -> tuple[Prefix, ...]:
        """The paths from the root to the leaves, depth first in the order drawn.

        A leaf that several draws led to ends as many paths.
        """

        def below(prefix: Prefix, copies: int) -> list[Prefix]:
            drawn = list(self.drafts(prefix).values())
            if not drawn:
                return [prefix] * copies
            children = dict.fromkeys(drawn)
            return [leaf for x in children for leaf in below((*prefix, x), drawn.count(x))]

        return tuple(below((), 1))

    def nodes(self) -> dict[Prefix, int]:
        """Return every node below the root with its number."""
        if self.node_numbers:
            return {prefix: n for prefix, n in self.node_numbers.items() if prefix}
        draws = self.draws if self.drawing is None else self.drawing.draws()
        prefixes = [child for level in draws for child in level if child is not None]
        return {prefix: n for n, prefix in enumerate(dict.fromkeys(prefixes), start=1)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a verification commits: accepted draft tokens, then a correction or bonus token."""

    accepted: Prefix
    token: int

    @property
    def tokens(self) -> Prefix:
        """All tokens committed."""
        return (*self.accepted, self.token)


Verify: TypeAlias = Callable[[ReferenceTree, Chooser], Outcome]
"""A rule that keeps nothing from step to step: judges one tree."""


DrawChildren: TypeAlias = Callable[[Probs, int, Chooser, "count[int]"], Sequence[int]]
"""Draws up to so many children of one node from q, in draft order; the last argument numbers the
uniforms."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """One tree in the making: what is drawn at a node is drawn when it is first asked for.

    That gives every tree the probability it has when all is drawn at once, as no draw depends on
    what other nodes drew. A node of depth d has (the number of draws that led to it) x
    ``widths[d]`` drafts, so that ``widths`` (K, 1, ..., 1) are K paths. ``DRAFT`` indices are
    draw * length + depth; draw j of a level has the draws from j * width on below it.
    """

    draw: DrawChildren
    draft_probs: ProbsAt
    widths: Sequence[int]
    chooser: Chooser
    stop: Stop = never
    known: dict[Prefix, dict[int, int]] = field(default_factory=dict)  # drafts by node

    def drafts(self, prefix: Prefix) -> dict[int, int]:
        """Return the drafts at a node: number of the draw in its level -> token."""
        if prefix not in self.known:
            self.known[prefix] = self._drawn(prefix)
        return self.known[prefix]

    def _drawn(self, prefix: Prefix) -> dict[int, int]:
        depth = len(prefix)
        length = len(self.widths)
        if depth == length or self.stop(prefix):
            return {}
        above = [0]
        if prefix:
            drafts = self.drafts(prefix[:-1])
            above = [number for number, token in drafts.items() if token == prefix[-1]]
        width = self.widths[depth]
        drawn = dict[int, int]()
        for number in above:
            first = number * width
            indices = count(first * length + depth, length)
            tokens = self.draw(self.draft_probs(prefix), width, self.chooser, indices)
            drawn |= dict(enumerate(tokens, first))
        return drawn

    def draws(self) -> Draws:
        """Make all draws; return them level by level."""
        levels: list[tuple[Prefix | None, ...]] = []
        above: tuple[Prefix | None, ...] = ((),)
        for width in self.widths:
            level: list[Prefix | None] = [None] * (len(above) * width)
            for prefix in dict.fromkeys(above):
                if prefix is not None:
                    for number, token in self.drafts(prefix).items():
                        level[number] = (*prefix, token)
            above = tuple(level)
            levels.append(above)
        return tuple(levels)


def draw_iid(q: Probs, width: int, chooser: Chooser, indices: "count[int]") -> Sequence[int]:
    """Draw independently; equal draws are one child."""
    return [chooser.choose(q, Purpose.DRAFT, next(indices)) for _ in range(width)]


def draw_wor(q: Probs, count: int, chooser: Chooser, indices: "count[int]") -> Sequence[int]:
    """Draw without replacement, as many as the support holds."""
    drawn: list[int] = []
    left = list(q)
    while len(drawn) < count and any(left):
        drawn.append(chooser.choose(left, Purpose.DRAFT, next(indices)))
        left[drawn[-1]] = 0
    return drawn


def draw_greedy(q: Probs, count: int, chooser: Chooser, indices: "count[int]") -> Sequence[int]:
    """Return the most likely count - 1 tokens, and one drawn from the rest of q where there is."""
    kept = most_likely(q, count - 1)
    return (*kept, *_one_of_the_rest(q, kept, chooser, indices))


def draw_hub(q: Probs, count: int, chooser: Chooser, indices: "count[int]") -> Sequence[int]:
    """Draw SpecHub's pair: one from q, and the hub or, if it is the hub, one from the rest."""
    if count != 2:
        raise InvalidArgument("count", count, "2: SpecHub draws pairs")
    (hub,) = most_likely(q, 1)
    first = chooser.choose(q, Purpose.DRAFT, next(indices))
    if first != hub:
        return (first, hub)
    return (hub, *_one_of_the_rest(q, (hub,), chooser, indices))


def _one_of_the_rest(
    q: Probs, kept: Sequence[int], chooser: Chooser, indices: "count[int]"
) -> Sequence[int]:
    rest = [0 if x in kept else mass for x, mass in enumerate(q)]
    return (chooser.choose(rest, Purpose.DRAFT, next(indices)),) if sum(rest) > 0 else ()


# Walking down a tree: one accept-or-stop step at every node.
@dataclass(frozen=True, slots=True)
class Rejected:
    """The walk stops; the correction token has these weights."""

    weights: Probs


Step: TypeAlias = Callable[[ReferenceTree, Prefix, Chooser], int | Rejected]
"""Decides at an inner node: the child at which the walk goes on."""


def walk_down(tree: ReferenceTree, chooser: Chooser, step: Step) -> Outcome:
    """Take ``step`` at every node until it rejects; after a leaf the bonus token follows p."""
    prefix: Prefix = ()
    while tree.children(prefix):
        decision = step(tree, prefix, chooser)
        if isinstance(decision, Rejected):
            return Outcome(prefix, chooser.choose(decision.weights, Purpose.CORRECTION, 0))
        prefix = (*prefix, decision)
    return Outcome(prefix, chooser.choose(tree.target_probs(prefix), Purpose.CORRECTION, 0))


def accepts_draft(
    tree: ReferenceTree, prefix: Prefix, number: int, h: Number, chooser: Chooser
) -> bool:
    """Accept draw ``number`` of the level below ``prefix``, drawn there, with probability h."""
    return accepts(chooser, h, Purpose.ACCEPTANCE, acceptance_index(tree, prefix, number))


def acceptance_index(tree: ReferenceTree, prefix: Prefix, number: int) -> int:
    """Return the ``ACCEPTANCE`` index of draw ``number`` of the level below ``prefix``."""
    return len(prefix) * tree.most_draws + number
