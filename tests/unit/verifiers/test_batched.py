"""The batched verifiers decide as the references do, on the same uniforms.

And they avoid mistakes that other implementations make, find faulty probabilities, read nothing on
the host, and do not outgrow the logits.
"""

from collections.abc import Callable
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from support import batched_trees
from support.batched_trees import Batch, build_batch, forks, outcomes, random_batch, random_trees
from support.references import draws_of_paths
from support.tape import HostRead, Tape, Watch
from torch import Tensor

from eaglegbv.errors import InvalidArgument, SamplingMismatch
from eaglegbv.tree import DraftSampling, DraftTree, WarpedLogits
from eaglegbv.verifiers import selection as iid_selection
from eaglegbv.verifiers.base import Fault, Verdict, Verifier, VerifyUniforms, find_faults
from eaglegbv.verifiers.paths import Residual, correction_token, draw
from eaglegbv.verifiers.proof.enumeration import Shape
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.registry import VERIFIERS, make_any_verifier, make_verifier
from eaglegbv.verifiers.selection import bounded_forks

IID, WOR, HUB = DraftSampling.IID, DraftSampling.WOR, DraftSampling.HUB
PAIRS = sorted((name, each) for name, cls in VERIFIERS.items() for each in cls.draft_samplings)
LAST = 1 - 2**-53  # the largest number below 1

every_rule = pytest.mark.parametrize(("name", "draft_sampling"), PAIRS)


def some_paths(name: str, draft_sampling: DraftSampling) -> int:
    return VERIFIERS[name].max_paths or (2 if draft_sampling is HUB else 3)


def batch_for(verifier: Verifier, draft_sampling: DraftSampling, rng: np.random.Generator) -> Batch:
    """Of any shape that the rule takes."""
    iid = draft_sampling is IID
    most = verifier.max_paths or (4 if iid else 3)
    paths = 2 if draft_sampling is HUB else int(rng.integers(1, most + 1))
    length, vocab = int(rng.integers(1, 5 if iid else 4)), int(rng.integers(2, 9))
    trees = random_trees(draft_sampling, rng, 16, Shape(vocab, length, paths))
    return build_batch(trees, vocab, rng)


def batch_of(name: str, draft_sampling: DraftSampling, rng: np.random.Generator) -> Batch:
    """Of twelve requests with as many paths as a rule takes, up to three."""
    return random_batch(draft_sampling, rng, 12, Shape(4, 3, some_paths(name, draft_sampling)))


def decided(verifier: Verifier, batch: Batch) -> list[Outcome]:
    return outcomes(batch.tree, verifier.verify(batch.tree, batch.target, batch.uniforms))


@every_rule
def test_decides_as_the_reference(name: str, draft_sampling: DraftSampling) -> None:
    """Which sees a request alone: neither the others of its batch nor padding matter."""
    rng = np.random.default_rng(len(name))
    verifier = make_verifier(name)
    for _ in range(24):
        batch = batch_for(verifier, draft_sampling, rng)
        assert decided(verifier, batch) == batched_trees.reference_outcomes(name, batch)


@every_rule
def test_disagreement_is_noticed(name: str, draft_sampling: DraftSampling) -> None:
    """The comparison itself can fail: other uniforms give other decisions."""
    rng = np.random.default_rng(5)
    verifier = make_verifier(name)
    different = 0
    for _ in range(8):
        batch = batch_for(verifier, draft_sampling, rng)
        own = batch.uniforms
        other = replace(own, acceptance=1 - own.acceptance, correction=1 - own.correction)
        again = decided(verifier, replace(batch, uniforms=other))
        different += sum(a != b for a, b in zip(decided(verifier, batch), again, strict=True))
    assert different > 8


@pytest.mark.parametrize("name", ["gbv", "otbv"])
def test_requests_with_fewer_paths_are_judged_by_their_own_number(name: str) -> None:
    rng = np.random.default_rng(2)
    verifier = make_verifier(name)
    for _ in range(6):
        few, many = (random_trees(IID, rng, 4, Shape(4, 3, paths)) for paths in (2, 4))
        batch = build_batch([*few, *many], 4, rng, drafts=4, length=3)
        alone = build_batch(few, 4, rng, drafts=2, length=3)
        own = batch.uniforms
        own = VerifyUniforms(own.selection[:4, :, :2], own.acceptance[:4], own.correction[:4])
        assert decided(verifier, batch)[:4] == decided(verifier, replace(alone, uniforms=own))


@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_root_alone_is_a_sample_of_the_target(name: str) -> None:
    """Inverse CDF of p at the root; greedy's targets are one-hot."""
    probs = torch.tensor([[[0.0, 0.25, 0.0, 0.75]], [[0.5, 0.0, 0.5, 0.0]]], dtype=torch.float64)
    uniforms = VerifyUniforms(
        torch.zeros((2, 0, 0, 2), dtype=torch.float64),
        torch.zeros((2, 1), dtype=torch.float64),
        torch.tensor([0.25, 0.499], dtype=torch.float64),
    )
    target = batched_trees.target_of(probs)
    verdict = make_verifier(name).verify(DraftTree.roots([3, 1]), target, uniforms)
    assert verdict.token_ids.tolist() == [3, 0]
    assert verdict.accepted.tolist() == [0, 0]
    assert verdict.path_nodes.shape == (2, 0)


# --- the edges of floating point
def constant(batch: Batch, u: float) -> VerifyUniforms:
    return VerifyUniforms(*(torch.full_like(x, u) for x in astuple(batch.uniforms)))


def committed(batch: Batch, verdict: Verdict, b: int) -> list[float]:
    """The target probability of every token that request ``b`` commits."""
    nodes = [0, *verdict.path_nodes[b, : int(verdict.accepted[b])].tolist()]
    tokens = [*batch.tree.token_ids[b, nodes[1:]].tolist(), int(verdict.token_ids[b])]
    dist = batch.target.logits[batch.target.rows[b, nodes]].exp()
    return [float(dist[i, token]) for i, token in enumerate(tokens)]


@every_rule
@pytest.mark.parametrize("u", [0.0, 2**-53, LAST, 1.0])
def test_tokens_of_probability_zero_are_never_committed(name, draft_sampling, u) -> None:
    """Uniforms of 0 (u <= h with both zero), next to 1, and rounded up to 1."""
    rng = np.random.default_rng(8)
    for _ in range(3):
        batch = batch_of(name, draft_sampling, rng)
        verdict = make_verifier(name).verify(batch.tree, batch.target, constant(batch, u))
        for b in range(batch.tree.batch):
            assert min(committed(batch, verdict, b)) > 0


@pytest.mark.parametrize(
    ("name", "draft_sampling"),
    [(name, own) for name, own in PAIRS if own in {IID, WOR} and name != "target_only"],
)
def test_target_equal_to_the_draft_distribution_is_accepted_whole(name, draft_sampling) -> None:
    """w = 1 and a residual of zero: every test is passed, whatever its number."""
    rng = np.random.default_rng(1)
    paths = VERIFIERS[name].max_paths or 1
    weights = rng.random(8)
    p = tuple(torch.from_numpy(weights / weights.sum()).log().exp().tolist())
    drawn = tuple(tuple(rng.integers(8, size=3).tolist()) for _ in range(paths))
    tree = ReferenceTree(draft_sampling, draws_of_paths(drawn), lambda prefix: p, lambda prefix: p)
    batch = build_batch([tree], 8, rng)
    verdict = make_verifier(name).verify(batch.tree, batch.target, constant(batch, 0.999))
    assert verdict.accepted.tolist() == [3]


def test_float32_logits_are_judged_in_float64() -> None:
    """A batch too large for float32 sums: a tail of tiny weights keeps its share."""
    vocab = 50_000
    logits = torch.zeros(1, vocab)
    logits[0, 0] = 20.0
    target = WarpedLogits.of(logits, torch.zeros(1, 1, dtype=torch.int64))
    tail = float((vocab - 1) / (vocab - 1 + np.exp(20.0)))
    target = replace(target, rows=torch.zeros(1000, 1, dtype=torch.int64))
    places = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    uniforms = VerifyUniforms(
        torch.zeros((1000, 0, 0, 2)), torch.zeros((1000, 1)), 1 - tail + tail * places
    )
    roots = DraftTree.roots([0] * 1000)
    tokens = make_verifier("block").verify(roots, target, uniforms).token_ids
    assert float((tokens - (1 + (vocab - 1) * places)).abs().max()) < 30


@pytest.mark.parametrize("scale", [1e-300, 5e-324, 1e-16, 1.0, 1e300])
@pytest.mark.parametrize(("u", "expected"), [(0.0, 1), (LAST, 2), (1.0, 2)])
def test_scale_of_the_weights_does_not_matter(scale: float, u: float, expected: int) -> None:
    weights = torch.tensor([[0.0, scale, scale, 0.0]], dtype=torch.float64)
    assert int(draw(weights, torch.tensor([u], dtype=torch.float64))) == expected


@pytest.mark.parametrize("entries", [8191, 8192, 8193, 10_000, 12_288])
def test_large_vocabularies_are_drawn_from_alike(entries: int) -> None:
    """Two levels or one: the inverse CDF, never a weight of zero, also across empty blocks."""
    rng = np.random.default_rng(entries)
    weights = rng.exponential(size=(64, entries)) * (rng.random((64, entries)) < 0.3)
    weights[:, 600:3000] = 0
    weights[:, -700:] = 0
    uniforms = rng.random(64)
    uniforms[:3] = 0.0, LAST, 1.0
    drawn = draw(torch.from_numpy(weights), torch.from_numpy(uniforms))
    cumulative = weights.cumsum(axis=1)
    for row, u, x in zip(range(64), uniforms, drawn.tolist(), strict=True):
        assert weights[row, x] > 0
        last = int(np.flatnonzero(weights[row])[-1])
        expected = int(np.searchsorted(cumulative[row], u * cumulative[row, -1], side="right"))
        assert x == min(expected, last)


@pytest.mark.parametrize("u", [0.0, 0.4, LAST])
def test_residual_without_mass_draws_from_the_target(u: float) -> None:
    """Never token 0 by accident, never a token the target excludes."""
    probs = torch.tensor([[[0.0, 0.25, 0.75, 0.0]]], dtype=torch.float64)
    target = batched_trees.target_of(probs)
    everything = Residual(
        nodes=torch.tensor([0]),
        weight=torch.ones(1, dtype=torch.float64),
        ids=torch.tensor([[1, 2]]),
        draft=torch.tensor([[0.5, 0.8]], dtype=torch.float64),
    )
    token = correction_token(everything, target, torch.tensor([u], dtype=torch.float64))
    assert token.tolist() == [1 if u < 0.25 else 2]


class Narrow(WarpedLogits):
    """Looks logits up by their number in the whole tensor, in 32 bits."""

    def probs_in(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        flat = rows.unsqueeze(-1).to(torch.int32) * self.vocab + token_ids.to(torch.int32)
        flat = flat.to(torch.int64) % self.logits.numel()
        logits = self.logits[flat // self.vocab, flat % self.vocab].to(torch.float64)
        return torch.exp(logits - self.log_normaliser[rows].unsqueeze(-1))


@pytest.mark.parametrize("name", ["block", "otbv", "spectr"])
def test_numbers_of_logits_beyond_32_bits(name: str) -> None:
    """Requests x nodes x vocabulary beyond 2^31. Planted: numbers of logits in 32 bits."""
    rng = np.random.default_rng(6)
    vocab, rows = 128_256, 20_000
    batch = build_batch(random_trees(IID, rng, 40, Shape(8, 3, some_paths(name, IID))), 8, rng)
    # Row r begins at entry r: more logits than memory would hold.
    entries = torch.from_numpy(rng.normal(size=vocab + rows))
    entries[rows - 500 : rows + 8] += 12.0  # the last rows' first tokens are likely
    logits = entries.as_strided((rows, vocab), (1, 1))
    assert logits.numel() > 2**31
    used = rows - 1 - batch.target.rows
    at = used.flatten().unique()
    sums = logits.new_zeros(rows)
    sums[at] = torch.stack([logits[row].logsumexp(0) for row in at.tolist()])

    def decide(target: WarpedLogits) -> list[Outcome]:
        return decided(make_verifier(name), replace(batch, target=target))

    expected = decide(WarpedLogits(logits[at], sums[at], torch.searchsorted(at, used)))
    assert decide(WarpedLogits(logits, sums, used)) == expected
    assert decide(Narrow(logits, sums, used)) != expected


# --- faulty probabilities: found before anything is committed, request by request
@every_rule
def test_a_request_with_nan_leaves_the_others_alone(name, draft_sampling) -> None:
    rng = np.random.default_rng(4)
    batch = batch_of(name, draft_sampling, rng)
    verifier = make_verifier(name)
    before = decided(verifier, batch)
    logits, probs = batch.target.logits.clone(), batch.tree.draft_probs.clone()
    logits[batch.target.rows[5]] = torch.nan
    probs[5] = torch.nan
    target, tree = replace(batch.target, logits=logits), replace(batch.tree, draft_probs=probs)
    verdict = verifier.verify(tree, target, batch.uniforms)
    after = outcomes(batch.tree, verdict)
    assert [o for b, o in enumerate(after) if b != 5] == [o for b, o in enumerate(before) if b != 5]
    assert 0 <= int(verdict.accepted[5]) <= batch.tree.length
    assert 0 <= int(verdict.token_ids[5]) < target.vocab


@pytest.fixture
def batch() -> Batch:
    batch = random_batch(IID, np.random.default_rng(3), 4, Shape(5, 3, 3))
    logits = batch.target.logits.clone()
    return replace(batch, target=WarpedLogits.of(logits, batch.target.rows))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_logits(batch: Batch, value: float) -> None:
    logits = batch.target.logits.clone()
    logits[batch.target.rows[2, 1], 3] = value
    target = WarpedLogits.of(logits, batch.target.rows)
    assert find_faults(batch.tree, target).tolist() == [0, 0, Fault.TARGET_NOT_FINITE, 0]


@pytest.mark.parametrize("factor", [0.99, 1.01, float("nan"), -1.0])
def test_draft_distribution_that_is_none(batch: Batch, factor: float) -> None:
    probs = batch.tree.draft_probs.clone()
    probs[1, 0] *= factor
    faults = find_faults(replace(batch.tree, draft_probs=probs), batch.target)
    flag = Fault.DRAFT_NOT_NORMALISED
    assert [fault & flag for fault in faults.tolist()] == [0, flag, 0, 0]


def test_token_its_distribution_cannot_draw(batch: Batch) -> None:
    tree = batch.tree
    ids, probs = tree.draft_ids.clone(), tree.draft_probs.clone()
    ids[3, 0], probs[3, 0] = 0, 0.0
    ids[3, 0, 0], probs[3, 0, 0] = (tree.token_ids[3, 1] + 1) % 5, 1.0
    broken = replace(tree, draft_ids=ids, draft_probs=probs)
    assert find_faults(broken, batch.target).tolist() == [0, 0, 0, Fault.IMPOSSIBLE_DRAFT]


@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_distribution_that_is_not_accepted(name: str, batch: Batch) -> None:
    verifier = make_verifier(name)
    for draft_sampling in set(DraftSampling) - verifier.draft_samplings:
        tree = replace(batch.tree, draft_sampling=draft_sampling)
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


# --- transport runs at the forks of trees alone, and how much room there is for them is no matter
def of_iid_paths(paths: int, length: int, vocab: int, seed: int) -> Batch:
    return random_batch(IID, np.random.default_rng(seed), 30, Shape(vocab, length, paths))


every_shape = pytest.mark.parametrize(("paths", "length"), [(1, 3), (2, 4), (3, 3)])


@every_shape
def test_no_tree_has_more_forks_than_the_bound_and_some_have_as_many(paths, length) -> None:
    # Of two tokens paths often agree, and of three they split up too.
    trees = [of_iid_paths(paths, length, vocab, seed=3).tree for vocab in (2, 3)]
    expected = max(map(bounded_forks, trees)) if paths > 1 else 0
    assert max(n for tree in trees for n in forks(tree)) == expected


@pytest.mark.parametrize("name", ["otbv", "global_resolution"])
@every_shape
def test_decisions_do_not_depend_on_the_room_for_forks(name, paths, length, monkeypatch) -> None:
    """A device is not asked how many there are: it ranks as many nodes as there may be."""
    batches = [of_iid_paths(paths, length, 4, seed) for seed in range(3)]
    expected = [decided(make_verifier(name), own) for own in batches]
    rooms: list[int] = []

    def bound(tree: DraftTree, _: object) -> int:
        rooms.append(bounded_forks(tree))
        return rooms[-1]

    monkeypatch.setattr(iid_selection, "_room_for_forks", bound)
    assert [decided(make_verifier(name), own) for own in batches] == expected
    selects = paths > 1 or name != "otbv"  # which does not among one
    assert len(rooms) == (len(batches) if selects else 0)


def test_a_fork_that_is_not_counted_is_decided_otherwise() -> None:
    # So a drafter that counts wrongly shows: a fork left out passes for a node of one draft.
    differ = 0
    for seed in range(6):
        batch = of_iid_paths(3, 3, 4, seed)
        counted, right, wrong = (
            decided(make_verifier("otbv"), replace(batch, tree=replace(batch.tree, forks=number)))
            for number in (batch.tree.forks, max(forks(batch.tree)), 1)
        )
        assert counted == right
        differ += right != wrong
    assert differ > 0


# --- what a verification must not do: read on the host, or outgrow the logits
@every_rule
def test_no_host_reads(name, draft_sampling, monkeypatch) -> None:
    # On a CPU, where nothing is waited for, forks are counted; elsewhere they are bounded.
    monkeypatch.setattr(iid_selection, "_room_for_forks", lambda tree, _: bounded_forks(tree))
    shape = Shape(5, 2, some_paths(name, draft_sampling))
    batch = random_batch(draft_sampling, np.random.default_rng(1), 4, shape)
    with Tape():  # raises at a host read
        make_verifier(name).verify(batch.tree, batch.target, batch.uniforms)
        find_faults(batch.tree, batch.target)


def test_host_reads_and_peak_memory_are_noticed() -> None:
    for read in (lambda: bool(torch.ones(3).any()), lambda: torch.ones(3).nonzero()):
        with pytest.raises(HostRead), Tape():
            read()
    with Watch() as watch:
        for _ in range(3):
            torch.zeros(1000, dtype=torch.float64).add_(1)
    assert watch.peak == 8000


@pytest.mark.parametrize("name", ["token", "block", "gbv", "otbv", "target_only"])
def test_allocates_less_than_the_logits(name: str) -> None:
    """Sixteen requests of 24 drafted tokens; the share is the same at every size of vocabulary."""
    paths = VERIFIERS[name].max_paths or 4
    batch = random_batch(IID, np.random.default_rng(2), 16, Shape(8, 24 // paths, paths))
    rows = torch.arange(16 * 25).view(16, 25)[:, : batch.tree.nodes]
    target = WarpedLogits.of(torch.randn(16 * 25, 4096), rows)
    with Watch() as watch:
        make_verifier(name).verify(batch.tree, target, batch.uniforms)
    assert watch.peak < target.logits.nbytes
