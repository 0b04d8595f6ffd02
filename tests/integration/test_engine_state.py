"""Verifiers with state in the engine: lossless over steps, request by request.

At depth 3 a step that stops at once leaves a layer on the next two tokens, and the steps after it
leave theirs on top: the fourth token may be under two, the fifth under three.
"""

import dataclasses
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
import torch
from support.cli import run
from support.g_test import g_test, joint_probs
from support.saved_pair import save_pair
from support.tiny_engine import TinyEngine, tiny_engine
from torch import Tensor

from eaglegbv import LLM, verification
from eaglegbv.config import EngineConfig, Plan
from eaglegbv.drafters.base import Drafter
from eaglegbv.drafters.eagle import EagleDrafter
from eaglegbv.engine import Engine
from eaglegbv.errors import InvalidArgument, SamplingMismatch
from eaglegbv.request import DraftSnapshot, FinishReason, Request
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling, DraftTree

VOCAB, TOKENS, SAMPLES = 6, 5, 20_000
PROMPT = [4]
LEVEL = 1e-4
"""A right engine fails a G-test of this file once in ten thousand seeds; the seeds are fixed."""

ONE_PATH = Plan(verifier="greedy_block", paths=1, depth=3)
TWO_PATHS = Plan(verifier="spectr_gbv", paths=2, depth=3)
PLANS = [ONE_PATH, TWO_PATHS]
LONG = [
    Plan(verifier="greedy_block", paths=1, depth=5),
    Plan(verifier="spectr_gbv", paths=3, depth=4, draft_temperature=0.5, draft_width=5),
]


@pytest.fixture(scope="module")
def crowded() -> TinyEngine:
    return tiny_engine(vocab=VOCAB, sharpness=2.5, slots=1 << 16, max_batch=1024)


@pytest.fixture(scope="module")
def tiny() -> TinyEngine:
    return tiny_engine(vocab=VOCAB, sharpness=2.5, slots=1024)


def drafter_of(tiny: TinyEngine) -> EagleDrafter:
    drafter = tiny.engine._drafting.drafter
    assert isinstance(drafter, EagleDrafter)
    return drafter


def exact_probs(tiny: TinyEngine) -> np.ndarray:
    @torch.inference_mode()
    def next_probs(prefixes: list[list[int]]) -> np.ndarray:
        return tiny.model(torch.tensor(prefixes)).logits[:, -1].double().softmax(dim=1).numpy()

    return joint_probs(next_probs, PROMPT, TOKENS)


def sample(tiny: TinyEngine, count: int) -> list[int]:
    """Texts as cells of the joint distribution, both verifiers in turn, all in the same batches."""
    requests = [
        tiny.engine.add(PROMPT, SamplingParams(max_tokens=TOKENS, seed=seed), PLANS[seed % 2])
        for seed in range(count)
    ]
    while tiny.engine.has_work:
        tiny.engine.step()
    assert tiny.target.allocator.num_free == tiny.target.allocator.num_slots
    return [int(np.ravel_multi_index(r.token_ids, [VOCAB] * TOKENS)) for r in requests]


def test_joint_distribution_is_the_targets_over_steps(crowded: TinyEngine) -> None:
    dist, cells = exact_probs(crowded), sample(crowded, SAMPLES)
    both = g_test(cells, dist)
    assert both.power > 0.85, both
    for observed in (cells, cells[::2], cells[1::2]):
        result = g_test(observed, dist)
        assert result.p_value > LEVEL, result


def test_current_draft_probs_in_place_of_an_earlier_steps_are_noticed(
    crowded: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """True features give other probabilities than the step drew from, which biases the text."""
    trails = verification._trails

    def current(requests: Sequence[Request]) -> list[verification._Trail]:
        return [
            dataclasses.replace(
                trail,
                layer=dataclasses.replace(trail.layer, since=len(trail.request.token_ids)),
                place=drafter_of(crowded).snapshot(trail.request),
            )
            for trail in trails(requests)
        ]

    monkeypatch.setattr(verification, "_trails", current)
    result = g_test(sample(crowded, 2_500), exact_probs(crowded))
    assert result.p_value < LEVEL, result


def test_dropped_layers_are_noticed(crowded: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    after = verification._layers_after
    monkeypatch.setattr(verification, "_layers_after", lambda *args: [() for _ in after(*args)])
    result = g_test(sample(crowded, 3_000), exact_probs(crowded))
    assert result.p_value < LEVEL, result


@pytest.mark.parametrize("plan", [*PLANS, *LONG], ids=lambda plan: f"{plan.verifier} {plan.depth}")
def test_same_seed_same_tokens_alone_and_in_a_batch(tiny: TinyEngine, plan: Plan) -> None:
    params = SamplingParams(max_tokens=30, seed=42, top_p=0.95)
    [alone] = tiny.tokens([PROMPT], params, plan)
    ours = tiny.engine.add(PROMPT, params, plan)
    crowd = [
        tiny.engine.add(
            [1 + n % 5] * (1 + n), SamplingParams(max_tokens=6 + n, temperature=0.5 * (n % 3)), p
        )
        for n, p in enumerate([*PLANS, Plan(paths=3), plan, *LONG, plan, Plan(verifier="none")])
    ]
    tiny.run([ours, *crowd])
    assert ours.token_ids == alone


@pytest.mark.parametrize("plan", LONG, ids=lambda plan: plan.verifier)
def test_in_half_precision_what_is_replayed_was_drawn_from_to_the_last_bit(
    monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    half = tiny_engine(vocab=VOCAB, sharpness=2.5, dtype=torch.bfloat16)
    draft, compared = EagleDrafter.draft, 0

    def watched(
        self: EagleDrafter,
        requests: Sequence[Request],
        plan: Plan,
        draft_sampling: DraftSampling,
        tree_slots: Sequence[Tensor],
    ) -> DraftTree:
        """Replay the first path of every tree, all in one batch."""
        nonlocal compared
        tree = draft(self, requests, plan, draft_sampling, tree_slots)
        places: list[DraftSnapshot] = [self.snapshot(request) for request in requests]
        free = half.target.allocator.allocate(len(requests) * plan.depth).split(len(requests))
        for nodes, slots in zip(tree.path_nodes[:, 0, : plan.depth - 1].T, free, strict=False):
            tokens = tree.token_ids.gather(1, nodes[:, None])[:, 0]
            places = self.advance(requests, places, tokens, slots)
            replayed = self.probs_at(places)
            for b, node in enumerate(nodes.tolist()):
                assert torch.equal(replayed.probs[b], tree.draft_probs[b, node])
                assert torch.equal(replayed.ids[b], tree.draft_ids[b, node])
                compared += 1
        half.target.allocator.release(torch.cat(free))
        return tree

    monkeypatch.setattr(EagleDrafter, "draft", watched)
    for seed in range(6):
        half.engine.add(PROMPT * (1 + seed), SamplingParams(max_tokens=12, seed=seed), plan)
    while half.engine.has_work:
        half.engine.step()
    assert compared > 100


@pytest.mark.parametrize("plan", LONG, ids=lambda plan: plan.verifier)
def test_layers_pile_up_and_end(tiny: TinyEngine, plan: Plan) -> None:
    request = tiny.engine.add(PROMPT, SamplingParams(max_tokens=120, seed=1), plan)
    most, ended = 0, False
    while tiny.engine.has_work:
        before, tokens = request.target_layers, len(request.token_ids)
        tiny.engine.step()
        tiny.target.allocator.check([request.slots])
        new = len(request.token_ids) - tokens
        assert len(request.target_layers) < plan.depth
        for layer in request.target_layers:
            assert 0 < layer.remaining <= plan.depth - (len(request.token_ids) - layer.since)
        old = [layer for layer in request.target_layers if layer.since < tokens]
        earlier = {layer.since: layer for layer in before}
        assert all(layer.remaining == earlier[layer.since].remaining - new for layer in old)
        most, ended = (
            max(most, len(request.target_layers)),
            ended or (bool(before) and not request.target_layers),
        )
    assert most > 1
    assert ended
    assert request.target_layers == ()


def test_a_pool_for_one_request_is_enough_for_its_layers() -> None:
    """What recalling borrows is part of what a request claims: nobody is ever short of slots."""
    plan, params = LONG[0], SamplingParams(max_tokens=40, seed=5)
    claim = 1 + 40 + 6 + 4**2
    tiny = tiny_engine(vocab=VOCAB, sharpness=1.0, slots=claim)
    requests = [tiny.engine.add(PROMPT, params, plan) for _ in range(2)]
    assert [request.slots_needed for request in requests] == [claim, claim]
    tiny.run(requests)
    assert requests[0].token_ids == requests[1].token_ids
    assert len(requests[0].token_ids) == 40
    with pytest.raises(InvalidArgument, match=r"at most 41 tokens, which the KV pool holds"):
        tiny.engine.add(PROMPT, SamplingParams(max_tokens=41), plan)


def test_an_early_end_drops_the_layers(tiny: TinyEngine) -> None:
    [tokens] = tiny.tokens([PROMPT], SamplingParams(max_tokens=30, seed=7), TWO_PATHS)
    left = 0
    for stop in set(tokens):
        params = SamplingParams(max_tokens=30, seed=7, stop_token_ids=(stop,))
        request = tiny.engine.add(PROMPT, params, TWO_PATHS)
        tiny.run([request])
        assert request.token_ids == tokens[: tokens.index(stop) + 1]
        assert request.target_layers == ()
    for seed in range(8):
        request = tiny.engine.add(PROMPT, SamplingParams(max_tokens=30, seed=seed), TWO_PATHS)
        tiny.engine.step()
        tiny.engine.step()
        left += bool(request.target_layers)
        tiny.engine.finish(request, FinishReason.STOP)
        assert request.target_layers == ()
    assert left > 0
    assert tiny.target.allocator.num_free == tiny.target.allocator.num_slots


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.verifier)
def test_greedy_requests_walk_greedily_and_leave_nothing(tiny: TinyEngine, plan: Plan) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    expected = tiny.tokens([PROMPT], params, Plan(verifier="none"))
    request = tiny.engine.add(PROMPT, params, plan)
    assert request.step_slots == plan.tree_slots
    while tiny.engine.has_work:
        tiny.engine.step()
        assert request.target_layers == ()
    assert [request.token_ids] == expected


def test_steps_without_layers_replay_nothing(
    tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    for name in ("snapshot", "advance", "probs_at"):
        monkeypatch.setattr(EagleDrafter, name, counting(getattr(EagleDrafter, name), calls))
    params = SamplingParams(max_tokens=20, seed=3)
    tiny.tokens([PROMPT] * 3, params, Plan(verifier="spectr_gbv", paths=2, depth=1))
    assert calls == []
    tiny.tokens([PROMPT] * 3, params, TWO_PATHS)
    assert calls


def counting(method: Callable[..., object], calls: list[int]) -> Callable[..., object]:
    def counted(*args: object) -> object:
        calls.append(1)
        return method(*args)

    return counted


def test_broken_recalled_distributions_fail_their_own_request_only(
    tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [SamplingParams(max_tokens=25, seed=seed) for seed in (1, 2)]
    expected = [tiny.tokens([PROMPT], p, TWO_PATHS) for p in params]
    healthy, doomed = [tiny.engine.add(PROMPT, p, TWO_PATHS) for p in params]
    advance = EagleDrafter.advance

    def poisoned(
        self: EagleDrafter,
        requests: Sequence[Request],
        snapshots: Sequence[DraftSnapshot],
        tokens: Tensor,
        slots: Tensor,
    ) -> list[DraftSnapshot]:
        places = advance(self, requests, snapshots, tokens, slots)
        return [
            dataclasses.replace(p, hidden=p.hidden * torch.nan) if request is doomed else p
            for request, p in zip(requests, places, strict=True)
        ]

    monkeypatch.setattr(EagleDrafter, "advance", poisoned)
    tiny.run([healthy, doomed])
    assert [healthy.token_ids] == expected[0]
    assert doomed.finish_reason is FinishReason.ERROR
    assert "draft_probs of request" in str(doomed.error)
    assert [doomed.token_ids] == [expected[1][0][: len(doomed.token_ids)]]


def test_broken_logits_fail_their_own_request_only(
    tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [SamplingParams(max_tokens=25, seed=seed) for seed in (1, 2)]
    [expected] = tiny.tokens([PROMPT], params[0], TWO_PATHS)
    healthy, doomed = [tiny.engine.add(PROMPT, p, TWO_PATHS) for p in params]
    tiny.engine.step()
    forward = tiny.target.forward

    def poisoned(segments: Sequence[object], *, logit_rows: Tensor) -> object:
        out = forward(segments, logit_rows=logit_rows)
        out.logits[segments[0].num_new :, 4] = torch.nan
        return out

    monkeypatch.setattr(tiny.target, "forward", poisoned)
    tiny.engine.step()
    monkeypatch.undo()
    tiny.run([healthy])
    assert healthy.token_ids == expected
    assert doomed.finish_reason is FinishReason.ERROR
    assert doomed.target_layers == ()


class ForgetfulDrafter(Drafter):
    """Drafts, and cannot say what it would have drafted."""

    draft_samplings = frozenset({DraftSampling.IID, DraftSampling.FIXED})

    def observe(self, request: Request, features: Tensor) -> None:
        raise NotImplementedError

    def catch_up(self, requests: Sequence[Request]) -> None:
        raise NotImplementedError

    def draft(
        self,
        requests: Sequence[Request],
        plan: Plan,
        draft_sampling: DraftSampling,
        tree_slots: Sequence[Tensor],
    ) -> DraftTree:
        raise NotImplementedError

    def forget(self, request: Request) -> None:
        raise NotImplementedError


def test_a_drafter_that_cannot_recall_is_refused(tiny: TinyEngine) -> None:
    engine = Engine(tiny.target, ForgetfulDrafter(), EngineConfig(kv_slots=4096))
    engine.check_plan(Plan(verifier="otbv"))
    expected = (
        r"drafter='ForgetfulDrafter': expected one that recalls earlier draft distributions, "
        r"for verifier 'spectr_gbv'"
    )
    with pytest.raises(InvalidArgument, match=expected):
        engine.check_plan(TWO_PATHS)


def test_plans_out_of_range_are_refused(tiny: TinyEngine) -> None:
    with pytest.raises(SamplingMismatch, match=r"paths=2: expected at most 1 for 'greedy_block'"):
        tiny.engine.check_plan(msgspec.structs.replace(ONE_PATH, paths=2))
    with pytest.raises(SamplingMismatch, match=r"draft_sampling='fixed': expected one of iid "):
        tiny.engine.check_plan(
            msgspec.structs.replace(TWO_PATHS, draft_sampling=DraftSampling.FIXED)
        )
    with pytest.raises(InvalidArgument, match=r"verifier='nope'.*greedy_block.*otbv.*spectr_gbv"):
        tiny.engine.check_plan(Plan(verifier="nope"))


def test_python_and_the_command_line_take_them(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    model, drafter = save_pair(tmp_path_factory.mktemp("pair"))
    params = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    for plan in PLANS:
        llm = LLM(model, drafter, plan=plan)
        answer = llm.generate("Hello", params)
        assert len(answer.token_ids) == 8
        result = run(
            capsys, "generate", "--model", str(model), "--drafter", str(drafter), "--raw",
            "--prompt", "Hello", "--max-tokens", "8", "--seed", "1", "--ignore-eos",
            "--verifier", plan.verifier, "--paths", str(plan.paths), "--depth", "3", "--no-stream",
        )  # fmt: skip
        assert result.status == 0, result.err
        assert result.out == answer.text + "\n"
