"""Texts with draft trees behind them, served step by step as an engine would: for target tests."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from eaglegbv.attention.base import Segment
from eaglegbv.attention.kv_cache import SlotAllocator
from support.ragged_batches import tree_segment
from support.tiny_models import VOCAB


@dataclass
class Text:
    """One request: its committed tokens with their slots, and the tree in flight."""

    tokens: list[int]
    slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    nodes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    tree_slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def prefill(self, slots: Tensor) -> Segment:
        segment = Segment.causal(torch.tensor(self.tokens), self.slots, slots)
        self.slots = slots
        return segment

    def path(self, node: int) -> list[int]:
        return [0] if node == 0 else [*self.path(self.parents[node]), node]

    def text_at(self, node: int) -> list[int]:
        return self.tokens + [self.nodes[i] for i in self.path(node)]

    def tree(self, nodes: Sequence[int], parents: Sequence[int], slots: Tensor) -> Segment:
        self.nodes, self.parents, self.tree_slots = list(nodes), list(parents), slots
        segment = tree_segment(torch.cat((self.slots, slots)), len(self.tokens), parents)
        return replace(segment, token_ids=torch.tensor(self.nodes))

    def commit(self, node: int, allocator: SlotAllocator) -> None:
        """Keep the path to ``node`` where it lies and free every other node's slot."""
        path = self.path(node)
        self.tokens = self.text_at(node)
        self.slots = torch.cat((self.slots, self.tree_slots[path]))
        others = [i for i in range(len(self.nodes)) if i not in path]
        allocator.release(self.tree_slots[others])


def scattered(allocator: SlotAllocator, count: int, generator: torch.Generator) -> Tensor:
    """Allocate ``count`` slots and hand them out in a random order."""
    return allocator.allocate(count)[torch.randperm(count, generator=generator)]


def random_parents(count: int, generator: torch.Generator) -> list[int]:
    """Return a random tree of ``count`` nodes: every parent precedes its child."""
    draws = torch.rand(count, generator=generator)
    return [int(draws[i] * i) for i in range(count)]


def random_tokens(count: int, generator: torch.Generator) -> list[int]:
    tokens: list[int] = torch.randint(VOCAB, (count,), generator=generator).tolist()
    return tokens


def prefills(
    texts: Sequence[Text], allocator: SlotAllocator, generator: torch.Generator
) -> list[Segment]:
    """Read all texts, in scattered slots."""
    return [text.prefill(scattered(allocator, len(text.tokens), generator)) for text in texts]


def random_trees(
    texts: Sequence[Text],
    counts: Sequence[int],
    allocator: SlotAllocator,
    generator: torch.Generator,
) -> list[Segment]:
    """Random trees of so many nodes behind each text, in scattered slots."""
    return [
        text.tree(
            random_tokens(count, generator),
            random_parents(count, generator),
            scattered(allocator, count, generator),
        )
        for text, count in zip(texts, counts, strict=True)
    ]
