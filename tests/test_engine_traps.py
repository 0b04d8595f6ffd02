"""Traps that only a whole engine can fall into: each check fails when its trap is planted."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from support.tiny_engine import TinyEngine, tiny_engine

from eaglegbv.attention.base import Segment
from eaglegbv.config import Plan
from eaglegbv.engine import Engine
from eaglegbv.models.target import TargetOutput
from eaglegbv.request import Request
from eaglegbv.sampling import SamplingParams

PROMPT = [3, 1, 4, 1, 5]
PROMPTS = [[n, *PROMPT] for n in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def tiny() -> TinyEngine:
    return tiny_engine(vocab=64, sharpness=1.0)


def test_nodes_of_a_tree_stand_at_their_depth(
    tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: nodes get consecutive positions in the rotary embedding."""
    plain = tiny.tokens(PROMPTS, GREEDY, Plan(verifier="none"))
    plan = Plan(paths=3, depth=4)
    assert tiny.tokens(PROMPTS, GREEDY, plan) == plain
    forward = tiny.target.forward

    def consecutive(segment: Segment) -> Segment:
        places = segment.positions[0] + torch.arange(len(segment.positions))
        return dataclasses.replace(segment, positions=places)

    def planted(segments: Sequence[Segment], **options: torch.Tensor) -> TargetOutput:
        return forward([consecutive(segment) for segment in segments], **options)

    monkeypatch.setattr(tiny.target, "forward", planted)
    assert tiny.tokens(PROMPTS, GREEDY, plan) != plain


def test_text_ends_with_the_first_end_of_sequence_token_of_a_step(
    tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: only the last token of a step is looked at."""
    plan = Plan(paths=3, depth=4)

    def runs_over() -> bool:
        [tokens] = tiny.tokens([PROMPT], SamplingParams(max_tokens=30, seed=7), plan)
        answers = {
            stop: tiny.tokens(
                [PROMPT], SamplingParams(max_tokens=30, seed=7, stop_token_ids=(stop,)), plan
            )[0]
            for stop in set(tokens)
        }
        return any(answer != tokens[: tokens.index(stop) + 1] for stop, answer in answers.items())

    def whole(engine: Engine, request: Request, tokens: list[int]) -> list[int]:
        return tokens[: request.max_tokens - len(request.token_ids)]

    assert not runs_over()
    monkeypatch.setattr(Engine, "_cut", whole)
    assert runs_over()
