"""Forwards padded to buckets, and replayed, compute what plain forwards do."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.packed_trees import Text, assert_same, random_tokens, random_tree
from support.tiny_models import tiny_model
from torch import Tensor

from eaglegbv.attention.base import AttentionCall, PackedBatch
from eaglegbv.attention.torch import TorchPagedAttention
from eaglegbv.cuda_graphs import MAX_ROWS, Bucket, GraphMode, NotRecordable, Recorder
from eaglegbv.errors import InvalidArgument
from eaglegbv.models.hf import HFTarget
from eaglegbv.models.target import TargetOutput

FEATURES = (1, 3)


def llama(graphs: GraphMode | Recorder, **how: Any) -> HFTarget:
    return HFTarget(tiny_model("llama"), features=FEATURES, max_slots=1024, graphs=graphs, **how)


@pytest.fixture(scope="module")
def plain() -> HFTarget:
    return llama(GraphMode.OFF)


@pytest.fixture(scope="module")
def padded() -> HFTarget:
    return llama(GraphMode.EAGER)


Batch = list[tuple[int, int]]
"""Tokens before the root, and nodes, of each request."""

batches = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=5)


def tree_outputs(target: HFTarget, batch: Batch, seed: int) -> TargetOutput:
    """Read the texts, then their trees; the results of the trees, and everything freed again."""
    generator = torch.Generator().manual_seed(seed)
    texts = [Text(random_tokens(count, generator)) for count, _ in batch]
    target.forward([text.prefill(target.allocator, generator) for text in texts])
    segments = [
        random_tree(text, nodes, target.allocator, generator)
        for text, (_, nodes) in zip(texts, batch, strict=True)
    ]
    rows = torch.arange(sum(nodes for _, nodes in batch))
    found = target.forward(segments, logit_rows=rows)
    assert found.features is not None
    for text in texts:
        target.allocator.release(torch.cat((text.slots, text.tree_slots)))
    return TargetOutput(found.logits.clone(), found.features.clone())


def check_same(found: TargetOutput, expected: TargetOutput) -> None:
    assert_same(found, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(found.logits.argmax(1), expected.logits.argmax(1))


@given(batch=batches, seed=st.integers(0, 2**31))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_padded_forwards_equal_plain_ones(plain, padded, batch, seed):
    before = padded.graph_counts["replayed"]
    # Other tests read texts of their own into these pools.
    for target in (plain, padded):
        target.pool.keys.zero_()
    check_same(tree_outputs(padded, batch, seed), tree_outputs(plain, batch, seed))
    assert padded.graph_counts["replayed"] == before + 1
    # The same slots hold the same keys: padding wrote to the spare one alone.
    torch.testing.assert_close(padded.pool.keys[:, :-1], plain.pool.keys, atol=1e-4, rtol=1e-4)


def test_what_is_not_padded_is_counted_by_reason():
    target = llama(GraphMode.EAGER)
    tree_outputs(target, [(3, 2)], 0)
    assert target.graph_counts == {"prefill": 1, "replayed": 1}
    tree_outputs(target, [(3, MAX_ROWS)], 0)
    assert target.graph_counts["too many rows"] == 1
    # A prompt beside a tree: the whole forward runs as it is.
    generator = torch.Generator().manual_seed(0)
    text, other = Text([1, 2, 3]), Text([4, 5])
    target.forward([text.prefill(target.allocator, generator)])
    trees = random_tree(text, 1, target.allocator, generator)
    target.forward([trees, other.prefill(target.allocator, generator)])
    assert target.graph_counts == {"prefill": 4, "replayed": 1, "too many rows": 1}
    assert llama(GraphMode.OFF).graph_counts == {}


def test_graphs_are_refused_on_a_cpu_and_left_out_by_default():
    with pytest.raises(InvalidArgument, match=r"cuda_graphs='on'.*need a CUDA device"):
        llama(GraphMode.ON)
    target = llama(GraphMode.AUTO)
    tree_outputs(target, [(3, 2)], 0)
    assert target.graph_counts == {}


class Obstinate(TorchPagedAttention):
    """Attention that cannot be recorded for batches of one size, as it turns out."""

    refusing = False

    def attend(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch):
        if self.refusing and batch.rows == 8:
            raise NotRecordable("sinks")
        return super().attend(call, q, k, v, batch)


def test_what_cannot_be_recorded_runs_as_it_is_from_then_on(plain):
    target = llama(GraphMode.EAGER, attention=Obstinate)
    assert isinstance(target.attention, Obstinate)
    target.attention.refusing = True
    for batch in ([(3, 2)], [(4, 5)], [(4, 20)]):
        check_same(tree_outputs(target, batch, 1), tree_outputs(plain, batch, 1))
    # The first two are of one size; the last is of another.
    assert target.graph_counts == {"prefill": 3, "sinks": 2, "replayed": 1}


@given(st.integers(1, 64), st.integers(1, 300))
def test_buckets_hold_what_they_are_made_for(requests, extra):
    rows = requests + extra
    bucket = Bucket.holding(requests, rows)
    pads = (1 << (requests - 1).bit_length()) + 1 - requests
    if rows + pads > MAX_ROWS:
        assert bucket is None
        return
    assert bucket is not None
    # Every request that pads has a row, and at least one does.
    assert bucket.requests >= requests
    assert bucket.rows - rows >= bucket.requests + 1 - requests >= 1
    assert bucket.rows < 1.5 * (rows + pads) + 8
