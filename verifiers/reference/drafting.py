"""Drawing draft trees by law, through a chooser."""

from collections.abc import Sequence
from itertools import count
from typing import Protocol

from eaglegbv.errors import InvalidArgument
from eaglegbv.uniforms import Purpose
from eaglegbv.verifiers.reference.chooser import Chooser
from eaglegbv.verifiers.reference.probs import LawAt, Prefix, Probs, most_likely
from eaglegbv.verifiers.reference.tree import Stop, never


class DrawChildren(Protocol):
    """Draws the children of one node, in draft order."""

    def __call__(
        self, q: Probs, count: int, chooser: Chooser, indices: "count[int]"
    ) -> Sequence[int]:
        """Return up to ``count`` different tokens; ``indices`` numbers the uniforms."""


def draft_iid(
    q: LawAt, paths: int, length: int, chooser: Chooser, stop: Stop = never
) -> tuple[Prefix, ...]:
    """Draw ``paths`` paths independently; ``DRAFT`` index = path * length + depth."""
    drawn = []
    for k in range(paths):
        path: Prefix = ()
        while len(path) < length and not stop(path):
            x = chooser.choose(q(path), Purpose.DRAFT, k * length + len(path))
            path = (*path, x)
        drawn.append(path)
    return tuple(drawn)


def draft_tree(
    draw: DrawChildren,
    q: LawAt,
    widths: Sequence[int],
    chooser: Chooser,
    stop: Stop = never,
) -> tuple[Prefix, ...]:
    """Draw a tree level by level, ``widths[d]`` children below each node of depth d.

    Returns the paths to its leaves, depth first; ``DRAFT`` indices count the draws.
    """
    indices = count()

    def below(prefix: Prefix) -> list[Prefix]:
        depth = len(prefix)
        if depth == len(widths) or stop(prefix):
            return [prefix]
        children = draw(q(prefix), widths[depth], chooser, indices)
        return [leaf for x in children for leaf in below((*prefix, x))]

    return tuple(below(()))


def draw_fixed(q: Probs, count: int, chooser: Chooser, indices: "count[int]") -> Sequence[int]:
    """Return the most likely tokens."""
    del chooser, indices
    return most_likely(q, count)


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
    rest = [0 if x in kept else mass for x, mass in enumerate(q)]
    if not sum(rest) > 0:
        return kept
    return (*kept, chooser.choose(rest, Purpose.DRAFT, next(indices)))


def draw_hub(q: Probs, count: int, chooser: Chooser, indices: "count[int]") -> Sequence[int]:
    """Draw SpecHub's pair: one from q, and the hub or, if it is the hub, one from the rest."""
    if count != 2:
        raise InvalidArgument("count", count, "2: SpecHub draws pairs")
    (hub,) = most_likely(q, 1)
    first = chooser.choose(q, Purpose.DRAFT, next(indices))
    if first != hub:
        return (first, hub)
    rest = [0 if x == hub else mass for x, mass in enumerate(q)]
    if not sum(rest) > 0:
        return (hub,)
    return (hub, chooser.choose(rest, Purpose.DRAFT, next(indices)))
