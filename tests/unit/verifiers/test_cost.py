"""What a verification must not do: read on the host, outgrow the logits, or take long."""

import numpy as np
import pytest
import torch
from support.batched_trees import Batch, build_batch, random_requests
from support.watch import Watch

from eaglegbv.tree import DraftSampling, TargetProbs
from eaglegbv.verifiers import selection as iid_selection
from eaglegbv.verifiers.base import find_faults
from eaglegbv.verifiers.global_resolution import HostSolver
from eaglegbv.verifiers.registry import VERIFIERS, make_verifier
from eaglegbv.verifiers.selection import bounded_forks

PAIRS = [
    (name, draft_sampling)
    for name, verifier in VERIFIERS.items()
    if not issubclass(verifier, HostSolver)
    for draft_sampling in sorted(verifier.draft_samplings)
]


@pytest.mark.parametrize(("name", "draft_sampling"), PAIRS)
def test_no_host_reads(
    name: str, draft_sampling: DraftSampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a CPU, where nothing is waited for, forks are counted; elsewhere they are bounded.
    monkeypatch.setattr(iid_selection, "_room_for_forks", lambda tree, _: bounded_forks(tree))
    verifier = make_verifier(name)
    rng = np.random.default_rng(1)
    paths = verifier.max_paths or (2 if draft_sampling is DraftSampling.HUB else 3)
    requests = random_requests(draft_sampling, rng, 4, paths=paths, length=2, vocab=5)
    batch = build_batch(draft_sampling, requests, 5, rng)
    with Watch() as watch:
        verifier.verify(batch.tree, batch.target, batch.uniforms)
        find_faults(batch.tree, batch.target)
    assert watch.host_reads == []


def test_a_host_read_is_noticed() -> None:
    with Watch() as watch:
        bool(torch.ones(3).any())
        torch.ones(3).nonzero()
    assert watch.host_reads == ["_local_scalar_dense", "nonzero"]


def test_peak_memory_is_noticed() -> None:
    with Watch() as watch:
        for _ in range(3):
            torch.zeros(1000, dtype=torch.float64).add_(1)
    assert watch.peak == 8000


def large_batch(name: str, vocab: int) -> tuple[Batch, TargetProbs]:
    """Sixteen requests, each with 24 drafted tokens at most, and random logits."""
    verifier = make_verifier(name)
    rng = np.random.default_rng(2)
    paths = verifier.max_paths or 4
    length = 24 // paths
    requests = random_requests(DraftSampling.IID, rng, 16, paths=paths, length=length, vocab=8)
    batch = build_batch(DraftSampling.IID, requests, 8, rng, paths=paths, length=length)
    rows = torch.arange(16 * 25).view(16, 25)[:, : batch.tree.nodes]
    return batch, TargetProbs.of_logits(torch.randn(16 * 25, vocab), rows)


@pytest.mark.parametrize("name", ["token", "block", "gbv", "otbv", "target_only"])
def test_allocates_less_than_the_logits(name: str) -> None:
    """Sixteen requests; the share is the same at every size of vocabulary."""
    batch, target = large_batch(name, vocab=4096)
    with Watch() as watch:
        make_verifier(name).verify(batch.tree, target, batch.uniforms)
    assert watch.peak < target.logits.nbytes
