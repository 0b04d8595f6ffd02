"""Draft trees, and the target's probabilities at their nodes."""

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tree_check import check_tree

from eaglegbv.errors import InvalidArgument
from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs

# Draft trees against their definition, on random tries, and what the check refuses.


PATHS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5
)
BATCHES = st.lists(PATHS, min_size=1, max_size=3)


def tree_of(batch, *, spare_nodes=0):
    """The tries of a batch of path lists, padded; and for each tree the prefix of every node."""
    tries = []
    for paths in batch:
        prefixes = [()]
        for depth in range(1, max(map(len, paths)) + 1):
            level = [path[:depth] for path in paths if len(path) >= depth]
            prefixes += [prefix for prefix in dict.fromkeys(level) if prefix not in prefixes]
        tries.append(prefixes)
    nodes = max(map(len, tries)) + spare_nodes
    length = max(len(path) for paths in batch for path in paths)
    count = max(map(len, batch))
    ids, parents, depth, path_nodes, lengths = [], [], [], [], []
    for paths, prefixes in zip(batch, tries, strict=True):
        number = {prefix: node for node, prefix in enumerate(prefixes)}
        padding = [0] * (nodes - len(prefixes))
        ids.append([7, *(prefix[-1] for prefix in prefixes[1:]), *padding])
        parents.append([0, *(number[prefix[:-1]] for prefix in prefixes[1:]), *padding])
        depth.append([*map(len, prefixes), *padding])
        chains = [[number[path[:d]] for d in range(1, len(path) + 1)] for path in paths]
        rows = [chain + chain[-1:] * (length - len(chain)) for chain in chains]
        path_nodes.append(rows + [[0] * length] * (count - len(rows)))
        lengths.append([*map(len, paths), *[0] * (count - len(paths))])
    tree = DraftTree(
        draft_sampling=DraftSampling.IID,
        token_ids=torch.tensor(ids),
        parents=torch.tensor(parents),
        depth=torch.tensor(depth),
        num_nodes=torch.tensor([len(prefixes) for prefixes in tries]),
        path_nodes=torch.tensor(path_nodes),
        path_lengths=torch.tensor(lengths),
        draft_ids=torch.zeros((len(batch), nodes, 1), dtype=torch.int64),
        draft_probs=torch.ones((len(batch), nodes, 1), dtype=torch.float64),
    )
    return tree, tries


@given(batch=BATCHES, spare=st.integers(0, 2))
def test_a_trie_of_paths_passes_the_check(batch, spare):
    tree, tries = tree_of(batch, spare_nodes=spare)
    check_tree(tree)
    assert tree.batch == len(batch)
    assert tree.nodes == max(map(len, tries)) + spare
    assert tree.paths == max(map(len, batch))
    assert tree.length == max(len(path) for paths in batch for path in paths)
    assert tree.width == 1


@given(batch=BATCHES, spare=st.integers(0, 2))
def test_multiplicity_counts_the_paths_through_each_node(batch, spare):
    tree, tries = tree_of(batch, spare_nodes=spare)
    multiplicity = tree.multiplicity()
    assert multiplicity.dtype == torch.int64
    for b, (paths, prefixes) in enumerate(zip(batch, tries, strict=True)):
        through = Counter(path[:d] for path in paths for d in range(1, len(path) + 1))
        expected = [tree.paths, *(through[prefix] for prefix in prefixes[1:])]
        padding = [0] * (tree.nodes - len(prefixes))
        assert multiplicity[b].tolist() == expected + padding


@given(batch=BATCHES, spare=st.integers(0, 2))
def test_the_ancestor_mask_says_whose_prefix_is_whose(batch, spare):
    tree, tries = tree_of(batch, spare_nodes=spare)
    mask = tree.ancestor_mask()
    assert mask.dtype == torch.bool
    assert mask.shape == (tree.batch, tree.nodes, tree.nodes)
    for b, prefixes in enumerate(tries):
        for i, node in enumerate(prefixes):
            expected = [node[: len(other)] == other for other in prefixes]
            assert mask[b, i, : len(prefixes)].tolist() == expected
        # No real node sees padding; a padding node sees the root and itself, so that a softmax
        # over what it sees is no division by zero.
        assert not mask[b, : len(prefixes), len(prefixes) :].any()
        for i in range(len(prefixes), tree.nodes):
            assert mask[b, i].nonzero().flatten().tolist() == [0, i]


# The tree of the module's picture, with one padding node:
#   token_ids [7, 0, 1, 2, (0)], paths [[1, 2], [1, 3]]
def _good():
    tree, _ = tree_of([[(0, 1), (0, 2)]], spare_nodes=1)
    check_tree(tree)
    return tree


BAD = [
    ("num_nodes", (0,), 6, "num_nodes[0]=6: expected an integer in [1, 5]"),
    ("parents", (0, 0), 1, "parents[0, 0]=1: expected the root: its own parent, depth 0"),
    ("depth", (0, 0), 1, "the root: its own parent, depth 0"),
    ("parents", (0, 1), 1, "parents[0, 1]=1: expected an earlier node"),
    ("parents", (0, 2), -1, "parents[0, 2]=-1: expected an earlier node"),
    ("depth", (0, 3), 3, "depth[0, 3]=3: expected its parent's depth + 1"),
    ("parents", (0, 3), 0, "depth[0, 3]=2: expected its parent's depth + 1"),
    ("token_ids", (0, 3), 1, "token_ids[0, 3]=1: expected siblings with different tokens"),
    ("path_nodes", (0, 0, 1), 1, "path_nodes[0, 0]=[1, 1]: expected a chain from the root"),
    ("path_nodes", (0, 1, 0), 0, "path_nodes[0, 1]=[0, 3]: expected a chain from the root"),
    ("path_nodes", (0, 1, 1), -1, "path_nodes[0, 1]=[1, -1]: expected real nodes, below 4"),
    ("path_lengths", (0, 1), 1, "its last node repeated past its end"),
    ("path_lengths", (0, 1), 3, "path_lengths[0, 1]=3: expected an integer in [0, 2]"),
]


@pytest.mark.parametrize(
    ("name", "at", "value", "message"), BAD, ids=[f"{n}{list(at)}={v}" for n, at, v, _ in BAD]
)
def test_the_check_names_what_is_wrong(name, at, value, message):
    tree = _good()
    changed = getattr(tree, name).clone()
    changed[at] = value
    with pytest.raises(InvalidArgument) as caught:
        check_tree(dataclasses.replace(tree, **{name: changed}))
    assert message in str(caught.value)


def test_the_check_looks_at_every_request_of_a_batch():
    tree, _ = tree_of([[(0, 1)], [(2, 1)]])
    depth = tree.depth.clone()
    depth[1, 2] = 1
    with pytest.raises(InvalidArgument, match=r"depth\[1, 2\]=1"):
        check_tree(dataclasses.replace(tree, depth=depth))


# The target's distribution kept as logits: the same numbers as a softmax, at the right nodes.


BATCH, NODES, VOCAB = 3, 4, 50
# Padding nodes repeat the root's row.
ROWS = torch.tensor([[0, 1, 2, 0], [3, 4, 5, 6], [7, 7, 7, 7]])


def _logits():
    logits = 4 * torch.randn((8, VOCAB), generator=torch.Generator().manual_seed(0))
    logits[:, 10:20] = -torch.inf
    return logits


def test_probabilities_are_the_softmax_of_each_nodes_own_row():
    logits = _logits()
    dist = TargetProbs.of_logits(logits, ROWS)
    expected = logits.double().softmax(1)[ROWS]
    assert dist.vocab == VOCAB
    assert dist.log_normaliser.dtype == torch.float64
    ids = torch.randint(
        0, VOCAB, (BATCH, NODES, 7), generator=torch.Generator().manual_seed(1), dtype=torch.int64
    )
    got = dist.probs_at(ids)
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
    dist = TargetProbs.of_probs(probs)
    for node in range(NODES):
        whole = dist.probs_of(torch.full((BATCH,), node))
        # exp(log p) in float64: |log p| < 20 times 1e-16
        torch.testing.assert_close(whole, probs[:, node], atol=0, rtol=1e-14)
        assert (whole[:, :5] == 0).all()


def test_a_broken_row_breaks_its_own_node_alone():
    logits = _logits()
    logits[4, 3] = torch.nan
    dist = TargetProbs.of_logits(logits, ROWS)
    finite = dist.log_normaliser[ROWS].isfinite()
    assert finite.tolist() == [[True] * 4, [True, False, True, True], [True] * 4]
    assert dist.probs_of(torch.tensor([1, 1, 1])).isnan().any(1).tolist() == [False, True, False]
