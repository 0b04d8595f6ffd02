"""Mistakes that other implementations make, at the edges of the batched verifiers."""

import dataclasses

import numpy as np
import pytest
import torch
from support.batched_trees import Batch, Request, build_batch, outcomes, random_requests

from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers.base import Verdict, VerifyUniforms
from eaglegbv.verifiers.proof.tree import Outcome
from eaglegbv.verifiers.registry import VERIFIERS, make_verifier

LOSSLESS = [
    (name, draft_sampling)
    for name, verifier in VERIFIERS.items()
    if not name.startswith("global_resolution_")
    for draft_sampling in sorted(verifier.draft_samplings)
]
LAST = 1 - 2**-53


def batch_of(name: str, draft_sampling: DraftSampling, rng: np.random.Generator) -> Batch:
    paths = VERIFIERS[name].max_paths or (2 if draft_sampling is DraftSampling.HUB else 3)
    requests = random_requests(draft_sampling, rng, 12, paths=paths, length=3, vocab=4)
    return build_batch(draft_sampling, requests, 4, rng)


def constant(batch: Batch, u: float) -> VerifyUniforms:
    numbers = dataclasses.astuple(batch.uniforms)
    return VerifyUniforms(*(torch.full_like(x, u) for x in numbers))


def committed(batch: Batch, verdict: Verdict, b: int) -> list[float]:
    """The target probability of every token that request ``b`` commits."""
    nodes = [0, *verdict.path_nodes[b, : int(verdict.accepted[b])].tolist()]
    tokens = [*batch.tree.token_ids[b, nodes[1:]].tolist(), int(verdict.token_ids[b])]
    dist = batch.target.logits[batch.target.rows[b, nodes]].exp()
    return [float(dist[i, token]) for i, token in enumerate(tokens)]


@pytest.mark.parametrize(("name", "draft_sampling"), LOSSLESS)
@pytest.mark.parametrize("u", [0.0, 2**-53, LAST, 1.0])
def test_tokens_of_probability_zero_are_never_committed(
    name: str, draft_sampling: DraftSampling, u: float
) -> None:
    """Uniforms of 0 (u <= h with both zero), next to 1, and rounded up to 1."""
    rng = np.random.default_rng(8)
    for _ in range(3):
        batch = batch_of(name, draft_sampling, rng)
        verdict = make_verifier(name).verify(batch.tree, batch.target, constant(batch, u))
        for b in range(batch.tree.batch):
            assert min(committed(batch, verdict, b)) > 0


@pytest.mark.parametrize(
    ("name", "draft_sampling"),
    [
        (n, dist)
        for n, dist in LOSSLESS
        if dist in {DraftSampling.IID, DraftSampling.WOR} and n != "target_only"
    ],
)
def test_target_equal_to_the_draft_distribution_is_accepted_whole(
    name: str, draft_sampling: DraftSampling
) -> None:
    """w = 1 and a residual of zero: every test is passed, whatever its number."""
    rng = np.random.default_rng(1)
    paths = VERIFIERS[name].max_paths or 1
    weights = rng.random(8)
    q = tuple((weights / weights.sum()).tolist())
    p = tuple(torch.tensor(q, dtype=torch.float64).log().exp().tolist())
    drawn = tuple(tuple(rng.integers(8, size=3).tolist()) for _ in range(paths))
    batch = build_batch(
        draft_sampling, [Request(drawn, lambda prefix: p, lambda prefix: p)], 8, rng
    )
    verdict = make_verifier(name).verify(batch.tree, batch.target, constant(batch, 0.999))
    assert verdict.accepted.tolist() == [3]


@pytest.mark.parametrize("name", ["gbv", "otbv"])
def test_requests_with_fewer_paths_are_judged_by_their_own_number(name: str) -> None:
    rng = np.random.default_rng(2)
    verifier = make_verifier(name)
    for _ in range(6):
        few = random_requests(DraftSampling.IID, rng, 4, paths=2, length=3, vocab=4)
        many = random_requests(DraftSampling.IID, rng, 4, paths=4, length=3, vocab=4)
        batch = build_batch(DraftSampling.IID, [*few, *many], 4, rng, paths=4, length=3)
        together = outcomes(batch.tree, verifier.verify(batch.tree, batch.target, batch.uniforms))
        alone = build_batch(DraftSampling.IID, few, 4, rng, paths=2, length=3)
        uniforms = VerifyUniforms(
            batch.uniforms.selection[:4, :, :2],
            batch.uniforms.acceptance[:4],
            batch.uniforms.correction[:4],
        )
        apart = outcomes(alone.tree, verifier.verify(alone.tree, alone.target, uniforms))
        assert together[:4] == apart


def test_float32_logits_are_judged_in_float64() -> None:
    """A batch too large for float32 sums: a tail of tiny weights keeps its share."""
    vocab = 50_000
    logits = torch.zeros(1, vocab)
    logits[0, 0] = 20.0
    target = TargetProbs.of_logits(logits, torch.zeros(1, 1, dtype=torch.int64))
    tail = float((vocab - 1) / (vocab - 1 + np.exp(20.0)))
    roots = DraftTree.roots([0] * 1000)
    target = dataclasses.replace(target, rows=torch.zeros(1000, 1, dtype=torch.int64))
    uniforms = VerifyUniforms(
        torch.zeros((1000, 0, 0, 2)),
        torch.zeros((1000, 1)),
        1 - tail + tail * (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000,
    )
    tokens = make_verifier("block").verify(roots, target, uniforms).token_ids
    expected = 1 + (vocab - 1) * (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    assert float((tokens - expected).abs().max()) < 30


class Narrow(TargetProbs):
    """Looks logits up by their number in the whole tensor, in 32 bits."""

    def probs_in(self, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        flat = rows.unsqueeze(-1).to(torch.int32) * self.vocab + token_ids.to(torch.int32)
        flat = flat.to(torch.int64) % self.logits.numel()
        logits = self.logits[flat // self.vocab, flat % self.vocab].to(torch.float64)
        return torch.exp(logits - self.log_normaliser[rows].unsqueeze(-1))


@pytest.mark.parametrize("name", ["block", "otbv", "spectr"])
def test_numbers_of_logits_beyond_32_bits(name: str) -> None:
    """Requests x nodes x vocabulary beyond 2^31. Planted: numbers of logits in 32 bits."""
    rng = np.random.default_rng(6)
    paths, vocab, rows = VERIFIERS[name].max_paths or 3, 128_256, 20_000
    requests = random_requests(DraftSampling.IID, rng, 40, paths=paths, length=3, vocab=8)
    batch = build_batch(DraftSampling.IID, requests, 8, rng)
    # Row r begins at entry r: more logits than memory would hold.
    entries = torch.from_numpy(rng.normal(size=vocab + rows))
    entries[rows - 500 : rows + 8] += 12.0  # the last rows' first tokens are likely
    logits = entries.as_strided((rows, vocab), (1, 1))
    assert logits.numel() > 2**31
    used = rows - 1 - batch.target.rows
    at = used.flatten().unique()
    sums = logits.new_zeros(rows)
    sums[at] = torch.stack([logits[row].logsumexp(0) for row in at.tolist()])
    compact = TargetProbs(logits[at], sums[at], torch.searchsorted(at, used))

    def decided(target: TargetProbs) -> list[Outcome]:
        verdict = make_verifier(name).verify(batch.tree, target, batch.uniforms)
        return outcomes(batch.tree, verdict)

    assert decided(TargetProbs(logits, sums, used)) == decided(compact)
    assert decided(Narrow(logits, sums, used)) != decided(compact)


@pytest.mark.parametrize(("name", "draft_sampling"), LOSSLESS)
def test_a_request_with_nan_leaves_the_others_alone(
    name: str, draft_sampling: DraftSampling
) -> None:
    rng = np.random.default_rng(4)
    batch = batch_of(name, draft_sampling, rng)
    verifier = make_verifier(name)
    before = outcomes(batch.tree, verifier.verify(batch.tree, batch.target, batch.uniforms))
    logits, probs = batch.target.logits.clone(), batch.tree.draft_probs.clone()
    logits[batch.target.rows[5]] = torch.nan
    probs[5] = torch.nan
    target = dataclasses.replace(batch.target, logits=logits)
    tree = dataclasses.replace(batch.tree, draft_probs=probs)
    verdict = verifier.verify(tree, target, batch.uniforms)
    after = outcomes(batch.tree, verdict)
    assert [o for b, o in enumerate(after) if b != 5] == [o for b, o in enumerate(before) if b != 5]
    assert 0 <= int(verdict.accepted[5]) <= batch.tree.length
    assert 0 <= int(verdict.token_ids[5]) < target.vocab
