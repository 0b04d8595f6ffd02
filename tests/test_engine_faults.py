"""Drafts and probabilities that cannot be right are refused before anything is committed."""

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from support.tiny_engine import TinyEngine, tiny_engine

from eaglegbv.config import Plan
from eaglegbv.drafters.eagle import EagleDrafter
from eaglegbv.errors import InvalidProbabilities, SamplingMismatch
from eaglegbv.request import FinishReason, Request
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling, DraftTree

PROMPT = [3, 1, 4, 1, 5]
PARAMS = [SamplingParams(max_tokens=12, seed=seed) for seed in (1, 2)]
PLANS = [
    Plan(verifier="token", paths=1, depth=3),
    Plan(verifier="otbv", paths=3, depth=2),
    Plan(verifier="gbv", paths=2, depth=2),
    Plan(verifier="specinfer", draft_sampling=DraftSampling.WOR, paths=2, depth=2),
    Plan(verifier="otbv", draft_sampling=DraftSampling.GREEDY, paths=2, depth=2),
    Plan(verifier="greedy_block", paths=1, depth=3),
    Plan(verifier="spectr_gbv", paths=2, depth=3),
]

Spoil = Callable[[DraftTree, int], DraftTree]


@pytest.fixture(scope="module")
def tiny() -> TinyEngine:
    return tiny_engine()


def scaled(factor: float) -> Spoil:
    def spoil(tree: DraftTree, row: int) -> DraftTree:
        probs = tree.draft_probs.clone()
        probs[row, 0] *= factor
        return dataclasses.replace(tree, draft_probs=probs)

    return spoil


def negative(tree: DraftTree, row: int) -> DraftTree:
    """A distribution that sums to 1 with an entry below 0."""
    probs = tree.draft_probs.clone()
    probs[row, 0, :2] += torch.tensor([2.0, -2.0], dtype=torch.float64)
    return dataclasses.replace(tree, draft_probs=probs)


def impossible(tree: DraftTree, row: int) -> DraftTree:
    """The drafted token has probability 0; its share goes to another."""
    ids, probs = tree.draft_ids[row, 0], tree.draft_probs.clone()
    drawn = int((ids == tree.token_ids[row, 1]).nonzero())
    other = (drawn + 1) % len(ids)
    probs[row, 0, other] += probs[row, 0, drawn]
    probs[row, 0, drawn] = 0.0
    return dataclasses.replace(tree, draft_probs=probs)


def planted(spoil: Callable[[DraftTree, Sequence[Request]], DraftTree]) -> Callable[..., DraftTree]:
    draft = EagleDrafter.draft

    def drafted(
        self: EagleDrafter, requests: Sequence[Request], *rest: object, **options: object
    ) -> DraftTree:
        return spoil(draft(self, requests, *rest, **options), requests)

    return drafted


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (scaled(1.01), "draft_probs of request {}='not a distribution'"),
        (scaled(float("nan")), "draft_probs of request {}='not a distribution'"),
        (negative, "draft_probs of request {}='not a distribution'"),
        (impossible, "token_ids of request {}='a token of draft probability 0'"),
    ],
    ids=["sum", "nan", "negative", "impossible"],
)
@pytest.mark.parametrize(
    "plan", PLANS, ids=lambda plan: f"{plan.verifier} {plan.draft_sampling or ''}"
)
def test_a_draft_that_cannot_be_fails_its_own_request_and_commits_nothing(
    tiny: TinyEngine, plan: Plan, spoil: Spoil, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [expected] = tiny.tokens([PROMPT], PARAMS[0], plan)
    healthy, doomed = [tiny.engine.add(PROMPT, params, plan) for params in PARAMS]
    tiny.engine.step()
    written = list(doomed.token_ids)

    def second(tree: DraftTree, requests: Sequence[Request]) -> DraftTree:
        return spoil(tree, requests.index(doomed)) if doomed in requests else tree

    monkeypatch.setattr(EagleDrafter, "draft", planted(second))
    tiny.run([healthy, doomed])
    assert doomed.finish_reason is FinishReason.ERROR
    assert isinstance(doomed.error, InvalidProbabilities)
    assert message.format(doomed.number) in str(doomed.error)
    assert doomed.token_ids == written
    assert healthy.token_ids == expected


@pytest.mark.parametrize(
    "plan", PLANS, ids=lambda plan: f"{plan.verifier} {plan.draft_sampling or ''}"
)
def test_a_tree_of_a_distribution_the_verifier_does_not_accept_is_refused(
    tiny: TinyEngine, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's sampling is checked when a request is added; here the drafter deviates."""
    refused = DraftSampling.HUB

    def other(tree: DraftTree, requests: Sequence[Request]) -> DraftTree:
        return dataclasses.replace(tree, draft_sampling=refused)

    broken = tiny_engine()
    request = broken.engine.add(PROMPT, PARAMS[0], plan)
    broken.engine.step()
    written = list(request.token_ids)
    monkeypatch.setattr(EagleDrafter, "draft", planted(other))
    broken.run([request])
    assert request.finish_reason is FinishReason.ERROR
    assert "draft_sampling='hub': expected one of" in str(request.error)
    assert f"for verifier {plan.verifier!r}" in str(request.error)
    assert request.token_ids == written
    with pytest.raises(SamplingMismatch, match="draft_sampling='hub'"):
        tiny.engine.check_plan(with_probs(plan, refused))


def with_probs(plan: Plan, draft_sampling: DraftSampling) -> Plan:
    return Plan(
        verifier=plan.verifier, draft_sampling=draft_sampling, paths=plan.paths, depth=plan.depth
    )
