"""A lone request's attention, as operations of a graph, is what paged attention is."""

import copy

import pytest
import torch
from torch import Tensor

from eaglegbv.attention.base import Segment, pack
from eaglegbv.attention.kv_pool import KVPool
from eaglegbv.attention.lone import attend_lone, attends_alone, lone_keys, path_keys
from eaglegbv.attention.torch_paged import TorchPagedAttention

HEADS, KV_HEADS, DIM, SLOTS, LAYER = 4, 2, 8, 64, 1
SCALE = 0.37
SHUFFLED = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(0))

TREE = torch.tensor(
    [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, True, False],
        [True, False, True, True],
    ]
)
DEPTHS = torch.tensor([0, 1, 1, 2])


def tree(context: int, *, old: int = 0) -> Segment:
    """A tree of four nodes, the first ``old`` of which are there already."""
    return Segment(
        token_ids=torch.zeros(4 - old, dtype=torch.int64),
        positions=context + DEPTHS[old:],
        context_slots=SHUFFLED[:context],
        tree_slots=SHUFFLED[context : context + 4],
        tree_positions=context + DEPTHS,
        visible=TREE[old:],
    )


def text(context: int, count: int) -> Segment:
    tokens = torch.zeros(count, dtype=torch.int64)
    return Segment.causal(tokens, SHUFFLED[:context], SHUFFLED[context : context + count])


SEGMENTS = {
    "the first token": text(0, 1),
    "the second": text(1, 1),
    "a token behind many": text(30, 1),
    "a text": text(0, 9),
    "more of a text": text(7, 5),
    "a tree": tree(12),
    "a tree's second level": tree(12, old=1),
    "a tree's last node": tree(12, old=3),
}


def filled_pool() -> KVPool:
    pool = KVPool(2, SLOTS, KV_HEADS, DIM, torch.float32)
    generator = torch.Generator().manual_seed(6)
    pool.keys.normal_(generator=generator)
    pool.values.normal_(generator=generator)
    return pool


def rows(count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn((count, heads, DIM), generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return q, k, v


@pytest.mark.parametrize("segment", SEGMENTS.values(), ids=SEGMENTS)
def test_equals_paged_attention(segment: Segment) -> None:
    pool = filled_pool()
    same = copy.deepcopy(pool)
    q, k, v = rows(segment.num_new)
    ours = attend_lone(q, k, v, over=lone_keys(segment, pool, LAYER), scale=SCALE)
    expected = TorchPagedAttention(same).attend(LAYER, q, k, v, pack([segment]), scale=SCALE)
    torch.testing.assert_close(ours, expected)
    assert torch.equal(pool.keys, same.keys)
    assert torch.equal(pool.values, same.values)


@pytest.mark.parametrize("segment", SEGMENTS.values(), ids=SEGMENTS)
def test_what_the_request_does_not_own_is_not_read(segment: Segment) -> None:
    pool = filled_pool()
    foreign = torch.ones(SLOTS, dtype=torch.bool)
    foreign[segment.key_slots()] = False
    pool.keys[LAYER, foreign] = torch.nan
    pool.values[LAYER, foreign] = torch.nan
    q, k, v = rows(segment.num_new)
    out = attend_lone(q, k, v, over=lone_keys(segment, pool, LAYER), scale=SCALE)
    assert out.isfinite().all()


def test_is_for_a_few_rows_of_one_request_on_a_cpu() -> None:
    pool = filled_pool()
    elsewhere = KVPool(2, SLOTS, KV_HEADS, DIM, torch.float32, torch.device("meta"))
    assert attends_alone([text(3, 1)], pool)
    assert attends_alone([tree(12)], pool)
    assert not attends_alone([tree(12)], elsewhere)
    assert not attends_alone([tree(12), tree(30)], pool)
    assert not attends_alone([text(0, 40)], pool)


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("context", [1, 12])
def test_rows_of_a_path_see_what_they_do_one_by_one(context: int, count: int) -> None:
    pool = filled_pool()
    slots = SHUFFLED[context : context + count]
    path = path_keys(SHUFFLED[:context], slots, pool, LAYER)
    assert len(path) == count
    for row, keys in enumerate(path):
        token = torch.zeros(1, dtype=torch.int64)
        before = SHUFFLED[: context + row]
        alone = lone_keys(Segment.causal(token, before, slots[row : row + 1]), pool, LAYER)
        for own, expected in zip(keys, alone, strict=True):
            assert torch.equal(own, expected)
            assert own.stride() == expected.stride()
