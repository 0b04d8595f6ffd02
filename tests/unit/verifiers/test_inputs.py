"""Faulty probabilities are found before anything is committed, request by request."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from support.batched_trees import Batch, build_batch, random_requests

from eaglegbv.errors import InvalidArgument, SamplingMismatch
from eaglegbv.tree import DraftSampling, TargetProbs
from eaglegbv.verifiers.base import Fault, find_faults
from eaglegbv.verifiers.registry import VERIFIERS, make_any_verifier, make_verifier

VOCAB = 5


@pytest.fixture
def batch() -> Batch:
    rng = np.random.default_rng(3)
    requests = random_requests(DraftSampling.IID, rng, 4, paths=3, length=3, vocab=VOCAB)
    batch = build_batch(DraftSampling.IID, requests, VOCAB, rng)
    logits = batch.target.logits.clone()
    return dataclasses.replace(batch, target=TargetProbs.of_logits(logits, batch.target.rows))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_logits(batch: Batch, value: float) -> None:
    logits = batch.target.logits.clone()
    logits[batch.target.rows[2, 1], 3] = value
    target = TargetProbs.of_logits(logits, batch.target.rows)
    faults = find_faults(batch.tree, target).tolist()
    assert faults == [0, 0, Fault.TARGET_NOT_FINITE, 0]


@pytest.mark.parametrize("factor", [0.99, 1.01, float("nan"), -1.0])
def test_draft_distribution_that_is_none(batch: Batch, factor: float) -> None:
    probs = batch.tree.draft_probs.clone()
    probs[1, 0] *= factor
    tree = dataclasses.replace(batch.tree, draft_probs=probs)
    assert [f & Fault.DRAFT_NOT_NORMALISED for f in find_faults(tree, batch.target).tolist()] == [
        0,
        Fault.DRAFT_NOT_NORMALISED,
        0,
        0,
    ]


def test_token_its_distribution_cannot_draw(batch: Batch) -> None:
    tree = batch.tree
    ids, probs = tree.draft_ids.clone(), tree.draft_probs.clone()
    ids[3, 0], probs[3, 0] = 0, 0.0
    ids[3, 0, 0], probs[3, 0, 0] = (tree.token_ids[3, 1] + 1) % VOCAB, 1.0
    broken = dataclasses.replace(tree, draft_ids=ids, draft_probs=probs)
    assert find_faults(broken, batch.target).tolist() == [0, 0, 0, Fault.IMPOSSIBLE_DRAFT]


@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_distribution_that_is_not_accepted(name: str, batch: Batch) -> None:
    verifier = make_verifier(name)
    for draft_sampling in set(DraftSampling) - verifier.draft_samplings:
        tree = dataclasses.replace(batch.tree, draft_sampling=draft_sampling)
        with pytest.raises(SamplingMismatch, match=f"'{draft_sampling}'.*{name}"):
            verifier.verify(tree, batch.target, batch.uniforms)
    if verifier.max_paths is not None:
        with pytest.raises(SamplingMismatch, match="paths="):
            verifier.verify(batch.tree, batch.target, batch.uniforms)


@pytest.mark.parametrize(
    ("make", "name", "known"),
    [
        (make_verifier, "blok", "block.*otbv"),
        (make_verifier, "spectr_gbv", "spectr"),
        (make_any_verifier, "blok", "block.*greedy_block"),
    ],
)
def test_unknown_name_lists_the_known(make: Callable[[str], object], name: str, known: str) -> None:
    with pytest.raises(InvalidArgument, match=f"verifier='{name}'.*{known}"):
        make(name)
