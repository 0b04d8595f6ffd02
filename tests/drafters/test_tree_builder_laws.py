"""Trees of the distributions without replacement, greedy and hub: drawn from exactly what they carry."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.g_test import g_test

from eaglegbv.drafters.tree_growth import GreedyTree, HubTree, IidTree, WorTree, stack_trees
from eaglegbv.rng import Purpose, RequestRng
from eaglegbv.tree import DraftSampling, TargetProbs, check_tree
from eaglegbv.verifiers.base import Fault, find_faults
from eaglegbv.verifiers.proof.chooser import exact_probs
from eaglegbv.verifiers.proof.tree import draft_iid, draft_tree, draw_greedy, draw_hub, draw_wor

VOCAB = 5
CLASSES = {
    DraftSampling.IID: IidTree,
    DraftSampling.WOR: WorTree,
    DraftSampling.GREEDY: GreedyTree,
    DraftSampling.HUB: HubTree,
}
FORKED = {DraftSampling.WOR: draw_wor, DraftSampling.GREEDY: draw_greedy}


def table(seed, kind="zeros"):
    """A distribution of its own at every prefix, over the vocabulary."""
    known = {}

    def q(prefix):
        if prefix not in known:
            rng = np.random.default_rng([seed, len(prefix), *prefix])
            if kind == "ties":
                weights = np.bincount(rng.integers(VOCAB, size=4), minlength=VOCAB) / 4
            elif kind == "one-hot":
                weights = np.eye(VOCAB)[rng.integers(VOCAB)]
            else:
                weights = rng.dirichlet(np.ones(VOCAB))
                weights[rng.permutation(VOCAB)[:2]] = 0
            known[prefix] = tuple((weights / weights.sum()).tolist())
        return known[prefix]

    return q


def grow(dist, uniforms, q, order):
    """Grow a tree level by level; ``order`` is that of the ids in every list."""
    tree = CLASSES[dist](99, uniforms, VOCAB)
    frontier = [0]
    for _ in range(uniforms.shape[1]):
        probs = np.array([q(prefix_of(tree, node)) for node in frontier])
        ids = np.tile(order, (len(frontier), 1))
        frontier = tree.grow(frontier, ids, probs[:, order])
    return tree


def prefix_of(tree, node):
    tokens = []
    while node:
        tokens.append(tree.token_of(node))
        node = tree.parent_of(node)
    return tuple(tokens[::-1])


def paths_of(tree):
    """Tokens of each path, in the order drawn."""
    grown = tree.finish()
    return tuple(tuple(grown.token_ids[node] for node in path) for path in grown.paths)


def stacked(trees, dist, length):
    grown = [tree.finish() for tree in trees]
    return stack_trees(grown, dist, paths=trees[0].max_paths, length=length)


# --- the reference, by the definitions of the distributions


def reference(draft_sampling, q, paths, length, chooser):
    """Draw the paths of one tree."""
    if draft_sampling is DraftSampling.IID:
        return draft_iid(q, paths, length, chooser)
    if draft_sampling is DraftSampling.HUB:
        return pairs_below_the_best(q, paths // 2, length, chooser)
    return draft_tree(FORKED[draft_sampling], q, (paths, *[1] * (length - 1)), chooser)


def pairs_below_the_best(q, beam, length, chooser):
    paths, level, indices = [()], {(): 1.0}, itertools.count()
    for _ in range(length):
        best = sorted(level, key=level.__getitem__, reverse=True)[:beam]
        # Numbers are used from left to right.
        pairs = {p: draw_hub(q(p), 2, chooser, indices) for p in paths if p in best}
        paths = [(*p, *x) for p in paths for x in ([(t,) for t in pairs.get(p, ())] or [()])]
        level = {(*p, x): level[p] * q(p)[x] for p in pairs for x in pairs[p]}
    return tuple(paths)


@pytest.mark.parametrize(
    ("draft_sampling", "paths", "length"),
    [
        (DraftSampling.WOR, 1, 2),
        (DraftSampling.WOR, 2, 2),
        (DraftSampling.WOR, 4, 1),  # more than a distribution's support holds
        (DraftSampling.GREEDY, 1, 2),
        (DraftSampling.GREEDY, 2, 2),
        (DraftSampling.GREEDY, 3, 2),
        (DraftSampling.GREEDY, 5, 2),
        (DraftSampling.HUB, 2, 3),
        (DraftSampling.HUB, 4, 2),
    ],
)
def test_trees_follow_their_distribution(draft_sampling, paths, length):
    # Seeds are fixed; a right tree fails once in ten thousand choices of them. Power at level 1e-4
    # against a distribution at total variation 0.04: 0.9 or more, asserted with some room.
    q, trees = table(3), 12_000
    order = np.random.default_rng(0).permutation(VOCAB)
    exact = exact_probs(lambda chooser: reference(draft_sampling, q, paths, length, chooser))
    cells = {drawn: cell for cell, drawn in enumerate(exact)}
    uniforms = RequestRng(5).draw(0, Purpose.DRAFT, trees * paths * length)
    observed = [
        cells[paths_of(grow(draft_sampling, own, q, order))]
        for own in uniforms.reshape(trees, paths, length)
    ]
    result = g_test(observed, np.array(list(exact.values()), dtype=float))
    assert result.power > 0.85, result
    assert result.p_value > 1e-4, result


class ListedNumbers:
    """Chooses by inverse CDF with the number an index stands for."""

    def __init__(self, number_of):
        self.number_of = number_of

    def choose(self, probs, purpose, index):
        assert purpose is Purpose.DRAFT
        cumulative = np.cumsum(probs)
        above = cumulative > self.number_of(index) * cumulative[-1]
        return int(np.argmax(above))


TABLES = st.builds(table, st.integers(0, 500), st.sampled_from(["zeros", "ties", "one-hot"]))


@given(
    draft_sampling=st.sampled_from(list(FORKED)),
    q=TABLES,
    paths=st.integers(1, 6),
    length=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_each_path_uses_its_own_row_of_numbers(draft_sampling, q, paths, length, seed):
    uniforms = np.random.default_rng(seed).random((paths, length))
    support = sum(mass > 0 for mass in q(()))
    at_root = min(paths, support) if draft_sampling is DraftSampling.WOR else int(support >= paths)

    def number_of(index):
        # Depth first: the root's numbers, then path after path.
        if index < at_root:
            return uniforms[index, 0]
        path, depth = divmod(index - at_root, length - 1)
        return uniforms[path, 1 + depth]

    drawn = paths_of(grow(draft_sampling, uniforms, q, np.arange(VOCAB)))
    assert drawn == reference(draft_sampling, q, paths, length, ListedNumbers(number_of))
    assert len(drawn) == min(paths, support)
    assert len({path[0] for path in drawn}) == len(drawn)


@given(
    draft_sampling=st.sampled_from(list(CLASSES)),
    q=TABLES,
    paths=st.integers(2, 6),
    length=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_a_tree_is_sound_within_its_budget_and_carries_its_distributions(
    draft_sampling, q, paths, length, seed
):
    rng = np.random.default_rng(seed)
    trees = [
        grow(draft_sampling, rng.random((paths, length)), q, rng.permutation(VOCAB))
        for _ in range(3)
    ]
    batch = stacked(trees, draft_sampling, length)
    check_tree(batch)
    assert batch.draft_sampling is draft_sampling
    assert batch.length == length
    assert batch.nodes <= 1 + paths * length
    for b, tree in enumerate(trees):
        prefixes = [prefix_of(tree, node) for node in range(int(batch.num_nodes[b]))]
        real = [k for k in range(batch.paths) if batch.path_lengths[b, k] > 0]
        assert len(real) == len(paths_of(tree)) <= batch.paths
        # Every node lies on a path, and every path ends at a leaf.
        on_paths = {n for k in real for n in batch.path_nodes[b, k].tolist()}
        assert on_paths | {0} == set(range(len(prefixes)))
        inner = set(batch.parents[b, 1 : len(prefixes)].tolist())
        for node, prefix in enumerate(prefixes):
            ids, probs = batch.draft_ids[b, node].tolist(), batch.draft_probs[b, node].tolist()
            probs_here = dict(zip(ids, probs, strict=True))
            # The very numbers drawn from; a leaf carries none.
            expected = dict(enumerate(q(prefix))) if node in inner else {0: 0.0}
            assert probs_here == expected
        if draft_sampling is not DraftSampling.HUB:
            assert {len(path) for path in paths_of(tree)} == {length}


@given(q=TABLES, paths=st.integers(2, 7), length=st.integers(1, 5), seed=st.integers(0, 1000))
def test_hub_trees_are_pairs_below_the_best_nodes(q, paths, length, seed):
    uniforms = np.random.default_rng(seed).random((paths, length))
    tree = grow(DraftSampling.HUB, uniforms, q, np.arange(VOCAB))
    children = {}
    for path in paths_of(tree):
        for depth, token in enumerate(path):
            children.setdefault(path[:depth], dict.fromkeys([]))[token] = None
    scores = {(): 1.0}
    for depth in range(length):
        level = [p for p in scores if len(p) == depth]
        expanded = [p for p in level if p in children]
        assert len(expanded) == min(len(level), paths // 2)
        assert all(
            scores[p] >= scores[other] for p in expanded for other in level if other not in expanded
        )
        for prefix in expanded:
            dist = q(prefix)
            hub = min(range(VOCAB), key=lambda x: (-dist[x], x))
            assert hub in children[prefix]
            assert len(children[prefix]) == min(2, sum(mass > 0 for mass in dist))
            scores |= {(*prefix, x): scores[prefix] * dist[x] for x in children[prefix]}


@pytest.mark.parametrize("draft_sampling", list(CLASSES))
@pytest.mark.parametrize("places", [[0], [3], [1, 4], [0, 1, 2, 3, 4]])
def test_a_broken_distribution_still_gives_a_tree_and_is_reported(dist, places):
    def q(prefix):
        probs = np.full(VOCAB, 1 / VOCAB)
        probs[places] = np.nan
        return tuple(probs)

    tree = grow(dist, np.random.default_rng(1).random((3, 3)), q, np.arange(VOCAB))
    batch = stacked([tree], dist, 3)
    check_tree(batch)
    rows = torch.zeros((1, batch.nodes), dtype=torch.int64)
    target = TargetProbs.of_logits(torch.zeros((1, 100)), rows)
    assert int(find_faults(batch, target)) & Fault.DRAFT_NOT_NORMALISED


def test_tied_tokens_are_ranked_by_their_id():
    # The verifiers find the tokens that were not drawn by this very order.
    def q(prefix):
        return (0.1, 0.3, 0.0, 0.3, 0.3)

    for seed in range(20):
        rng = np.random.default_rng(seed)
        tree = grow(DraftSampling.GREEDY, rng.random((3, 1)), q, rng.permutation(VOCAB))
        first, second, third = paths_of(tree)
        assert (first, second) == ((1,), (3,))
        assert third in {(0,), (4,)}
        hub = grow(DraftSampling.HUB, rng.random((2, 1)), q, rng.permutation(VOCAB))
        assert (1,) in paths_of(hub)


def test_siblings_stand_in_the_order_drawn():
    q = table(3)
    for seed in range(20):
        uniforms = np.random.default_rng(seed).random((3, 2))
        order = np.arange(VOCAB)
        firsts = [path[0] for path in paths_of(grow(DraftSampling.WOR, uniforms, q, order))]
        left = np.array(q(()))
        for token, u in zip(firsts, uniforms[:, 0], strict=True):
            assert token == int(np.argmax(left.cumsum() > u * left.sum()))
            left[token] = 0
    # Drawn first or second, the hub keeps its place: both orders occur, and mean different things.
    pairs = Counter(
        tuple(
            path[0]
            for path in paths_of(grow(DraftSampling.HUB, rng.random((2, 1)), q, np.arange(VOCAB)))
        )
        for rng in map(np.random.default_rng, range(50))
    )
    hub = int(np.argmax(q(())))
    assert {pair.index(hub) for pair in pairs} == {0, 1}
