"""The engine as a whole: lossless, reproducible, leak-free, and clear about bad input.

The seeds are fixed: a right engine fails a G-test here once in a thousand choices of them. What
each rule commits of each draft sampling is told by enumeration and by the golden texts.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from support.g_test import g_test
from support.tiny_engine import TinyEngine, cells_of, tiny_engine
from torch import Tensor

from eaglegbv.attention.base import Segment
from eaglegbv.config import PLAIN, EngineConfig, Plan
from eaglegbv.drafters.eagle import EagleDrafter
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.drafters.host_drafting import DraftCall
from eaglegbv.engine import Engine
from eaglegbv.errors import InvalidProbabilities
from eaglegbv.metrics import Phase
from eaglegbv.models.target import TargetOutput
from eaglegbv.request import FinishReason, Request
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling, DraftTree

PROMPT = [3, 1, 4, 1, 5]
VOCAB = 8
TOKENS = 3
LEVEL = 1e-3

SAMPLES, SHIFT, POWER = 1_500, 0.08, 0.65

PLANS = {
    "otbv": Plan(paths=3, depth=2, draft_width=5, draft_temperature=1.7),
    "specinfer wor": Plan(verifier="specinfer", draft_sampling=DraftSampling.WOR, paths=3, depth=2),
}


@pytest.fixture(scope="module")
def tiny() -> TinyEngine:
    return tiny_engine(vocab=VOCAB, sharpness=3.0, slots=16_384, max_batch=512)


@pytest.mark.parametrize(
    ("name", "arch", "settings"),
    [
        ("otbv", Arch.EAGLE3, {}),
        ("specinfer wor", Arch.EAGLE3, {}),
        ("otbv", Arch.EAGLE1, {"temperature": 1.4, "top_k": 6, "top_p": 0.9, "min_p": 0.02}),
        (
            "otbv",
            Arch.EAGLE3,
            {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7},
        ),
    ],
    ids=["otbv", "wor", "warped", "penalised"],
)
def test_joint_distribution_is_the_targets(name, arch, settings):
    """And drafts are accepted at every depth."""
    own = tiny_engine(vocab=VOCAB, arch=arch, sharpness=3.0, slots=16_384, max_batch=512)
    plan, params = PLANS[name], SamplingParams(max_tokens=TOKENS, **settings)
    requests = own.sample(PROMPT, params, [plan], SAMPLES)
    assert own.target.allocator.num_free == own.target.allocator.num_slots
    exact = own.joint_probs(PROMPT, TOKENS, params)
    result = g_test(cells_of(requests, VOCAB), exact, shift=SHIFT, level=LEVEL)
    assert result.power > POWER, result
    assert result.p_value > LEVEL, result
    accepted = np.array([r.metrics.accepted_by_depth for r in requests if r.metrics.drafted_nodes])
    assert accepted.shape[1] == plan.depth
    assert accepted.sum(axis=0).min() > 0


def test_requests_without_a_seed_differ_but_follow_the_engines(tiny):
    def answers(seed: int) -> list[list[int]]:
        engine = Engine(tiny.target, None, EngineConfig(seed=seed, kv_slots=4096))
        fresh = dataclasses.replace(tiny, engine=engine)
        return fresh.tokens([PROMPT] * 3, SamplingParams(max_tokens=12), PLAIN)

    first, again, other = answers(1), answers(1), answers(2)
    assert first == again
    assert len({tuple(tokens) for tokens in first + other}) == 6


def test_broken_logits_fail_their_own_request_only(tiny, monkeypatch):
    plan, params = Plan(paths=3, depth=2), SamplingParams(max_tokens=12, seed=3)
    [expected] = tiny.tokens([PROMPT], params, plan)
    healthy = tiny.engine.add(PROMPT, params, plan)
    doomed = tiny.engine.add(PROMPT, params, plan)
    greedy = tiny.engine.add(PROMPT, SamplingParams(temperature=0, max_tokens=9), plan)
    tiny.engine.step()
    forward = tiny.target.forward

    def poisoned(segments: object, *, logit_rows: torch.Tensor) -> TargetOutput:
        out = forward(segments, logit_rows=logit_rows)
        # The sampled pair comes first: the healthy request's nodes, then the doomed one's.
        nodes = [segment.num_new for segment in segments]
        out.logits[nodes[0] : nodes[0] + nodes[1], 5] = torch.nan
        out.logits[sum(nodes[:2]) :, 5] = torch.nan
        return out

    monkeypatch.setattr(tiny.target, "forward", poisoned)
    tiny.engine.step()
    monkeypatch.undo()
    for request in (doomed, greedy):
        assert request.finish_reason is FinishReason.ERROR
        assert "logits" in str(request.error)
        assert str(request.number) in str(request.error)
    tiny.run([healthy])
    assert healthy.token_ids == expected


def test_metrics_add_up(tiny):
    request = tiny.engine.add(PROMPT, SamplingParams(max_tokens=40, seed=9), Plan(paths=3, depth=3))
    tiny.run([request])
    metrics = request.metrics
    assert metrics.prompt_tokens == len(PROMPT)
    assert metrics.committed_tokens == 39
    # Every forward commits one correction or bonus token beside the accepted ones; the last may
    # be cut.
    assert metrics.accepted_tokens >= metrics.committed_tokens - metrics.target_forwards
    assert sum(metrics.accepted_by_depth) == metrics.accepted_tokens
    assert metrics.offered_by_depth == [metrics.target_forwards] * 3
    assert sorted(metrics.accepted_by_depth, reverse=True) == metrics.accepted_by_depth
    assert set(metrics.seconds) == set(Phase)
    assert all(seconds >= 0 for seconds in metrics.seconds.values())


# Drafts and probabilities that cannot be right are refused before anything is committed.

PARAMS = [SamplingParams(max_tokens=12, seed=seed) for seed in (1, 2)]
SPOILED_PLANS = [
    Plan(verifier="otbv", paths=3, depth=2),
    Plan(verifier="specinfer", draft_sampling=DraftSampling.WOR, paths=2, depth=2),
    Plan(verifier="spectr_gbv", paths=2, depth=3),
]


@pytest.fixture(scope="module")
def small() -> TinyEngine:
    return tiny_engine()


def spoiled(tree: DraftTree, row: int, change: Callable[[Tensor, int], object]) -> DraftTree:
    """Change the probabilities at a root, given them and the place of the token drafted first."""
    probs = tree.draft_probs.clone()
    drawn = int((tree.draft_ids[row, 0] == tree.token_ids[row, 1]).nonzero())
    change(probs[row, 0], drawn)
    return dataclasses.replace(tree, draft_probs=probs)


def impossible(probs: Tensor, drawn: int) -> None:
    """The drafted token has probability 0; its share goes to another."""
    probs[(drawn + 1) % len(probs)] += probs[drawn]
    probs[drawn] = 0.0


def planted(spoil: Callable[[DraftTree, Sequence[Request]], DraftTree]) -> Callable[..., DraftTree]:
    draft = EagleDrafter.draft

    def drafted(self: EagleDrafter, call: DraftCall) -> DraftTree:
        return spoil(draft(self, call), call.requests)

    return drafted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda probs, _: probs.mul_(1.01), "draft_probs of request {}='not a distribution'"),
        (lambda probs, _: probs.mul_(torch.nan), "draft_probs of request {}='not a distribution'"),
        # It sums to 1, with an entry below 0.
        (
            lambda probs, _: probs[:2].add_(torch.tensor([2.0, -2.0])),
            "draft_probs of request {}='not a distribution'",
        ),
        (impossible, "token_ids of request {}='a token of draft probability 0'"),
    ],
    ids=["sum", "nan", "negative", "impossible"],
)
@pytest.mark.parametrize("plan", SPOILED_PLANS, ids=lambda plan: plan.verifier)
def test_a_draft_that_cannot_be_fails_its_own_request_and_commits_nothing(
    small, plan, change, message, monkeypatch
):
    [expected] = small.tokens([PROMPT], PARAMS[0], plan)
    healthy, doomed = [small.engine.add(PROMPT, params, plan) for params in PARAMS]
    small.engine.step()
    written = list(doomed.token_ids)

    def second(tree: DraftTree, requests: Sequence[Request]) -> DraftTree:
        return spoiled(tree, requests.index(doomed), change) if doomed in requests else tree

    monkeypatch.setattr(EagleDrafter, "draft", planted(second))
    small.run([healthy, doomed])
    assert doomed.finish_reason is FinishReason.ERROR
    assert isinstance(doomed.error, InvalidProbabilities)
    assert message.format(doomed.number) in str(doomed.error)
    assert doomed.token_ids == written
    assert healthy.token_ids == expected


def test_a_tree_of_a_distribution_the_verifier_does_not_accept_is_refused(monkeypatch):
    """The plan's sampling is checked when a request is added; here the drafter deviates."""

    def other(tree: DraftTree, requests: Sequence[Request]) -> DraftTree:
        return dataclasses.replace(tree, draft_sampling=DraftSampling.HUB)

    broken = tiny_engine()
    request = broken.engine.add(PROMPT, PARAMS[0], SPOILED_PLANS[0])
    broken.engine.step()
    written = list(request.token_ids)
    monkeypatch.setattr(EagleDrafter, "draft", planted(other))
    broken.run([request])
    assert request.finish_reason is FinishReason.ERROR
    assert "draft_sampling='hub': expected one of" in str(request.error)
    assert "for verifier 'otbv'" in str(request.error)
    assert request.token_ids == written


def test_nodes_at_consecutive_positions_would_be_noticed(monkeypatch):
    """Positions in the rotary embedding are depths."""
    tiny = tiny_engine(vocab=64, sharpness=1.0)
    prompts = [[n, *PROMPT] for n in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    plain = tiny.tokens(prompts, params, Plan(verifier="none"))
    plan = Plan(paths=3, depth=4)
    assert tiny.tokens(prompts, params, plan) == plain
    forward = tiny.target.forward

    def consecutive(segment: Segment) -> Segment:
        places = segment.positions[0] + torch.arange(len(segment.positions))
        return dataclasses.replace(segment, positions=places)

    def planted(segments: Sequence[Segment], **options: torch.Tensor) -> TargetOutput:
        return forward([consecutive(segment) for segment in segments], **options)

    monkeypatch.setattr(tiny.target, "forward", planted)
    assert tiny.tokens(prompts, params, plan) != plain
