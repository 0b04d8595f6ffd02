from collections import Counter

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batched_trees import build_batch, target_of
from support.grown_trees import prefixes
from support.references import draws_of_paths

from eaglegbv.tree import DraftSampling, WarpedLogits
from eaglegbv.verifiers.proof.tree import ReferenceTree

# --- draft trees against their definition, on random tries
PATHS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5
)
BATCHES = st.lists(PATHS, min_size=1, max_size=3)


def tree_of(batch):
    """The tries of a batch of path lists, padded; and for each tree the prefix of every node."""

    def flat(prefix):
        return (1 / 3,) * 3

    trees = [ReferenceTree(DraftSampling.IID, draws_of_paths(paths), flat, flat) for paths in batch]
    built = build_batch(trees, 3, np.random.default_rng(0)).tree
    return built, [prefixes(built, b) for b in range(len(batch))]


@given(batch=BATCHES)
def test_draws_are_counted_where_they_lead_and_where_they_are_made(batch):
    tree, tries = tree_of(batch)
    multiplicity = tree.multiplicity()
    assert multiplicity.dtype == torch.int64
    for b, (paths, own) in enumerate(zip(batch, tries, strict=True)):
        through = Counter(path[:d] for path in paths for d in range(1, len(path) + 1))
        expected = [len(paths), *(through[prefix] for prefix in own[1:])]
        padding = [0] * (tree.nodes - len(own))
        assert multiplicity[b].tolist() == expected + padding
        ended = Counter(paths)
        expected = [count - ended[prefix] for count, prefix in zip(expected, own, strict=True)]
        assert tree.draft_counts()[b].tolist() == expected + padding


@given(batch=BATCHES)
def test_the_ancestor_mask_says_whose_prefix_is_whose(batch):
    tree, tries = tree_of(batch)
    mask = tree.ancestor_mask()
    assert mask.dtype == torch.bool
    assert mask.shape == (tree.batch, tree.nodes, tree.nodes)
    for b, own in enumerate(tries):
        for i, node in enumerate(own):
            expected = [node[: len(other)] == other for other in own]
            assert mask[b, i, : len(own)].tolist() == expected
        # No real node sees padding; a padding node sees the root and itself, so that a softmax
        # over what it sees is no division by zero.
        assert not mask[b, : len(own), len(own) :].any()
        for i in range(len(own), tree.nodes):
            assert mask[b, i].nonzero().flatten().tolist() == [0, i]


# --- the target's distribution kept as logits: the same numbers as a softmax, at the right nodes
BATCH, NODES, VOCAB = 3, 4, 50
# Padding nodes repeat the root's row.
ROWS = torch.tensor([[0, 1, 2, 0], [3, 4, 5, 6], [7, 7, 7, 7]])


def test_probabilities_are_the_softmax_of_each_nodes_own_row():
    logits = 4 * torch.randn((8, VOCAB), generator=torch.Generator().manual_seed(0))
    logits[:, 10:20] = -torch.inf
    dist = WarpedLogits.of(logits, ROWS)
    expected = logits.double().softmax(1)[ROWS]
    assert dist.vocab == VOCAB
    assert dist.log_normaliser.dtype == torch.float64
    ids = torch.randint(
        0, VOCAB, (BATCH, NODES, 7), generator=torch.Generator().manual_seed(1), dtype=torch.int64
    )
    got = dist.probs_in(ROWS, ids)
    assert got.dtype == torch.float64
    # The normaliser is summed in float32 and of size 10: its rounding is 10 * 6e-8 relative.
    torch.testing.assert_close(got, expected.gather(2, ids), atol=0, rtol=1e-6)
    for node in range(NODES):
        whole = dist.probs_of(torch.full((BATCH,), node))
        torch.testing.assert_close(whole, expected[:, node], atol=0, rtol=1e-6)


def test_probabilities_of_a_table_come_back_with_their_zeros():
    probs = torch.rand(
        (BATCH, NODES, VOCAB), generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    probs[:, :, :5] = 0
    probs /= probs.sum(2, keepdim=True)
    dist = target_of(probs)
    for node in range(NODES):
        whole = dist.probs_of(torch.full((BATCH,), node))
        # exp(log p) in float64: |log p| < 20 times 1e-16
        torch.testing.assert_close(whole, probs[:, node], atol=0, rtol=1e-14)
        assert (whole[:, :5] == 0).all()
