"""The benchmark measures real work, within bounds."""

import pytest
import torch

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import check_tree
from eaglegbv.verifiers.benchmark import Workload, measure, random_batch
from eaglegbv.verifiers.inputs import check_inputs

SMALL = Workload(requests=3, paths=3, length=4, width=8, vocab=100)


def test_batches_are_sound() -> None:
    tree, logits = random_batch(SMALL, 1)
    check_tree(tree)
    rows = torch.arange(3 * tree.nodes).view(3, -1)
    check_inputs(tree, TargetLaw.of_logits(logits.double(), rows))


def test_same_seed_same_batch() -> None:
    (tree, logits), (again, same) = random_batch(SMALL, 4), random_batch(SMALL, 4)
    assert torch.equal(logits, same)
    assert torch.equal(tree.path_nodes, again.path_nodes)


@pytest.mark.parametrize("name", ["gbv", "otbv", "spectr"])
def test_some_drafts_are_accepted_and_some_are_not(name: str) -> None:
    measured = measure(name, Workload(requests=16, vocab=512), repeats=1)
    assert 0.3 < measured.accepted < 5.7
    assert measured.verify_seconds > 0
    assert measured.ratio > 0


def test_otbv_costs_little_beside_one_pass_over_the_logits() -> None:
    """Sixteen requests, large enough for the vocabulary to dominate the fixed costs."""
    measured = measure("otbv", Workload(vocab=65_536), repeats=5)
    assert measured.ratio < 1.5
