from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grown_trees import Candidates, Prefix, grown
from support.tree_check import check_tree

from eaglegbv.config import Plan
from eaglegbv.drafters.tree_growth import trimmed
from eaglegbv.errors import SamplingMismatch
from eaglegbv.eval.paired_comparison import Offer
from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs

VOCAB = 3


def probs_after(prefix: Prefix) -> Candidates:
    """A draft distribution for every prefix."""
    weights = np.random.default_rng([7, *prefix]).random(VOCAB)
    return range(VOCAB), (weights / weights.sum()).tolist()


def drafted(uniforms: np.ndarray, min_confidence: float = 0.0) -> DraftTree:
    """Trees of numbers ``[batch, paths, length]``."""
    batch, paths, length = uniforms.shape
    plan = Plan(paths=paths, depth=length, min_confidence=min_confidence)
    return trimmed(grown(plan, DraftSampling.IID, [probs_after] * batch, uniforms))


def offer_of(tree: DraftTree) -> Offer:
    """The target's distribution at a node is drawn from the node's own text."""
    probs = torch.zeros((tree.batch, tree.nodes, VOCAB), dtype=torch.float64)
    for b in range(tree.batch):
        texts: list[list[int]] = [[]]
        for node in range(1, tree.nodes):
            text = texts[int(tree.parents[b, node])]
            texts.append([*text, int(tree.token_ids[b, node])])
        for node, text in enumerate(texts):
            weights = np.random.default_rng([11, *text]).random(VOCAB)
            probs[b, node] = torch.from_numpy(weights / weights.sum())
    return Offer(tree, TargetProbs.of_probs(probs))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.2]),
    st.data(),
)
def test_a_part_is_the_tree_that_fewer_and_shorter_paths_make(
    seed: int, paths: int, length: int, min_confidence: float, data: st.DataObject
) -> None:
    few = data.draw(st.integers(1, paths))
    short = data.draw(st.integers(1, length))
    uniforms = np.random.default_rng(seed).random((2, paths, length))
    whole = offer_of(drafted(uniforms, min_confidence))
    part = whole.part(few, short)
    check_tree(part.tree)
    direct = drafted(uniforms[:, :few, :short], min_confidence)
    assert part.tree.draft_sampling is direct.draft_sampling
    for name, theirs in direct.tensors.items():
        if name in {"draft_ids", "draft_probs"}:
            _assert_equal_probs(part.tree, direct)
        else:
            assert torch.equal(part.tree.tensors[name], theirs), name
    expected = offer_of(direct).target
    for b in range(direct.batch):
        nodes = range(int(direct.num_nodes[b]))
        rows, wanted = part.target.rows[b, nodes], expected.rows[b, nodes]
        assert torch.equal(part.target.logits[rows], expected.logits[wanted])


def _assert_equal_probs(mine: DraftTree, theirs: DraftTree) -> None:
    """Below the last level nothing is drawn: no distribution is compared, none is left."""
    for b in range(mine.batch):
        for node in range(int(mine.num_nodes[b])):
            inner = bool((theirs.parents[b, 1:] == node).any())
            if inner:
                assert torch.equal(mine.draft_probs[b, node], theirs.draft_probs[b, node])
                assert torch.equal(mine.draft_ids[b, node], theirs.draft_ids[b, node])
            elif int(mine.depth[b, node]) == mine.length:
                assert not mine.draft_probs[b, node].any()


def test_the_whole_is_a_part_and_other_distributions_have_none() -> None:
    offer = offer_of(drafted(np.full((1, 2, 2), 0.5)))
    assert offer.part(2, 2) is offer
    tree = offer.tree
    other = replace(tree, draft_sampling=DraftSampling.WOR)
    with pytest.raises(SamplingMismatch, match="iid"):
        Offer(other, offer.target).part(1, 2)
