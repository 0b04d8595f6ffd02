"""One request's draft tree as plain token paths, and the outcome of a verification."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import TypeAlias

from eaglegbv.errors import InvalidArgument
from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
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


@dataclass(frozen=True, slots=True)
class ReferenceTree:
    """The paths drafted for one request, with what they were drawn from and are judged by."""

    draft_sampling: DraftSampling  # how children arise
    # tokens of each path below the root, in the order drawn, duplicates kept
    paths: tuple[Prefix, ...]
    target_probs: ProbsAt  # p(. | prefix), over the whole vocabulary
    draft_probs: ProbsAt  # q(. | prefix), over the whole vocabulary, 0 off its support
    # number of each node in a batched tree, keyed by prefix; by default nodes are numbered by
    # depth, then by first path
    node_numbers: Mapping[Prefix, int] = field(default_factory=dict)
    # length the paths were drawn to, unless they stopped early; by default that of the longest path
    reach: int = 0
    stop: Stop = never  # the rule by which paths stop early

    @property
    def length(self) -> int:
        """Length the paths were drawn to."""
        return self.reach or max(map(len, self.paths), default=0)

    def drafts(self, prefix: Prefix) -> dict[int, int]:
        """Return the draft below ``prefix`` of each path that goes on: path number -> token."""
        depth = len(prefix)
        below = {k: path[depth:] for k, path in enumerate(self.paths) if path[:depth] == prefix}
        return {k: rest[0] for k, rest in below.items() if rest}

    def children(self, prefix: Prefix) -> dict[int, int]:
        """Return the children of a node: token -> number of the first path through it."""
        children: dict[int, int] = {}
        for k, token in self.drafts(prefix).items():
            children.setdefault(token, k)
        return children

    def nodes(self) -> dict[Prefix, int]:
        """Return every node below the root with its number."""
        if self.node_numbers:
            return {prefix: n for prefix, n in self.node_numbers.items() if prefix}
        prefixes = (
            path[:depth]
            for depth in range(1, max(map(len, self.paths), default=0) + 1)
            for path in self.paths
            if len(path) >= depth
        )
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


def from_draft_tree(tree: DraftTree, target: TargetProbs, request: int) -> ReferenceTree:
    """Return request number ``request`` of a batch, with exactly the numbers the batch holds."""
    tokens = tree.token_ids[request].tolist()
    parents = tree.parents[request].tolist()
    prefixes: list[Prefix] = [()]
    for node in range(1, int(tree.num_nodes[request])):
        prefixes.append((*prefixes[parents[node]], tokens[node]))
    numbers = {prefix: node for node, prefix in enumerate(prefixes)}
    lengths = tree.path_lengths[request].tolist()
    paths = tuple(
        prefixes[nodes[length - 1]] if length else ()
        for nodes, length in zip(tree.path_nodes[request].tolist(), lengths, strict=True)
    )

    @cache
    def target_probs(prefix: Prefix) -> Probs:
        node = tree.parents.new_full((tree.batch,), numbers[prefix])
        return tuple(target.probs_of(node)[request].tolist())

    @cache
    def draft_probs(prefix: Prefix) -> Probs:
        probs = [0.0] * target.vocab
        node = numbers[prefix]
        ids = tree.draft_ids[request, node].tolist()
        for token, mass in zip(ids, tree.draft_probs[request, node].tolist(), strict=True):
            if mass > 0:
                probs[token] = mass
        return tuple(probs)

    return ReferenceTree(tree.draft_sampling, paths, target_probs, draft_probs, numbers)


DrawChildren: TypeAlias = Callable[[Probs, int, Chooser, "count[int]"], Sequence[int]]
"""Draws up to so many different children of one node from q, in draft order; the last argument
numbers the uniforms."""


def draft_iid(
    q: ProbsAt, paths: int, length: int, chooser: Chooser, stop: Stop = never
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
    draw: DrawChildren, q: ProbsAt, widths: Sequence[int], chooser: Chooser, stop: Stop = never
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
"""Decides at an inner node: the child at which the walk goes on, with every path through it."""


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
    tree: ReferenceTree, prefix: Prefix, path: int, h: Number, chooser: Chooser
) -> bool:
    """Accept the draft that path number ``path`` carries below ``prefix`` with probability h."""
    return accepts(chooser, h, Purpose.ACCEPTANCE, acceptance_index(tree, prefix, path))


def acceptance_index(tree: ReferenceTree, prefix: Prefix, path: int) -> int:
    """Return the ``ACCEPTANCE`` index of a draft below ``prefix``."""
    return len(prefix) * len(tree.paths) + path
