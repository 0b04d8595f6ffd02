"""The batched verifiers decide as the references do, on the same uniforms."""

import dataclasses

import numpy as np
import pytest
import torch
from support.batched_trees import Batch, build_batch, outcomes, random_requests, reference_outcomes

from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers.base import Verifier, VerifyUniforms
from eaglegbv.verifiers.proof.tree import Outcome
from eaglegbv.verifiers.registry import VERIFIERS, make_verifier

PAIRS = [(name, sampling) for name, cls in VERIFIERS.items() for sampling in cls.draft_samplings]
PAIRS.sort()
SLOW = "global_resolution_"


def random_batch(
    verifier: Verifier, draft_sampling: DraftSampling, rng: np.random.Generator, size: int = 16
) -> Batch:
    most = verifier.max_paths or (4 if draft_sampling is DraftSampling.IID else 3)
    if verifier.name.startswith(SLOW):
        most = 2
    paths = 2 if draft_sampling is DraftSampling.HUB else int(rng.integers(1, most + 1))
    length = int(rng.integers(1, 5 if draft_sampling is DraftSampling.IID else 4))
    vocab = int(rng.integers(2, 9))
    requests = random_requests(draft_sampling, rng, size, paths=paths, length=length, vocab=vocab)
    return build_batch(draft_sampling, requests, vocab, rng)


def decided(verifier: Verifier, batch: Batch) -> list[Outcome]:
    return outcomes(batch.tree, verifier.verify(batch.tree, batch.target, batch.uniforms))


@pytest.mark.parametrize(("name", "draft_sampling"), PAIRS)
def test_decides_as_the_reference(name: str, draft_sampling: DraftSampling) -> None:
    rng = np.random.default_rng(len(name))
    verifier = make_verifier(name)
    for _ in range(6 if name.startswith(SLOW) else 24):
        batch = random_batch(verifier, draft_sampling, rng)
        assert decided(verifier, batch) == reference_outcomes(name, batch)


@pytest.mark.parametrize(("name", "draft_sampling"), PAIRS)
def test_disagreement_is_noticed(name: str, draft_sampling: DraftSampling) -> None:
    """The comparison itself can fail: other uniforms give other decisions."""
    rng = np.random.default_rng(5)
    verifier = make_verifier(name)
    different = 0
    for _ in range(8):
        batch = random_batch(verifier, draft_sampling, rng)
        other = dataclasses.replace(
            batch.uniforms,
            acceptance=1 - batch.uniforms.acceptance,
            correction=1 - batch.uniforms.correction,
        )
        again = decided(verifier, dataclasses.replace(batch, uniforms=other))
        different += sum(a != b for a, b in zip(decided(verifier, batch), again, strict=True))
    assert different > 8


@pytest.mark.parametrize(("name", "draft_sampling"), PAIRS)
def test_batch_does_not_matter(name: str, draft_sampling: DraftSampling) -> None:
    """A request alone gets the verdict it gets among others, whatever the padding."""
    rng = np.random.default_rng(11)
    verifier = make_verifier(name)
    for _ in range(3):
        batch = random_batch(verifier, draft_sampling, rng, size=6)
        for b, outcome in enumerate(decided(verifier, batch)):
            assert decided(verifier, _only(batch, b)) == [outcome]


def _only(batch: Batch, b: int) -> Batch:
    at, count = slice(b, b + 1), int(batch.tree.num_nodes[b])
    of_nodes = {"token_ids", "parents", "depth", "draft_ids", "draft_probs"}
    own = {k: x[at, :count] if k in of_nodes else x[at] for k, x in batch.tree.tensors.items()}
    return Batch(
        dataclasses.replace(batch.tree, **own),
        dataclasses.replace(batch.target, rows=batch.target.rows[at, :count]),
        VerifyUniforms(*(x[at] for x in dataclasses.astuple(batch.uniforms))),
    )


@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_root_alone_is_a_sample_of_the_target(name: str) -> None:
    """Inverse CDF of p at the root; greedy's targets are one-hot."""
    probs = torch.tensor([[[0.0, 0.25, 0.0, 0.75]], [[0.5, 0.0, 0.5, 0.0]]], dtype=torch.float64)
    uniforms = VerifyUniforms(
        torch.zeros((2, 0, 0, 2), dtype=torch.float64),
        torch.zeros((2, 1), dtype=torch.float64),
        torch.tensor([0.25, 0.499], dtype=torch.float64),
    )
    target = TargetProbs.of_probs(probs)
    verdict = make_verifier(name).verify(DraftTree.roots([3, 1]), target, uniforms)
    assert verdict.token_ids.tolist() == [3, 0]
    assert verdict.accepted.tolist() == [0, 0]
    assert verdict.path_nodes.shape == (2, 0)
