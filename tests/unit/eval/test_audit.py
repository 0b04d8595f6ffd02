from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from support.batched_trees import assert_sound
from support.saved_pair import save_pair

from eaglegbv.config import PLAIN, Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.audit import exact as auditing
from eaglegbv.eval.audit import g_test as g_tests
from eaglegbv.eval.audit import problems
from eaglegbv.eval.audit.exact import exact_subject, package_subjects
from eaglegbv.eval.audit.g_test import (
    detectable_shift,
    g_test,
    g_test_texts,
    g_test_two,
    joint_probs,
)
from eaglegbv.eval.audit.pair import PairResult, audit_pair
from eaglegbv.eval.audit.problems import DRAFTS, Sizes, instance
from eaglegbv.eval.audit.sampled import sampled_subject
from eaglegbv.eval.figures import ACCEPTANCE, Sums
from eaglegbv.eval.settings import sweep
from eaglegbv.eval.ways import synthetic
from eaglegbv.eval.ways.synthetic import SyntheticSettings, SyntheticTrees, draw_batch
from eaglegbv.llm import LLM
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling
from eaglegbv.verifiers.block import BlockVerifier, block
from eaglegbv.verifiers.greedy_block import GreedyBlockVerifier
from eaglegbv.verifiers.proof.chooser import residual
from eaglegbv.verifiers.proof.enumeration import Shape, drafted_trees, stateless
from eaglegbv.verifiers.registry import REFERENCES, make_any_verifier
from eaglegbv.verifiers.stateful import LayerProbs, StatefulVerifier
from eaglegbv.verifiers.target_only import TargetOnlyVerifier


def test_an_audit_is_reproducible_and_depends_on_its_seed() -> None:
    first, again, other = (
        package_subjects()["token"]
        .audit(DraftSampling.IID, Sizes(vocab=2, instances=7, seed=seed, paths=1))
        .block_efficiency
        for seed in (3, 3, 4)
    )
    assert first == again != other


def test_a_wrong_rule_fails(monkeypatch) -> None:
    sizes = Sizes(vocab=3, instances=7, paths=1)
    subject = exact_subject(make_any_verifier("block"), stateless(block))
    assert subject.audit(DraftSampling.IID, sizes).passed
    # A residual without w decides about acceptance, as one paper prints it.
    monkeypatch.setattr("eaglegbv.verifiers.block.residual", lambda w, p, q: residual(1, p, q))
    assert subject.audit(DraftSampling.IID, sizes).max_abs_error > 1e-3


def test_a_rule_that_forgets_its_state_fails_in_the_second_step() -> None:
    """One step and its completion are right; only steps in a row show it."""

    def forgetful(tree, target, chooser):
        return REFERENCES["greedy_block"](tree, replace(target, layers=()), chooser)

    broken = exact_subject(make_any_verifier("greedy_block"), forgetful)
    one, two = (
        broken.audit(DraftSampling.IID, Sizes(vocab=2, instances=7, paths=1, iterations=n))
        for n in (1, 2)
    )
    assert one.passed
    assert two.max_abs_error > 1e-3


def test_a_linear_program_too_large_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, sizes = package_subjects()["token"], Sizes(instances=1, paths=1)
    assert subject.audit(DraftSampling.IID, sizes).lp_optimum is not None
    monkeypatch.setattr(auditing, "MOST_LP_ENTRIES", 10)
    assert subject.audit(DraftSampling.IID, sizes).lp_optimum is None


@pytest.mark.parametrize("draft_sampling", list(DraftSampling))
@pytest.mark.parametrize("shape", [Shape(3, 2, 2), Shape(4, 1, 2), Shape(2, 3, 2)], ids=str)
def test_trees_are_counted_before_they_are_listed(draft_sampling, shape) -> None:
    [problem] = instance(draft_sampling, shape, 0, steps=1, seed=0)  # positive everywhere
    assert len(drafted_trees(problem)) == auditing.count_trees(draft_sampling, shape)


def test_instances_reach_the_corners() -> None:
    shape = Shape(4, 1, 2)
    pairs = []
    for number in range(len(problems.ROUND) * len(DRAFTS)):
        for problem in instance(DraftSampling.IID, shape, number, steps=2, seed=1):
            p, q = problem.target_probs(()), problem.draft_probs(())
            assert sum(p) == pytest.approx(1, abs=1e-15)
            assert sum(q) == pytest.approx(1, abs=1e-15)
            pairs.append((p, q))
    assert any(p == q for p, q in pairs)
    assert any(not any(a and b for a, b in zip(p, q, strict=True)) for p, q in pairs)
    assert any(min(p) == 0 < min(q) for p, q in pairs)
    assert any(min(q) == 0 < min(p) for p, q in pairs)
    assert any(
        p != q and p[x] * q[y] == p[y] * q[x] != 0
        for p, q in pairs
        for x, y in combinations(range(4), 2)
    )


def test_steps_share_the_target_and_have_their_own_draft_distributions() -> None:
    first, second = instance(DraftSampling.IID, Shape(3, 2, 2), 5, steps=2, seed=0)
    assert first.target_probs((1,)) == second.target_probs((1,))
    assert first.draft_probs((1,)) != second.draft_probs((1,))


class Gullible(BlockVerifier):
    """Accepts one token more than it should, now and then."""

    name = "gullible"

    def judge(self, tree, target, uniforms):
        verdict = super().judge(tree, target, uniforms)
        return replace(verdict, accepted=(verdict.accepted + 1).clamp(max=tree.length))


def test_a_wrong_batched_verifier_is_rejected() -> None:
    result = sampled_subject(Gullible(), 500).audit(DraftSampling.IID, Sizes(instances=5, paths=1))
    assert not result.passed


STATEFUL = [("greedy_block", 1), ("spectr_gbv", 2)]


@pytest.mark.parametrize(("name", "paths"), STATEFUL)
def test_batched_verifiers_with_state_pass_by_samples_of_several_steps(name, paths) -> None:
    sizes = Sizes(vocab=2, depth=3, paths=paths, instances=6, iterations=3, seed=3)
    result = sampled_subject(make_any_verifier(name), 4000).audit(DraftSampling.IID, sizes)
    assert result.passed
    assert result.detectable_shift < 0.1
    exact = package_subjects()[name].audit(DraftSampling.IID, sizes)
    assert result.block_efficiency == pytest.approx(exact.block_efficiency, abs=0.02)


class Forgetful(GreedyBlockVerifier):
    """Starts every step as if it were the first."""

    name = "forgetful"

    def verify(self, tree, target, uniforms, layers, layer_probs):
        none = replace(layers, remaining=torch.zeros_like(layers.remaining))
        return super().verify(tree, target, uniforms, none, layer_probs)


class Mixed(GreedyBlockVerifier):
    """Takes the draft distribution of the first step for that of every layer."""

    name = "mixed"

    def verify(self, tree, target, uniforms, layers, layer_probs):
        return super().verify(tree, target, uniforms, layers, FirstProbs(layer_probs))


@dataclass(frozen=True)
class FirstProbs:
    dists: LayerProbs

    def after(self, tokens):
        own = self.dists.after(tokens)
        return replace(own, probs=own.probs[:, :1].expand_as(own.probs))


@pytest.mark.parametrize("wrong", [Forgetful, Mixed])
def test_a_wrong_batched_verifier_with_state_is_rejected(wrong: type[StatefulVerifier]) -> None:
    sizes = Sizes(vocab=2, depth=3, paths=1, instances=6, iterations=3, seed=3)
    assert not sampled_subject(wrong(), 4000).audit(DraftSampling.IID, sizes).passed


class Sound(TargetOnlyVerifier):
    """Checks the trees that it judges."""

    def verify(self, tree, target, uniforms):
        assert_sound(tree, target)
        return super().verify(tree, target, uniforms)


@pytest.mark.parametrize("widths", [(), (2, 2)], ids=str)
@pytest.mark.parametrize("draft_sampling", list(DraftSampling))
def test_drawn_trees_are_sound_and_accept_as_much_as_listed_ones(draft_sampling, widths) -> None:
    sizes = Sizes(instances=4, seed=2, iterations=1, widths=widths)
    result = sampled_subject(Sound(), 4000).audit(draft_sampling, sizes)
    listed = package_subjects()["target_only"].audit(draft_sampling, sizes)
    assert result.passed
    # Means of 16,000 steps of a deviation below 1. Fixed trees have tokens that q excludes, too.
    more = result.block_efficiency - listed.block_efficiency
    assert -0.035 < more < (0.035 if draft_sampling is not DraftSampling.FIXED else 1)


def p_value(rng: np.random.Generator, dist: np.ndarray, drawn: np.ndarray, *sizes: int) -> float:
    """Of samples of ``drawn`` against ``dist``, or against samples of it; so many of each."""
    cells = range(len(dist))
    first, *second = (
        rng.choice(cells, size=size, p=p / p.sum())
        for size, p in zip(sizes, (drawn, dist), strict=False)
    )
    if not second:
        return g_test(first, dist).p_value
    # Texts of two tokens.
    texts = ([(int(n) // 6, int(n) % 6) for n in own] for own in (first, second[0]))
    found = g_test_two(*texts)
    assert found.samples == pytest.approx(sizes[0] * sizes[1] / sum(sizes))
    return found.p_value


SAMPLES = [(4000,), (2000, 4000)]


@pytest.mark.parametrize("sizes", SAMPLES)
def test_right_samples_are_accepted_and_others_rejected(sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    dist = rng.dirichlet(np.ones(40))
    p_values = [p_value(rng, dist, dist, *sizes) for _ in range(200)]
    assert 0.3 < np.mean(p_values) < 0.7
    assert 0 < np.mean(np.array(p_values) < 0.1) < 0.2
    by = 0.2 if len(sizes) == 1 else 0.3
    moved = dist * np.where(np.arange(40) % 2, 1 + by, 1 - by)
    assert p_value(rng, dist, moved, *sizes) < 1e-9


@pytest.mark.parametrize(
    "sizes",
    [SAMPLES[0], *(pytest.param(sizes, marks=pytest.mark.thorough) for sizes in SAMPLES[1:])],
)
def test_stated_power_is_met(sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    dist = np.full(20, 1 / 20)
    samples = sizes[0] if len(sizes) == 1 else sizes[0] * sizes[1] / sum(sizes)
    shift = detectable_shift(samples, 20, level=0.01)
    assert g_tests.power(samples, 20, shift=shift, level=0.01) == pytest.approx(0.9, abs=1e-3)
    moved = dist * (1 + 2 * shift * np.where(np.arange(20) % 2, 1, -1))
    tests = [p_value(rng, dist, moved, *sizes) < 0.01 for _ in range(400)]
    assert 0.84 < np.mean(tests) < 0.96
    assert detectable_shift(10, 20, level=1e-6) == 1.0


def test_rare_cells_are_merged_and_impossible_ones_reject() -> None:
    dist = np.array([0.5, 0.001, 0.001, 0.49, 0.004, 0.004, 0.0])
    observed = [0] * 500 + [3] * 490 + [4] * 5 + [5] * 5
    result = g_test(observed, dist)
    assert result.cells == 3  # the rare ones reach five only together
    assert g_test([*observed, 6], dist).p_value == 0.0
    assert g_test([0] * 10, np.array([1.0])).p_value == 1.0
    assert g_test_texts([(0, 1), (5, 5)], {(0, 1): 1.0}).p_value == 0.0
    assert g_test_two([(1,)] * 40, [(2,)] * 40).p_value < 1e-9
    assert g_test_two([(1,)] * 40, [(1,)] * 40).p_value == 1.0


def test_joint_distribution_multiplies_along_the_text_and_skips_what_cannot_be() -> None:
    def next_probs(texts: list[list[int]]) -> np.ndarray:
        return np.array([[0.25, 0.75] if text[-1] == 9 else [0.0, 1.0] for text in texts])

    assert joint_probs(next_probs, [9], 2) == {(0, 1): 0.25, (1, 1): 0.75}
    with pytest.raises(InvalidArgument, match="at most 1 possible texts"):
        joint_probs(next_probs, [9], 2, most=1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def llm(pair: tuple[Path, Path]) -> LLM:
    return LLM(*pair, plan=Plan(paths=2, depth=2), device="cpu", dtype=torch.float32)


PARAMS = SamplingParams(max_tokens=3, top_k=2, seed=1)
PLAN = Plan(paths=2, depth=2)


def audited(llm: LLM, params: SamplingParams = PARAMS, plan: Plan = PLAN, **options) -> PairResult:
    samples = options.pop("samples", 200)
    [result] = audit_pair(llm, ["ab"], params, [plan], samples=samples, **options)
    return result


@pytest.mark.thorough
def test_rules_share_models_prompts_and_what_they_are_compared_with(llm: LLM) -> None:
    plans = [PLAN, Plan(verifier="block", paths=1, depth=2), PLAIN]
    results = list(audit_pair(llm, ["ab", "hello"], PARAMS, plans, samples=400, exact=False))
    assert [result.verifier for result in results] == ["otbv", "block", "none"]
    assert all(result.passed for result in results)
    assert {result.cells for result in results} == {16}  # of both prompts
    exact = list(audit_pair(llm, ["ab", "hello"], PARAMS, plans[:1], samples=400))
    # An exact distribution shows more than as many samples.
    assert exact[0].detectable_shift < results[0].detectable_shift


def test_an_engine_with_state_passes_on_a_pair(llm: LLM) -> None:
    plan = Plan(verifier="spectr_gbv", paths=2, depth=3)
    result = audited(llm, msgspec.structs.replace(PARAMS, max_tokens=4), plan)
    assert result.passed
    assert result.cells == 16
    assert result.verifier == "spectr_gbv"


@pytest.fixture(scope="module")
def halved(pair: tuple[Path, Path]) -> LLM:
    """The pair in half precision."""
    return LLM(*pair, plan=PLAN, device="cpu", dtype=torch.bfloat16)


@pytest.mark.thorough
@pytest.mark.parametrize("exact", [True, False])
def test_a_wrong_rule_in_an_engine_is_rejected(llm, halved, exact, monkeypatch) -> None:
    monkeypatch.setattr("eaglegbv.verification.make_verifier", lambda _: Gullible())
    plan = Plan(verifier="block", paths=1, depth=2)
    own, params = (llm if exact else halved), msgspec.structs.replace(PARAMS, top_k=6)
    assert not audited(own, params, plan, exact=exact, samples=2000).passed


@pytest.mark.parametrize(
    ("params", "samples", "message"),
    [
        (PARAMS, 3, "samples=3"),
        (SamplingParams(max_tokens=3, repetition_penalty=1.2), 400, "no penalties"),
        (SamplingParams(max_tokens=3), 400, "at most 20000 possible texts"),
    ],
)
def test_a_pair_is_audited_with_fitting_settings_only(llm, params, samples, message) -> None:
    with pytest.raises(InvalidArgument, match=message):
        audited(llm, params, samples=samples)


def test_synthetic_trees_are_sound() -> None:
    settings = SyntheticSettings(vocab=5, depth=3)
    for paths in (1, 4):
        batch = draw_batch(settings, 40, paths, 0.7, torch.Generator().manual_seed(paths))
        assert_sound(batch.tree, batch.target)
        shared = batch.tree.num_nodes < 1 + 3 * paths
        assert bool(shared.any()) == (paths > 1)


def test_synthetic_figures(monkeypatch) -> None:
    settings = sweep("{token,otbv} {1,3}x3")
    way = SyntheticTrees(SyntheticSettings(vocab=16, depth=3, trees=600))
    sums = Sums(one for part in way(settings) for one in part.measure())
    found = {name: sums.value(ACCEPTANCE, name) for name in sums.settings}
    assert set(found) == {"token 1x3", "otbv 1x3", "otbv 3x3"}
    assert found["otbv 3x3"] > found["otbv 1x3"] >= found["token 1x3"]
    monkeypatch.setattr(synthetic, "NOISE", 0.0)
    [part] = SyntheticTrees(SyntheticSettings(trees=50))(sweep("block 1x6"))
    assert Sums(part.measure()).value(ACCEPTANCE, "block 1x6") == 7
