"""Paged attention against a definition written out token by token."""

from typing import Any

import pytest
import torch
from support.ragged_batches import BATCHES as RAGGED
from support.ragged_batches import (
    PARENTS,
    SHUFFLED,
    SLOTS,
    Sizes,
    new_rows,
    pools,
    tree,
    tree_segment,
)
from torch import Tensor

from eaglegbv.attention.base import AttentionCall, PackedBatch, Segment, pack
from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.attention.torch import TorchPagedAttention
from eaglegbv.errors import InvalidArgument

HEADS, KV_HEADS = 4, 2
SIZES = Sizes(HEADS, KV_HEADS, 8, torch.float32)
CALL = AttentionCall(0, 0.37)


def define(q: Tensor, pool: KVPool, batch: PackedBatch, call: AttentionCall) -> Tensor:
    """Attention by its definition, in float64, one query and head at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    row = 0
    for segment in batch.segments:
        c, old = segment.num_context, segment.num_pending - segment.num_new
        slots = segment.context_slots.tolist() + segment.tree_slots.tolist()
        positions = list(range(c)) + segment.tree_positions.tolist()
        for i, position in enumerate(segment.positions.tolist()):
            seen = []
            for key, (slot, at) in enumerate(zip(slots, positions, strict=True)):
                ok = key <= c + old + i
                if segment.visible is not None:
                    ok = key < c or bool(segment.visible[i, key - c])
                if ok and (call.window is None or position - at < call.window):
                    seen.append(slot)
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                keys, values = pool.keys[0, seen, kv].double(), pool.values[0, seen, kv].double()
                scores = keys @ q[row, head].double() * call.scale
                if call.softcap is not None:
                    scores = call.softcap * torch.tanh(scores / call.softcap)
                if call.sinks is not None:
                    scores = torch.cat((scores, call.sinks[head : head + 1].double()))
                weights = scores.softmax(0)[: len(seen)]
                out[row, head] = weights @ values
            row += 1
    return out


def prompt(slots: Tensor, context: int, count: int) -> Segment:
    tokens = torch.zeros(count, dtype=torch.int64)
    return Segment.causal(tokens, slots[:context], slots[context : context + count])


SEQUENTIAL = torch.arange(SLOTS)
PERMUTED = torch.cat((torch.randperm(40, generator=torch.Generator().manual_seed(1)), SEQUENTIAL))

BATCHES = RAGGED | {
    "prefill, slots in order": [prompt(SEQUENTIAL + 3, 0, 9)],
    "prefill, a permuted range": [prompt(PERMUTED, 0, 40)],
    "prefill, scattered": [prompt(SHUFFLED, 0, 9)],
    "chunked prefill": [prompt(SEQUENTIAL, 6, 5)],
    "one token, scattered": [prompt(SHUFFLED, 9, 1)],
    "tree, a range": [tree_segment(PERMUTED, 33, PARENTS)],
    "a tree of many nodes": [tree_segment(SHUFFLED, 12, [0, *range(20), *range(9)])],
    "draft extension behind pending tokens": [
        Segment(
            token_ids=torch.zeros(2, dtype=torch.int64),
            positions=torch.tensor([7, 8]),
            context_slots=SHUFFLED[:5],
            tree_slots=SHUFFLED[5:9],
            tree_positions=torch.tensor([5, 6, 7, 8]),
        )
    ],
    "equal trees": [tree(0, 12, 7), tree(60, 12, 7)],
    "trees beside a prompt": [
        tree(0, 3, 2),
        prompt(SHUFFLED[30:], 0, 60),
        tree(160, 4, 3),
        prompt(SHUFFLED[200:], 9, 1),
    ],
}
CALLS = {
    "plain": CALL,
    "window": CALL._replace(window=4),
    "softcap and window": CALL._replace(softcap=0.8, window=4),
    "sinks": CALL._replace(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


def attend(attention: TorchPagedAttention, batch: PackedBatch, call: AttentionCall) -> Tensor:
    q, k, v = new_rows(batch.rows, sizes=SIZES)
    return attention.attend(call, q, k, v, batch)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("segments", BATCHES.values(), ids=BATCHES)
def test_equals_its_definition(segments, call):
    pool = pools(sizes=SIZES)[0]
    batch = pack(segments)
    out = attend(TorchPagedAttention(pool), batch, call)
    q, k, v = new_rows(batch.rows, sizes=SIZES)
    assert torch.equal(pool.keys[0, batch.slots], k)
    assert torch.equal(pool.values[0, batch.slots], v)
    torch.testing.assert_close(out.double(), define(q, pool, batch, call), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("segments", BATCHES.values(), ids=BATCHES)
def test_a_request_never_reads_what_it_does_not_own(segments):
    pool = pools(sizes=SIZES)[0]
    owned = torch.cat([s.key_slots() for s in segments]).unique()
    foreign = torch.ones(SLOTS, dtype=torch.bool).index_fill_(0, owned, value=False)
    pool.keys[0, foreign] = torch.nan
    pool.values[0, foreign] = torch.nan
    assert attend(TorchPagedAttention(pool), pack(segments), CALL).isfinite().all()


def test_a_broken_request_stays_alone():
    pool = pools(sizes=SIZES)[0]
    broken, sound = tree(0, 12, 7), tree(60, 30, 2)
    pool.keys[0, broken.context_slots] = torch.nan
    pool.values[0, broken.context_slots] = torch.nan
    batch = pack([broken, sound])
    out = attend(TorchPagedAttention(pool), batch, CALL)
    assert out[: batch.offsets[1]].isnan().all()
    assert out[batch.offsets[1] :].isfinite().all()


class Counting(TorchPagedAttention):
    """Counts the keys that are read, padding and all, and the calls."""

    keys = calls = 0

    def _read(self, *args: Any) -> tuple[Tensor, Tensor]:
        keys, values = super()._read(*args)
        self.calls += 1
        self.keys += keys.shape[0] * keys.shape[1]
        return keys, values


@pytest.mark.parametrize(
    ("contexts", "calls"),
    [
        ([150] * 15 + [5000], 2),  # a long text pads nobody else's keys
        ([90, 100, 110, 120] * 4, 1),  # texts of about the same length share a call
        ([10] * 8 + [500] * 4 + [3000] * 2, 3),
        ([20_000] * 4, 2),  # what is gathered at once stays within caches
    ],
)
def test_padding_costs_no_more_than_further_calls(contexts, calls):
    attention = Counting(KVPool(1, sum(contexts) + len(contexts), KV_HEADS, 8, torch.float32))
    ends = torch.tensor(contexts).add(1).cumsum(0).tolist()
    batch = pack(
        [
            prompt(torch.arange(end - context - 1, end), context, 1)
            for context, end in zip(contexts, ends, strict=True)
        ]
    )
    out = attend(attention, batch, CALL)
    assert out.shape[0] == len(contexts)
    assert attention.calls == calls
    assert attention.keys < 1.5 * sum(contexts)


def test_one_long_text_is_read_alone_beside_trees_of_short_ones():
    news = [1, *[2 + n % 8 for n in range(15)]]
    contexts = [30_000, *[100] * 15]
    pool = KVPool(1, sum(news) + sum(contexts), KV_HEADS, 8, torch.float32)
    attention = Counting(pool)
    slots = torch.arange(pool.num_slots).split([n + c for n, c in zip(news, contexts, strict=True)])
    segments = [prompt(own, c, n) for own, c, n in zip(slots, contexts, news, strict=True)]
    out = attend(attention, pack(segments), CALL)
    assert out.shape[0] == sum(news)
    assert attention.keys < 1.5 * (sum(contexts) + sum(news))


def test_bad_segments():
    one, two = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(InvalidArgument, match="at least one segment"):
        pack([])
    with pytest.raises(InvalidArgument, match="token_ids=2"):
        Segment(two, two, one, one, one)
    with pytest.raises(InvalidArgument, match="token_ids=0"):
        Segment(one[:0], one[:0], one, one, one)
    with pytest.raises(InvalidArgument, match="positions"):
        Segment(one, two, one, two, two)
    with pytest.raises(InvalidArgument, match="tree_positions"):
        Segment(one, one, one, two, one)
    with pytest.raises(InvalidArgument, match="visible"):
        Segment(one, one, one, one, one, torch.ones((1, 2), dtype=torch.bool))
