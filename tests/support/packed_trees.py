"""Texts with draft trees behind them, served step by step as an engine would: for target tests."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eaglegbv.attention.base import Segment
from eaglegbv.attention.kv_cache import SlotAllocator
from eaglegbv.models.target import TargetOutput
from support.tiny_models import VOCAB


@dataclass
class Text:
    """One request: its committed tokens with their slots, and the tree in flight."""

    tokens: list[int]
    slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    nodes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    tree_slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def prefill(self, allocator: SlotAllocator, generator: torch.Generator) -> Segment:
        """The whole text, in slots of any order."""
        self.slots = scattered(allocator, len(self.tokens), generator)
        return Segment.causal(torch.tensor(self.tokens), self.slots[:0], self.slots)

    def path(self, node: int) -> list[int]:
        return [0] if node == 0 else [*self.path(self.parents[node]), node]

    def text_at(self, node: int) -> list[int]:
        return self.tokens + [self.nodes[i] for i in self.path(node)]

    def tree(self, nodes: Sequence[int], parents: Sequence[int], slots: Tensor) -> Segment:
        self.nodes, self.parents, self.tree_slots = list(nodes), list(parents), slots
        visible = torch.zeros((len(nodes), len(nodes)), dtype=torch.bool)
        for node in range(len(nodes)):
            visible[node, self.path(node)] = True
        positions = len(self.tokens) + visible.sum(1) - 1
        return Segment(torch.tensor(self.nodes), positions, self.slots, slots, positions, visible)

    def commit(self, node: int, allocator: SlotAllocator) -> None:
        """Keep the path to ``node`` where it lies and free every other node's slot."""
        path = self.path(node)
        self.tokens = self.text_at(node)
        self.slots = torch.cat((self.slots, self.tree_slots[path]))
        others = [i for i in range(len(self.nodes)) if i not in path]
        allocator.release(self.tree_slots[others])


def random_tokens(count: int, generator: torch.Generator) -> list[int]:
    """Return random tokens of the tiny models."""
    return torch.randint(VOCAB, (count,), generator=generator).tolist()


def random_tree(
    text: Text, count: int, allocator: SlotAllocator, generator: torch.Generator
) -> Segment:
    """Return a random tree of random tokens behind a text, in slots of any order."""
    tokens, parents = random_tokens(count, generator), random_parents(count, generator)
    return text.tree(tokens, parents, scattered(allocator, count, generator))


def scattered(allocator: SlotAllocator, count: int, generator: torch.Generator) -> Tensor:
    """Allocate ``count`` slots and hand them out in a random order."""
    return allocator.allocate(count)[torch.randperm(count, generator=generator)]


def random_parents(count: int, generator: torch.Generator) -> list[int]:
    """Return a random tree of ``count`` nodes: every parent precedes its child."""
    draws = torch.rand(count, generator=generator)
    return [int(draws[i] * i) for i in range(count)]


def assert_same(found: TargetOutput, expected: TargetOutput, **tolerance: float) -> None:
    """Check logits and features, if there are any."""
    torch.testing.assert_close(found.logits, expected.logits, **tolerance)
    torch.testing.assert_close(found.features, expected.features, **tolerance)
