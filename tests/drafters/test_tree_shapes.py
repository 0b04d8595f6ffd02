"""Trees of given shapes, EAGLE-2's with sizes of its own, and paths that stop by confidence."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.token_drafting import TokenSession, random_table

from eaglegbv.config import EAGLE1_SHAPE, Plan
from eaglegbv.drafters.tabular import Table, TabularDrafter
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling, DraftTree, check_tree

VOCAB = 7


def session_of(seed: int = 0, scale: float = 1.5) -> tuple[TokenSession, Table]:
    table = Table.of_logits(random_table(VOCAB, seed=seed, scale=scale))
    return TokenSession(TabularDrafter(table)), table


def draft(
    plan: Plan, draft_sampling: DraftSampling, *, seed: int = 0, scale: float = 1.5, first: int = 2
):
    session, table = session_of(seed, scale)
    params = SamplingParams()
    tree = session.draft(
        [session.start([1], first, plan, params=params, seed=seed)], draft_sampling
    )
    check_tree(tree)
    return tree, table


def prefixes(tree: DraftTree) -> list[tuple[int, ...]]:
    """What was drafted down to each node."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, int(tree.num_nodes[0])):
        found.append((*found[int(tree.parents[0, node])], int(tree.token_ids[0, node])))
    return found


def draft_sampling(table: Table, token: int) -> np.ndarray:
    return table.logits([token])[0].double().softmax(0).numpy()


def confidence(table: Table, prefix: tuple[int, ...], root: int = 2) -> float:
    product, last = 1.0, root
    for token in prefix:
        product *= draft_sampling(table, last)[token]
        last = token
    return product


def by_rank(table: Table, ranks: tuple[int, ...], root: int = 2) -> tuple[int, ...]:
    tokens, last = [], root
    for rank in ranks:
        last = int(np.argsort(-draft_sampling(table, last), kind="stable")[rank])
        tokens.append(last)
    return tuple(tokens)


def test_a_static_tree_is_the_shape_in_tokens() -> None:
    tree, table = draft(
        Plan(draft_sampling="fixed", depth=5, shape=EAGLE1_SHAPE), DraftSampling.FIXED
    )
    expected = {(), *(by_rank(table, ranks) for ranks in EAGLE1_SHAPE)}
    assert set(prefixes(tree)) == expected
    assert int(tree.num_nodes[0]) == 26
    leaves = [r for r in EAGLE1_SHAPE if not any(o[:-1] == r for o in EAGLE1_SHAPE)]
    assert int((tree.path_lengths > 0).sum()) == len(leaves)


def test_a_static_tree_leaves_out_what_a_small_vocabulary_lacks() -> None:
    shape = ((0,), (VOCAB,), (0, 1), (0, 0))
    tree, table = draft(Plan(draft_sampling="fixed", depth=2, shape=shape), DraftSampling.FIXED)
    assert set(prefixes(tree)) == {(), *(by_rank(table, r) for r in ((0,), (0, 1), (0, 0)))}


@given(
    beam=st.integers(1, 5),
    nodes=st.integers(1, 30),
    depth=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_eagle_2_has_a_beam_and_a_number_of_nodes_of_its_own(beam, nodes, depth, seed) -> None:
    plan = Plan(draft_sampling="fixed", paths=1, depth=depth, beam=beam, nodes=nodes)
    tree, table = draft(plan, DraftSampling.FIXED, seed=seed)
    scores = {(): 0.0}
    level = [()]
    for _ in range(depth):
        children = {}
        for prefix in level:
            q = draft_sampling(table, prefix[-1] if prefix else 2)
            for token in np.argsort(-q, kind="stable")[:beam].tolist():
                children[(*prefix, token)] = scores[prefix] + math.log(q[token])
        scores |= children
        level = sorted(children, key=children.__getitem__, reverse=True)[:beam]
    del scores[()]
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:nodes]
    found = set(prefixes(tree)) - {()}
    assert len(found) == len(best)
    # The same nodes, up to ties and float32.
    worst = scores[best[-1]]
    assert all(scores[prefix] >= worst - 1e-5 for prefix in found)
    assert int(tree.num_nodes[0]) <= plan.tree_nodes <= plan.tree_slots


@given(
    kind=st.sampled_from(
        [
            DraftSampling.IID,
            DraftSampling.WOR,
            DraftSampling.GREEDY,
            DraftSampling.HUB,
            DraftSampling.FIXED,
        ]
    ),
    floor=st.sampled_from([0.001, 0.02, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 30),
)
def test_a_path_ends_where_its_own_confidence_falls_below(kind, floor, seed) -> None:
    plan = Plan(paths=4, depth=5, draft_width=VOCAB, min_confidence=floor)
    tree, table = draft(plan, kind, seed=seed)
    whole, _ = draft(Plan(paths=4, depth=5, draft_width=VOCAB), kind, seed=seed)
    found = prefixes(tree)
    inner = {found[int(p)] for p in tree.parents[0, 1 : len(found)]}
    for prefix in found:
        sure = confidence(table, prefix) >= floor * (1 + 1e-9)
        unsure = confidence(table, prefix) < floor * (1 - 1e-9)
        if prefix and unsure:
            assert prefix not in inner
        if (
            kind in (DraftSampling.IID, DraftSampling.WOR, DraftSampling.GREEDY)
            and sure
            and len(prefix) < plan.depth
        ):
            assert prefix in inner
    assert tree.length == plan.depth
    if kind is DraftSampling.IID:
        # The numbers of a path are its own: stopping others changes nothing of what it draws.
        uncut = [tuple(whole.token_ids[0, nodes].tolist()) for nodes in whole.path_nodes[0]]
        for nodes, length in zip(tree.path_nodes[0], tree.path_lengths[0].tolist(), strict=True):
            path = tuple(tree.token_ids[0, nodes[:length]].tolist())
            assert any(full[:length] == path for full in uncut)


def test_confidence_of_a_shape_counts_too() -> None:
    plan = Plan(draft_sampling="fixed", depth=5, shape=EAGLE1_SHAPE, min_confidence=1.0)
    tree, table = draft(plan, DraftSampling.FIXED)
    assert set(prefixes(tree)) == {(), *(by_rank(table, (rank,)) for rank in range(4))}


def test_a_batch_may_stop_at_different_depths_or_altogether() -> None:
    session, _ = session_of(scale=4.0)
    plan = Plan(paths=2, depth=4, draft_width=VOCAB, min_confidence=0.6)
    requests = [session.start([1], first, plan, seed=first) for first in range(VOCAB)]
    together = session.draft(requests, DraftSampling.IID)
    check_tree(together)
    assert len(set(together.path_lengths.flatten().tolist())) > 2
    for b, first in enumerate(range(VOCAB)):
        alone = session.draft([session.start([1], first, plan, seed=first)], DraftSampling.IID)
        count = int(alone.num_nodes[0])
        assert int(together.num_nodes[b]) == count
        assert torch.equal(together.token_ids[b, :count], alone.token_ids[0])
        assert torch.equal(together.path_lengths[b], alone.path_lengths[0])


@pytest.mark.parametrize(("paths", "depth"), [(1, 1), (1, 32), (16, 32), (3, 4)])
def test_slots_hold_whatever_a_plan_drafts(paths: int, depth: int) -> None:
    plan = Plan(paths=paths, depth=depth)
    assert plan.tree_nodes == 1 + paths * depth
    # A row for the root, and for every node but those of the last level.
    assert plan.tree_slots - 1 >= max(plan.tree_nodes - 1, 1 + paths * (depth - 1))
