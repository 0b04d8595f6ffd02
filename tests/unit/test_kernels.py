"""The Triton kernels against the tensor code that they stand for, interpreted on a CPU.

Chances differ by rounding alone, so random numbers a billionth below and above them must pass and
fail. That the kernels compile for a GPU, and what they take there, is tested without one too.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.batched_trees import Batch, random_batch
from support.launches import launches
from support.requests import make_request
from support.tables import Shape

from eaglegbv.config import Plan
from eaglegbv.drafting import Drafters
from eaglegbv.errors import SamplingMismatch
from eaglegbv.sampling import SamplingParams, WarpSettings, warp, warped_rows
from eaglegbv.scheduler.batch import Forward, Group
from eaglegbv.tree import DraftSampling, DraftTree, WarpedLogits
from eaglegbv.verification import Verification, read_outputs
from eaglegbv.verifiers import fused
from eaglegbv.verifiers.base import Fault, Verdict, VerifyUniforms, find_faults
from eaglegbv.verifiers.block import BlockRule, acceptance_chances, prefix_weights
from eaglegbv.verifiers.paths import DraftedPath
from eaglegbv.verifiers.registry import make_verifier, verify_checked

pytest.importorskip("triton", reason="Triton, which runs the kernels, is not installed")
from eaglegbv import kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # else interpreted
IN_PIECES = ("eaglegbv.sampling", "eaglegbv.verifiers.fused")
SWITCHED = (*IN_PIECES, "eaglegbv.verifiers.registry")
KERNELS = ("warp_rows", "judge_nodes", "judge_paths", "draw_corrections")  # in order of launch
RULES = sorted(fused.RULES)
MARGIN = 1e-9  # far above rounding, and below any difference that matters


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let kernels run on the CPU too, in pieces so small that a row has several."""
    for module in SWITCHED:
        monkeypatch.setattr(f"{module}.runs_kernels", lambda _: True)
    for module in IN_PIECES:
        monkeypatch.setattr(f"{module}.PIECE", 4)
        monkeypatch.setattr(f"{module}.PIECE_WARPS", 1)
    with np.errstate(all="ignore"):  # what programs compute in masked lanes means nothing
        yield


def batch_for(rule: str, seed: int, count: int = 3, widths: tuple[int, ...] = ()) -> Batch:
    """Ragged trees, some of which end early; the lists of draft tokens are in any order.

    They are paths that fork at the root alone, or have ``widths``.
    """
    rng = np.random.default_rng(seed)
    most = make_verifier(rule).max_paths or 4
    shape = Shape(vocab=int(rng.integers(3, 7)), paths=most, length=int(rng.integers(1, 4)))
    if widths:
        leaves = int(np.prod(widths))
        shape = Shape(shape.vocab, len(widths), leaves, widths)
    batch = random_batch(DraftSampling.IID, rng, count, shape)
    target, uniforms = batch.target, batch.uniforms
    return Batch(
        batch.tree.to(DEVICE),
        WarpedLogits(
            target.logits.to(DEVICE), target.log_normaliser.to(DEVICE), target.rows.to(DEVICE)
        ),
        VerifyUniforms(
            uniforms.selection.to(DEVICE),
            uniforms.acceptance.to(DEVICE),
            uniforms.correction.to(DEVICE),
        ),
    )


def assert_same(got: Verdict, expected: Verdict) -> None:
    assert got.accepted.tolist() == expected.accepted.tolist()
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    for row, accepted in enumerate(expected.accepted.tolist()):
        assert torch.equal(got.path_nodes[row, :accepted], expected.path_nodes[row, :accepted])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", RULES)
def test_verdicts_are_those_of_the_tensor_code(rule, seed):
    batch, verifier = batch_for(rule, seed), make_verifier(rule)
    assert fused.takes(verifier, batch.tree)
    got, faults = verify_checked(verifier, batch.tree, batch.target, batch.uniforms)
    assert not faults.any()
    assert_same(got, verifier.verify(batch.tree, batch.target, batch.uniforms))


WIDTHS = [(2, 2), (3, 1, 2)]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("widths", WIDTHS)
def test_verdicts_on_trees_of_widths_are_those_of_the_tensor_code(widths, seed):
    batch, verifier = batch_for("otbv", seed, count=4, widths=widths), make_verifier("otbv")
    assert not batch.tree.columns
    forks = (batch.tree.draft_counts() > 1) & (batch.tree.depth > 0)
    assert forks.any()
    assert fused.takes(verifier, batch.tree)
    got, faults = verify_checked(verifier, batch.tree, batch.target, batch.uniforms)
    assert not faults.any()
    assert_same(got, verifier.verify(batch.tree, batch.target, batch.uniforms))


@pytest.mark.parametrize("rule", sorted(fused.RULES - {"otbv"}))
def test_rules_of_paths_take_no_trees_of_widths(rule):
    batch, verifier = batch_for("otbv", seed=0, widths=(1, 2)), make_verifier(rule)
    assert not fused.takes(verifier, batch.tree)
    for judge in (verify_checked, fused.verdict):
        with pytest.raises(SamplingMismatch):
            judge(verifier, batch.tree, batch.target, batch.uniforms)


def chances_of(rule: str, batch: Batch) -> tuple[DraftedPath, torch.Tensor]:
    """Return the path that a rule judges, and the chance of its test at each depth."""
    verifier = make_verifier(rule)
    if not isinstance(verifier, BlockRule):
        path = DraftedPath.drawn(batch.tree, batch.target)
        return path, path.ratios()
    path = verifier.path(batch.tree, batch.target, batch.uniforms)
    return path, acceptance_chances(path, prefix_weights(path.ratios()))


@pytest.mark.parametrize(
    ("rule", "widths"), [*((rule, ()) for rule in RULES), *(("otbv", own) for own in WIDTHS)]
)
def test_chances_agree_to_a_billionth(rule, widths):
    batch, verifier = batch_for(rule, seed=5, count=4, widths=widths), make_verifier(rule)
    path, chances = chances_of(rule, batch)
    for factor in (1 - MARGIN, 1 + MARGIN):
        acceptance = batch.uniforms.acceptance.clone()
        # What is exactly 0 here may be rounding there, which no number is below.
        acceptance[:, : batch.tree.length] = (chances * factor).clamp(min=1e-12)
        uniforms = replace(batch.uniforms, acceptance=acceptance)
        got, _ = fused.judge(verifier, batch.tree, batch.target, uniforms)
        assert_same(got, verifier.verify(batch.tree, batch.target, uniforms))
        certain = (chances >= 1).any(dim=1)
        if factor > 1:
            assert (got.accepted[~certain] == 0).all()
        elif isinstance(verifier, BlockRule):
            possible = chances.gather(1, (path.lengths - 1).clamp(min=0).unsqueeze(1)) > 0
            whole = got.accepted == path.lengths
            assert (whole | ~possible.squeeze(1) | (path.lengths == 0)).all()


@pytest.mark.parametrize("rule", RULES)
def test_corrections_are_drawn_from_the_same_residual(rule):
    batch, verifier = batch_for(rule, seed=8, count=2), make_verifier(rule)
    for uniform in (0.0, 0.2, 0.5, 0.8, 1 - 2**-53):
        correction = torch.full_like(batch.uniforms.correction, uniform)
        uniforms = VerifyUniforms(batch.uniforms.selection, batch.uniforms.acceptance, correction)
        got, _ = fused.judge(verifier, batch.tree, batch.target, uniforms)
        assert_same(got, verifier.verify(batch.tree, batch.target, uniforms))


def test_plain_decoding_samples_its_target():
    batch = batch_for("token", seed=3, count=4)
    tree = DraftTree.roots([1, 2, 0, 1], device=DEVICE)
    normalisers = batch.target.log_normaliser.clone()
    normalisers[batch.target.rows[2, 0]] = torch.nan
    rows = batch.target.rows[:, :1]  # not contiguous
    target = replace(batch.target, rows=rows, log_normaliser=normalisers)
    verifier = make_verifier("token")
    for uniform in (0.0, 0.3, 0.9, 1 - 2**-53):
        correction = torch.full_like(batch.uniforms.correction, uniform)
        uniforms = replace(batch.uniforms, correction=correction)
        got, faults = verify_checked(verifier, tree, target, uniforms)
        assert faults.tolist() == find_faults(tree, target).tolist() == [0, 0, 1, 0]
        expected = verifier.verify(tree, target, uniforms)
        assert got.path_nodes.shape == (4, 0)
        assert got.accepted.tolist() == [0] * 4
        sound = [0, 1, 3]
        assert got.token_ids[sound].tolist() == expected.token_ids[sound].tolist()


def test_faults_are_those_of_the_tensor_code():
    batch = batch_for("otbv", seed=2, count=4)
    probs = batch.tree.draft_probs.clone()
    probs[0, 0] *= 0.5
    probs[1, 0] = probs[1, 0].where(batch.tree.draft_ids[1, 0] != batch.tree.token_ids[1, 1], 0.0)
    tree = replace(batch.tree, draft_probs=probs)
    normalisers = batch.target.log_normaliser.clone()
    normalisers[batch.target.rows[2, 0]] = torch.nan
    target = replace(batch.target, log_normaliser=normalisers)
    expected = find_faults(tree, target)
    assert int(expected[0]) & Fault.DRAFT_NOT_NORMALISED
    assert int(expected[1]) & Fault.IMPOSSIBLE_DRAFT
    assert int(expected[2]) & Fault.TARGET_NOT_FINITE
    _, faults = fused.judge(make_verifier("otbv"), tree, target, batch.uniforms)
    assert faults.tolist() == expected.tolist()


# --- warped rows
SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.3, top_k=2),
    SamplingParams(top_p=0.7),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.5),
    SamplingParams(temperature=1.3, top_k=5, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_warped_rows_are_those_of_the_tensor_code(dtype):
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(len(SETTINGS), 11, generator=generator)).to(DEVICE, dtype)
    logits[:, 4] = -torch.inf
    settings = WarpSettings.of(SETTINGS, [1] * len(SETTINGS), device=DEVICE)
    got, normalisers = warped_rows(logits, settings)
    expected = warp(logits, settings)
    assert torch.equal(got, expected)
    torch.testing.assert_close(normalisers, expected.double().logsumexp(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 8.0])
def test_top_p_keeps_the_same_tokens_of_flat_and_of_steep_rows(spread):
    """Of many a row, most tokens are too unlikely to be looked at; of a flat one, none."""
    generator = torch.Generator().manual_seed(2)
    logits = (spread * torch.randn(8, 61, generator=generator)).to(DEVICE)
    masses = (0.01, 0.2, 0.5, 0.7, 0.9, 0.99, 0.999999)
    every = [SamplingParams(top_p=top_p) for top_p in masses]
    every.append(SamplingParams(top_p=0.8, top_k=7))
    settings = WarpSettings.of(every, [1] * len(every), device=DEVICE)
    assert torch.equal(warped_rows(logits, settings)[0], warp(logits, settings))


def test_ties_stay_as_documented():
    settings = WarpSettings.of(
        [SamplingParams(top_k=2), SamplingParams(top_p=0.5)], [1, 1], device=DEVICE
    )
    logits = torch.zeros(2, 10, device=DEVICE)
    assert torch.equal(warped_rows(logits, settings)[0], warp(logits, settings))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_broken_rows_are_noticed(bad):
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    logits = logits.to(DEVICE)
    logits[1, 2] = bad
    if bad < 0:
        logits[1] = bad
    settings = WarpSettings.of([SamplingParams(top_p=0.9)], [3], device=DEVICE)
    warped, normalisers = warped_rows(logits, settings)
    assert normalisers.isfinite().tolist() == [True, False, True]
    assert torch.equal(warped[::2], warp(logits, settings)[::2])


# --- on a GPU
def launches_of(rule: str, batch: Batch) -> list[str]:
    """Return what judging a batch launches, from logits to what the host reads."""
    counts = batch.tree.num_nodes.tolist()
    params = SamplingParams(temperature=0.8, top_p=0.9)
    plan = Plan(verifier=rule, paths=batch.tree.drafts, depth=batch.tree.length)
    requests = [make_request(b, (1,), params=params, plan=plan) for b in range(len(counts))]
    group = Group(requests, batch.tree, counts, [])
    forward = Forward([group], [], torch.arange(sum(counts)), [])
    logits = torch.randn(sum(counts), batch.target.vocab, device=DEVICE)
    target = SimpleNamespace(vocab_size=batch.target.vocab, device=DEVICE)
    verification = Verification(target, Drafters(None))
    with launches({kernels: KERNELS}) as names:
        outputs = read_outputs(verification.verify(forward, logits, record=False))
    assert [output.fault for output in outputs[0]] == [0] * len(counts)
    return names


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=() if rule == "otbv" else pytest.mark.thorough) for rule in RULES],
)
def test_a_step_is_judged_in_few_launches(rule):
    names = launches_of(rule, batch_for(rule, seed=1))
    assert [name for name in names if name in KERNELS] == list(KERNELS)
    assert len(names) <= 24, "\n".join(names)


@pytest.mark.thorough
def test_they_compile_for_a_gpu_and_fit_its_registers():
    script = Path(__file__).parents[1] / "support" / "compiled_kernels.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 2 * len(RULES) + 10
    for line in lines:
        _, registers, stack, shared = line.rsplit(maxsplit=3)
        assert int(registers) <= 255, line
        assert int(stack) == 0, line  # nothing is spilt
        assert int(shared) <= 49_152, line


if __name__ == "__main__":  # lists what is launched: RULE [operations], where those have no kernels
    rule, *rest = sys.argv[1:]
    with pytest.MonkeyPatch.context() as patched:
        if not rest:
            for at in SWITCHED:
                patched.setattr(f"{at}.runs_kernels", lambda _: True)
        listed = launches_of(rule, batch_for(rule, seed=1))
    sys.stdout.write("\n".join((*listed, f"{len(listed)} launches\n")))
