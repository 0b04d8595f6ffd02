"""Ragged batches of trees, prompts and texts, and pools of random contents for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eaglegbv.attention.base import Segment
from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.cuda_graphs import Bucket

SLOTS, LAYERS = 1024, 2
SCALE = 0.11
SHUFFLED = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(0))
PARENTS = [0, 0, 0, 1, 1, 2, 3]


@dataclass(frozen=True)
class Sizes:
    """What keys, values and queries are made of."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16


SIZES = Sizes(heads=4, kv_heads=2, head_dim=64)


def tree(first: int, context: int, nodes: int, *, old: int = 0) -> Segment:
    """A tree behind ``context`` tokens whose first ``old`` nodes are there already."""
    return tree_segment(SHUFFLED[first:], context, PARENTS[:nodes], old=old)


def tree_segment(slots: Tensor, context: int, parents: Sequence[int], *, old: int = 0) -> Segment:
    """A tree of these parents behind ``context`` tokens, in the first of ``slots``."""
    count = len(parents)
    visible = torch.eye(count, dtype=torch.bool)
    for node in range(1, count):
        visible[node] |= visible[parents[node]]
    positions = context + visible.sum(1) - 1
    return Segment(
        token_ids=torch.zeros(count - old, dtype=torch.int64),
        positions=positions[old:],
        context_slots=slots[:context],
        tree_slots=slots[context : context + count],
        tree_positions=positions,
        visible=visible[old:],
    )


def text(first: int, context: int, count: int) -> Segment:
    slots = SHUFFLED[first : first + context + count]
    return Segment.causal(torch.zeros(count, dtype=torch.int64), slots[:context], slots[context:])


BATCHES = {
    "one tree": [tree(0, 5, 7)],
    "ragged trees": [tree(0, 5, 7), tree(20, 13, 3), tree(50, 1, 1), tree(60, 31, 5)],
    "trees and a prompt": [tree(0, 6, 4), text(40, 0, 9), text(80, 11, 3)],
    "a later level": [tree(0, 9, 7, old=3), tree(30, 2, 7, old=5)],
    "prompts": [text(0, 0, 9), text(30, 4, 6), text(60, 0, 1)],
    "plain decoding": [text(0, 8, 1), text(30, 3, 1), text(60, 17, 1)],
    "long texts": [tree(0, 400, 7), tree(410, 150, 3), text(570, 300, 1)],
    "plain decoding of long texts": [text(0, 400, 1), text(410, 150, 1), text(570, 300, 1)],
}


def pools(device: str = "cpu", *, sizes: Sizes = SIZES) -> list[KVPool]:
    """Two pools of the same random contents."""
    made = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(3)
        pool = KVPool(LAYERS, SLOTS, sizes.kv_heads, sizes.head_dim, sizes.dtype, device)
        pool.keys.copy_(torch.randn(pool.keys.shape, generator=generator))
        pool.values.copy_(torch.randn(pool.values.shape, generator=generator))
        made.append(pool)
    return made


def new_rows(
    rows: int, device: str = "cpu", *, sizes: Sizes = SIZES
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn((rows, heads, sizes.head_dim), generator=generator).to(device, sizes.dtype)
        for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    )
    return q, k, v


def leaves(text: Tensor, count: int) -> Segment:
    """``count`` nodes behind a text, each of which sees itself alone."""
    nodes = torch.arange(count)
    return Segment(
        nodes, nodes + len(text), text, nodes, nodes + len(text), torch.eye(count, dtype=torch.bool)
    )


def padded(segments: list[Segment]) -> tuple[list[Segment], Bucket]:
    """Pad a batch as a bucket is, by a request of one row."""
    rows = sum(segment.num_new for segment in segments)
    return [*segments, leaves(torch.arange(0), 1)], Bucket(len(segments), rows + 1)
