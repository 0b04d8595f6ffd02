"""One request's draft tree as plain token paths, and the outcome of a verification."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.reference.probs import LawAt, Prefix, Probs

Stop: TypeAlias = Callable[[Prefix], bool]
"""Whether paths end after a prefix (an end-of-sequence token, say)."""


def never(prefix: Prefix) -> bool:
    """Never stop early."""
    del prefix
    return False


@dataclass(frozen=True, slots=True)
class ReferenceTree:
    """The paths drafted for one request, with the laws they were drawn from and are judged by.

    Attributes:
        law: How children arise.
        paths: Tokens of each path below the root, in the order drawn, duplicates kept.
        target_law: p(. | prefix), over the whole vocabulary.
        draft_law: q(. | prefix), over the whole vocabulary, 0 off its support.
        node_numbers: Number of each node in a batched tree, keyed by prefix; by default nodes are
            numbered by depth, then by first path.
        reach: Length the paths were drawn to, unless they stopped early; by default that of the
            longest path.
        stop: The rule by which paths stop early.
    """

    law: Law
    paths: tuple[Prefix, ...]
    target_law: LawAt
    draft_law: LawAt
    node_numbers: Mapping[Prefix, int] = field(default_factory=dict)
    reach: int = 0
    stop: Stop = never

    @property
    def length(self) -> int:
        """Length the paths were drawn to."""
        return self.reach or max(map(len, self.paths), default=0)

    def paths_through(self, prefix: Prefix) -> tuple[int, ...]:
        """Return the numbers of the paths that go on below ``prefix``."""
        depth = len(prefix)
        return tuple(
            k for k, path in enumerate(self.paths) if len(path) > depth and path[:depth] == prefix
        )

    def drafts(self, prefix: Prefix) -> dict[int, int]:
        """Return the draft below ``prefix`` of each path that goes on: path number -> token."""
        depth = len(prefix)
        return {k: self.paths[k][depth] for k in self.paths_through(prefix)}

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


def from_draft_tree(tree: DraftTree, target: TargetLaw, request: int) -> ReferenceTree:
    """Return request number ``request`` of a batch; laws exactly as the batch holds them."""
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
    def target_law(prefix: Prefix) -> Probs:
        node = tree.parents.new_full((tree.batch,), numbers[prefix])
        return tuple(target.probs_of(node)[request].tolist())

    @cache
    def draft_law(prefix: Prefix) -> Probs:
        law = [0.0] * target.vocab
        node = numbers[prefix]
        ids = tree.draft_ids[request, node].tolist()
        for token, mass in zip(ids, tree.draft_probs[request, node].tolist(), strict=True):
            if mass > 0:
                law[token] = mass
        return tuple(law)

    return ReferenceTree(tree.law, paths, target_law, draft_law, numbers)
