"""Growing trees: sampled paths follow the distributions the tree carries; best-first trees are the best."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from support.batched_trees import forks

from eaglegbv.drafters.tree_growth import BestFirstTree, GrownTree, IidTree, stack_trees
from eaglegbv.rng import Purpose, RequestRng
from eaglegbv.tree import DraftSampling, check_tree

WIDTH = 4


def probs_at(prefix, seed=0):
    """A distribution of its own for every prefix: ids in an order of its own, one of them impossible."""
    rng = np.random.default_rng([seed, len(prefix), *prefix])
    ids = rng.permutation(10)[:WIDTH]
    probs = rng.dirichlet(np.ones(WIDTH))
    probs[rng.integers(WIDTH)] = 0
    return ids, probs / probs.sum()


def prefix_of(tree, node):
    parts = []
    while node:
        parts.append(tree.token_of(node))
        node = tree.parent_of(node)
    return tuple(parts[::-1])


def grow_fully(tree, depth, dist):
    frontier = [0]
    for _ in range(depth):
        if not frontier:
            break
        dists = [dist(prefix_of(tree, node)) for node in frontier]
        ids = np.stack([ids for ids, _ in dists])
        probs = np.stack([probs for _, probs in dists])
        frontier = tree.grow(frontier, ids, probs)
    return tree.finish()


def stack(grown, dist, *, paths=None, length=None):
    """A batch, its paths padded to the most and the longest there are unless told."""
    paths = paths or max(len(tree.paths) for tree in grown)
    length = length or max(len(path) for tree in grown for path in tree.paths)
    return stack_trees(grown, dist, paths=paths, length=length)


def sampled(uniforms, dist=probs_at):
    return grow_fully(IidTree(99, uniforms, WIDTH), uniforms.shape[1], dist)


def tokens_of(grown, path):
    return tuple(grown.token_ids[node] for node in path)


def path_probs(length, dist=probs_at):
    """The probability of every path, by the chain rule."""
    paths = {(): 1.0}
    for _ in range(length):
        paths = {
            (*prefix, int(token)): p * q
            for prefix, p in paths.items()
            for token, q in zip(*dist(prefix), strict=True)
            if q > 0
        }
    return paths


def g_test(counts, expected):
    """p-value of counts against exact expectations; cells expected below 5 are pooled."""
    assert set(counts) <= set(expected), "something impossible was drawn"
    cells = [(counts.get(key, 0), value) for key, value in expected.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5]
    if rare:
        cells.append(tuple(map(sum, zip(*rare, strict=True))))
    observed, wanted = zip(*cells, strict=True)
    return stats.power_divergence(observed, wanted, lambda_="log-likelihood").pvalue


# The seeds are fixed: these tests have one outcome. p > 1e-4 says it is no accident. With 50,000
# draws over some 27 cells, a distribution off by 0.02 in total variation gives p < 1e-7.


def test_drawn_paths_follow_the_distribution_of_the_tree():
    draws, length = 50_000, 3
    uniforms = RequestRng(1).draw(0, Purpose.DRAFT, draws * length).reshape(draws, length)
    grown = sampled(uniforms)
    counts = Counter(tokens_of(grown, path) for path in grown.paths)
    expected = {path: p * draws for path, p in path_probs(length).items()}
    assert g_test(counts, expected) > 1e-4
    # With so many draws every path but the rarest is there, and once as a node.
    assert len(grown.token_ids) <= 1 + 3 + 9 + 27


def test_paths_of_a_tree_are_independent_given_the_distributions():
    # Both paths of many trees, each tree with the numbers of a step of its own, as an engine draws.
    trees = 12_500
    counts = Counter()
    for step in range(trees):
        uniforms = RequestRng(2).draw(step, Purpose.DRAFT, 4).reshape(2, 2)
        grown = sampled(uniforms, _cached)
        counts[tuple(tokens_of(grown, path) for path in grown.paths)] += 1
    dist = path_probs(2)
    expected = {
        (first, second): trees * dist[first] * dist[second]
        for first, second in itertools.product(dist, dist)
    }
    assert g_test(counts, expected) > 1e-4


_LAWS = {}


def _cached(prefix):
    if prefix not in _LAWS:
        _LAWS[prefix] = probs_at(prefix)
    return _LAWS[prefix]


UNIFORMS = st.integers(1, 6).flatmap(
    lambda paths: st.integers(1, 4).flatmap(
        lambda length: st.lists(
            st.lists(st.floats(0, 1, exclude_max=True), min_size=length, max_size=length),
            min_size=paths,
            max_size=paths,
        )
    )
)


def draw_alone(uniforms, dist):
    """The path these numbers draw when nothing else is drawn."""
    prefix = ()
    for u in uniforms:
        ids, probs = dist(prefix)
        cumulative = probs.cumsum() / probs.sum()
        possible = [i for i in range(len(ids)) if probs[i] > 0]
        choice = next((i for i in possible if u < cumulative[i]), possible[-1])
        prefix = (*prefix, int(ids[choice]))
    return prefix


@given(numbers=UNIFORMS, seed=st.integers(0, 5))
def test_a_sampled_tree_is_the_trie_of_its_paths(numbers, seed):
    uniforms = np.array(numbers)
    grown = sampled(uniforms, lambda prefix: probs_at(prefix, seed))
    tree = stack([grown], DraftSampling.IID)
    check_tree(tree)
    assert tree.draft_sampling is DraftSampling.IID
    # Every path is there at full length, in the order drawn, duplicates kept.
    paths = [draw_alone(row, lambda prefix: probs_at(prefix, seed)) for row in uniforms]
    assert [tokens_of(grown, path) for path in grown.paths] == paths
    assert tree.path_lengths.tolist() == [[uniforms.shape[1]] * len(paths)]
    # Equal prefixes share a node, and no node is without a path.
    prefixes = {path[:d] for path in paths for d in range(uniforms.shape[1] + 1)}
    assert len(grown.token_ids) == len(prefixes)
    through = Counter(path[:d] for path in paths for d in range(uniforms.shape[1] + 1))
    by_node = {
        node: tokens_of(grown, path[: d + 1]) for path in grown.paths for d, node in enumerate(path)
    }
    multiplicity = tree.multiplicity()[0].tolist()
    assert multiplicity == [through[by_node.get(node, ())] for node in range(tree.nodes)]
    # Every inner node carries the very distribution its children were drawn from, a leaf carries none.
    inner = set(grown.parents)
    for node in range(tree.nodes):
        prefix = by_node.get(node, ())
        if len(prefix) < uniforms.shape[1]:
            assert node in inner
            ids, probs = probs_at(prefix, seed)
            assert tree.draft_ids[0, node].tolist() == ids.tolist()
            assert tree.draft_probs[0, node].tolist() == probs.tolist()
        else:
            assert tree.draft_probs[0, node].tolist() == [0] * WIDTH


@given(
    numbers=st.lists(UNIFORMS, min_size=1, max_size=3),
    seed=st.integers(0, 5),
    confidence=st.sampled_from([0.0, 0.2, 0.5]),
)
def test_a_batch_says_how_many_forks_its_trees_have_at_most(numbers, seed, confidence):
    # One less, and a verifier would take a fork's first draft for its only one.
    grown = []
    for own in numbers:
        uniforms = np.array(own)
        tree = IidTree(99, uniforms, WIDTH, min_confidence=confidence)
        grown.append(grow_fully(tree, uniforms.shape[1], lambda prefix: probs_at(prefix, seed)))
    batch = stack(grown, DraftSampling.IID)
    assert batch.forks == max(forks(batch))
    assert stack([replace(tree, forks=None) for tree in grown], DraftSampling.IID).forks is None


def test_paths_that_agree_are_all_kept():
    grown = sampled(np.full((4, 3), 0.5))
    assert len(grown.paths) == 4
    assert grown.paths == [[1, 2, 3]] * 4
    tree = stack([grown], DraftSampling.IID)
    assert tree.multiplicity().tolist() == [[4, 4, 4, 4]]


# --- best-first trees


def log_probs_at(prefix, seed, beam):
    rng = np.random.default_rng([seed, len(prefix), *prefix])
    order = rng.permutation(10)[:beam]
    log_probs = np.log(np.sort(rng.dirichlet(np.full(10, 0.5)))[::-1][:beam])
    return order, log_probs


def best_first(seed, *, beam, budget, depth):
    tree = BestFirstTree(99, beam=beam, budget=budget)
    return grow_fully(tree, depth, lambda prefix: log_probs_at(prefix, seed, beam))


def all_prefixes(seed, beam, depth):
    """Every prefix of the full tree with its score."""
    scores = {(): 0.0}
    level = {(): 0.0}
    for _ in range(depth):
        level = {
            (*prefix, int(token)): score + value
            for prefix, score in level.items()
            for token, value in zip(*log_probs_at(prefix, seed, beam), strict=True)
        }
        scores |= level
    return scores


def prefixes_of(grown: GrownTree):
    prefixes = [()]
    for node in range(1, len(grown.token_ids)):
        prefixes.append((*prefixes[grown.parents[node]], grown.token_ids[node]))
    return prefixes


@given(
    seed=st.integers(0, 10_000),
    beam=st.integers(1, 4),
    depth=st.integers(1, 4),
    budget=st.integers(1, 4),
)
def test_a_budget_of_at_most_the_beam_keeps_the_best_nodes_of_all(seed, beam, depth, budget):
    # No node of the `budget` best has more than budget - 1 <= beam - 1 better ones on its level,
    # and neither have its ancestors, so the beam loses none of them.
    budget = min(budget, beam)
    scores = all_prefixes(seed, beam, depth)
    del scores[()]
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:budget]
    grown = best_first(seed, beam=beam, budget=budget, depth=depth)
    assert set(prefixes_of(grown)) == {(), *best}


@given(
    seed=st.integers(0, 10_000),
    beam=st.integers(1, 4),
    depth=st.integers(1, 4),
    budget=st.integers(1, 30),
)
def test_a_best_first_tree_is_that_of_its_definition(seed, beam, depth, budget):
    scores = all_prefixes(seed, beam, depth)
    candidates = set()
    expanded = {()}
    for level in range(1, depth + 1):
        children = [p for p in scores if len(p) == level and p[:-1] in expanded]
        candidates |= set(children)
        expanded = set(sorted(children, key=scores.__getitem__, reverse=True)[:beam])
    best = sorted(candidates, key=scores.__getitem__, reverse=True)[:budget]
    grown = best_first(seed, beam=beam, budget=budget, depth=depth)
    prefixes = prefixes_of(grown)
    assert set(prefixes) == {(), *best}
    assert len(grown.token_ids) - 1 == min(budget, len(candidates))
    # Every leaf has its path, and no path ends elsewhere.
    tree = stack([grown], DraftSampling.FIXED)
    check_tree(tree)
    assert tree.width == 0
    leaves = {p for p in prefixes if p and not any(q[:-1] == p for q in prefixes if q)}
    assert {tokens_of(grown, path) for path in grown.paths} == leaves
    assert len(grown.paths) == len(leaves)


@pytest.mark.parametrize("value", [0.0, -math.inf, -1.5])
@pytest.mark.parametrize("budget", range(1, 15))
def test_a_child_never_outranks_its_parent_even_in_a_tie(value, budget):
    # Certain tokens (log 1), impossible ones (log 0), and a constant: all children of a node tie.
    def dist(prefix):
        return np.arange(2) + 10 * len(prefix), np.array([value, value])

    grown = grow_fully(BestFirstTree(99, beam=2, budget=budget), 3, dist)
    check_tree(stack([grown], DraftSampling.FIXED))
    assert len(grown.token_ids) == 1 + min(budget, 2 + 4 + 4)


@given(seed=st.integers(0, 10_000), beam=st.integers(1, 4), budget=st.integers(1, 12))
def test_a_broken_head_still_gives_a_tree(seed, beam, budget):
    # A fixed tree is lossless whatever it holds, so NaN must not fail the requests beside it.
    rng = np.random.default_rng(seed)

    def dist(prefix):
        scores = -rng.exponential(size=beam)
        scores[rng.random(beam) < 0.15] = np.nan
        return np.arange(beam), scores

    grown = grow_fully(BestFirstTree(99, beam=beam, budget=budget), 3, dist)
    check_tree(stack([grown], DraftSampling.FIXED))


def test_a_certain_chain_is_preferred_to_its_siblings():
    def dist(prefix):
        return np.array([1, 2]), np.log([0.99, 0.01])

    grown = grow_fully(BestFirstTree(99, beam=2, budget=4), 4, dist)
    assert prefixes_of(grown) == [(), (1,), (1, 1), (1, 1, 1), (1, 1, 1, 1)]
    assert grown.paths == [[1, 2, 3, 4]]


# --- batches


def test_trees_of_different_sizes_are_padded_into_one_batch():
    grown = [
        best_first(3, beam=4, budget=9, depth=4),
        best_first(4, beam=1, budget=2, depth=2),
        best_first(5, beam=3, budget=1, depth=1),
    ]
    batch = stack(grown, DraftSampling.FIXED)
    check_tree(batch)
    assert batch.num_nodes.tolist() == [10, 3, 2]
    for b, one in enumerate(grown):
        alone = stack([one], DraftSampling.FIXED)
        nodes, paths = alone.nodes, alone.paths
        for name in ("token_ids", "parents", "depth"):
            assert torch.equal(getattr(batch, name)[b, :nodes], getattr(alone, name)[0])
            assert (getattr(batch, name)[b, nodes:] == 0).all()
        assert torch.equal(batch.path_lengths[b, :paths], alone.path_lengths[0])
        assert (batch.path_lengths[b, paths:] == 0).all()
        for k, path in enumerate(one.paths):
            padding = [path[-1]] * (batch.length - len(path))
            assert batch.path_nodes[b, k].tolist() == path + padding
        assert (batch.path_nodes[b, paths:] == 0).all()
        # Masks and counts do not see the neighbours; only the root counts the padded paths too.
        assert torch.equal(batch.ancestor_mask()[b, :nodes, :nodes], alone.ancestor_mask()[0])
        assert torch.equal(batch.multiplicity()[b, 1:nodes], alone.multiplicity()[0, 1:])


def test_paths_are_padded_to_what_the_plan_says_and_not_to_the_batch():
    # A verifier finds its numbers by the place of a path: company must not move it.
    small, large = (
        best_first(4, beam=1, budget=2, depth=2),
        best_first(3, beam=4, budget=9, depth=4),
    )
    assert len(small.paths) < len(large.paths) < 9
    alone = stack([small], DraftSampling.FIXED, paths=9, length=5)
    together = stack([small, large], DraftSampling.FIXED, paths=9, length=5)
    for batch in (alone, together):
        check_tree(batch)
        assert (batch.paths, batch.length) == (9, 5)
    assert torch.equal(together.path_nodes[:1], alone.path_nodes)
    assert torch.equal(together.path_lengths[:1], alone.path_lengths)


def test_sampled_trees_keep_their_distributions_in_a_batch():
    rng = np.random.default_rng(0)
    grown = [sampled(rng.random((3, 3)), lambda p, s=s: probs_at(p, s)) for s in range(4)]
    grown.append(sampled(np.full((3, 3), 0.3)))  # a single chain
    batch = stack(grown, DraftSampling.IID)
    check_tree(batch)
    assert len(set(batch.num_nodes.tolist())) > 1
    for b, one in enumerate(grown):
        nodes = len(one.token_ids)
        assert batch.draft_ids[b, :nodes].tolist() == one.draft_ids.tolist()
        assert batch.draft_probs[b, :nodes].tolist() == one.draft_probs.tolist()
        assert (batch.draft_probs[b, nodes:] == 0).all()
    assert batch.draft_ids.dtype == torch.int64
    assert batch.draft_probs.dtype == torch.float64
