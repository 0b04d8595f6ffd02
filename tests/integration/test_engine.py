"""The engine as a whole: lossless, reproducible, leak-free, and clear about bad input.

With 8,500 samples over some 50 cells the G-test at level 1e-4 has a power of 0.65 against a target
at total variation 0.04, spread as thinly as can be; that is asserted, not assumed. The seeds are
fixed: a right engine fails a test here once in ten thousand choices of them.
"""

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from support.eight_bits import needs_int8
from support.g_test import GTest, g_test, joint_probs
from support.tiny_engine import TinyEngine, tiny_engine

from eaglegbv.attention.base import Segment
from eaglegbv.config import EngineConfig, Plan
from eaglegbv.drafters.eagle import EagleDrafter
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.engine import Engine
from eaglegbv.errors import InvalidArgument, SamplingMismatch
from eaglegbv.fused_linears import Quantization
from eaglegbv.metrics import Phase
from eaglegbv.models.target import TargetOutput
from eaglegbv.request import FinishReason, Request
from eaglegbv.sampling import SamplingParams, WarpSettings, warp
from eaglegbv.tree import DraftSampling, DraftTree, check_tree

PROMPT = [3, 1, 4, 1, 5]
VOCAB = 8
TOKENS = 3
LEVEL = 1e-4

PLANS = {
    "none": Plan(verifier="none", paths=1, depth=1),
    "token": Plan(verifier="token", paths=1, depth=2),
    "block": Plan(verifier="block", paths=1, depth=2),
    "gbv": Plan(verifier="gbv", paths=3, depth=2),
    "otbv": Plan(verifier="otbv", paths=3, depth=2, draft_width=5),
    "otbv hot": Plan(verifier="otbv", paths=2, depth=2, draft_temperature=1.7),
    "otbv fixed": Plan(verifier="otbv", paths=3, depth=2, draft_sampling=DraftSampling.FIXED),
    "target_only": Plan(verifier="target_only", paths=3, depth=2),
}
SAMPLES = 12_000
BY_SAMPLING = {
    "specinfer wor": Plan(verifier="specinfer", draft_sampling=DraftSampling.WOR, paths=3, depth=2),
    "traversal wor": Plan(verifier="traversal", draft_sampling=DraftSampling.WOR, paths=3, depth=2),
    "greedy_draft": Plan(verifier="greedy_draft", paths=3, depth=2, draft_temperature=1.5),
    "otbv greedy": Plan(
        verifier="otbv",
        draft_sampling=DraftSampling.GREEDY,
        paths=3,
        depth=2,
        draft_temperature=1.5,
    ),
    "spechub": Plan(verifier="spechub", paths=4, depth=2),
}
SAMPLES_BY_SAMPLING = 8_500


@pytest.fixture(scope="module")
def tiny() -> TinyEngine:
    return tiny_engine(vocab=VOCAB, sharpness=3.0, slots=16_384, max_batch=512)


@pytest.fixture(scope="module")
def quantised() -> TinyEngine:
    """The same models, the head's weights in 8 bits."""
    settings = {"slots": 16_384, "max_batch": 512, "quantization": Quantization.INT8}
    return tiny_engine(vocab=VOCAB, sharpness=3.0, **settings)


@pytest.fixture(scope="module")
def tiny1() -> TinyEngine:
    return tiny_engine(vocab=VOCAB, arch=Arch.EAGLE1, sharpness=3.0)


def exact_probs(tiny: TinyEngine, params: SamplingParams) -> np.ndarray:
    """The joint distribution of the first tokens, by the plain model, each with its penalties."""

    @torch.inference_mode()
    def next_probs(prefixes: list[list[int]]) -> np.ndarray:
        logits = tiny.model(torch.tensor(prefixes)).logits[:, -1]
        generated = [prefix[len(PROMPT) :] for prefix in prefixes]
        for row, tokens in zip(logits, generated, strict=True):
            for token in set(tokens) | set(PROMPT):
                factor = params.repetition_penalty
                row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
            for token in set(tokens):
                row[token] -= params.presence_penalty
                row[token] -= params.frequency_penalty * tokens.count(token)
        settings = WarpSettings.of([params], [len(prefixes)])
        return warp(logits, settings).double().softmax(dim=1).numpy()

    return joint_probs(next_probs, PROMPT, TOKENS)


FREE = SamplingParams(max_tokens=TOKENS)


def g_test_of(tiny: TinyEngine, plan: Plan, params: SamplingParams, samples: int) -> GTest:
    """The G-test of requests that differ in their seeds alone."""
    seeded = [msgspec.structs.replace(params, seed=seed) for seed in range(samples)]
    return g_test(sample(tiny, plan, seeded), exact_probs(tiny, params))


def check_sampling(
    tiny: TinyEngine,
    plan: Plan,
    params: SamplingParams = FREE,
    *,
    samples: int = SAMPLES,
    power: float = 0.8,
) -> None:
    result = g_test_of(tiny, plan, params, samples)
    assert result.power > power, result
    assert result.p_value > LEVEL, result


def sample(tiny: TinyEngine, plan: Plan, params: list[SamplingParams]) -> list[int]:
    requests = [tiny.engine.add(PROMPT, p, plan) for p in params]
    while tiny.engine.has_work:
        tiny.engine.step()
    assert tiny.target.allocator.num_free == tiny.target.allocator.num_slots
    cells = np.ravel_multi_index(np.array([r.token_ids for r in requests]).T, [VOCAB] * TOKENS)
    return [int(cell) for cell in cells]


@pytest.mark.parametrize("name", PLANS)
def test_joint_distribution_is_the_targets(tiny: TinyEngine, name: str) -> None:
    check_sampling(tiny, PLANS[name])


@pytest.mark.parametrize("name", BY_SAMPLING)
def test_every_draft_sampling_keeps_the_joint_distribution(tiny: TinyEngine, name: str) -> None:
    check_sampling(tiny, BY_SAMPLING[name], samples=SAMPLES_BY_SAMPLING, power=0.65)


@needs_int8
def test_a_quantised_head_leaves_the_distribution_alone(quantised: TinyEngine) -> None:
    plan = Plan(verifier="otbv", paths=3, depth=2)
    check_sampling(quantised, plan, samples=SAMPLES_BY_SAMPLING, power=0.65)
    with pytest.raises(InvalidArgument, match=r"draft_quantization='int8'.*'spectr_gbv' going by"):
        quantised.engine.check_plan(Plan(verifier="spectr_gbv", paths=2, depth=2))


def test_joint_distribution_when_warped(tiny1: TinyEngine) -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=1.4, top_k=6, top_p=0.9, min_p=0.02)
    check_sampling(tiny1, PLANS["otbv"], params)


def test_joint_distribution_when_penalised(tiny: TinyEngine) -> None:
    params = SamplingParams(
        max_tokens=TOKENS, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7
    )
    check_sampling(tiny, PLANS["otbv"], params)


@pytest.mark.parametrize(
    ("plan", "samples"),
    [
        (PLANS["otbv"], 4_000),
        *((BY_SAMPLING[name], 2_500) for name in ("specinfer wor", "greedy_draft", "spechub")),
    ],
    ids=["otbv", "specinfer wor", "greedy_draft", "spechub"],
)
def test_misreported_draft_probs_are_noticed(
    tiny: TinyEngine, plan: Plan, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = EagleDrafter.draft

    def misreport(*args: object) -> DraftTree:
        """Hand on other probabilities than those drawn from, in the same order of likelihood."""
        tree = draft(*args)
        flat = tree.draft_probs.sqrt()
        return dataclasses.replace(tree, draft_probs=flat / flat.sum(dim=2, keepdim=True))

    monkeypatch.setattr(EagleDrafter, "draft", misreport)
    assert g_test_of(tiny, plan, FREE, samples).p_value < LEVEL


@pytest.mark.parametrize("arch", list(Arch))
def test_greedy_text_equals_transformers(arch: Arch) -> None:
    tiny = tiny_engine(vocab=64, arch=arch, sharpness=1.0)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(64, (int(length),), generator=generator).tolist()
        for length in torch.randint(1, 30, (40,), generator=generator)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=24, seed=0)
    plain = [
        # The mask says that no token is padding: generate would take the padding id for it.
        tiny.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    for plan in (Plan(paths=3, depth=4), Plan(paths=1, depth=2), Plan(verifier="none")):
        assert tiny.tokens(prompts, params, plan) == plain


def test_nodes_at_consecutive_positions_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above rests on: positions in the rotary embedding are depths."""
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


def test_same_seed_same_tokens_alone_and_in_a_batch(tiny: TinyEngine) -> None:
    plan = Plan(paths=3, depth=3)
    params = SamplingParams(max_tokens=20, seed=42)
    [alone] = tiny.tokens([PROMPT], params, plan)
    ours = tiny.engine.add(PROMPT, params, plan)
    crowd = [
        tiny.engine.add(
            [1 + n % 5] * (1 + n), SamplingParams(max_tokens=5 + n, temperature=0.5 * (n % 3)), p
        )
        for n, p in enumerate([*PLANS.values(), plan, plan])
    ]
    tiny.run([ours, *crowd])
    assert ours.token_ids == alone


@pytest.mark.parametrize(
    ("plan", "top_p"),
    [
        *((plan, 0.8) for plan in BY_SAMPLING.values()),
        (Plan(draft_sampling=DraftSampling.FIXED, paths=3, depth=3), 1.0),
    ],
    ids=[*BY_SAMPLING, "otbv fixed"],
)
def test_trees_of_different_sizes_do_not_move_each_others_numbers(
    tiny: TinyEngine, plan: Plan, top_p: float
) -> None:
    # top_p leaves some nodes fewer tokens than paths are wanted.
    prompts = [PROMPT[: 1 + n % 5] for n in range(12)]
    params = [SamplingParams(max_tokens=12, seed=n, top_p=top_p) for n in range(12)]
    together = [tiny.engine.add(p, s, plan) for p, s in zip(prompts, params, strict=True)]
    tiny.run(together)
    for request, prompt, own in zip(together, prompts, params, strict=True):
        assert [request.token_ids] == tiny.tokens([prompt], own, plan)


@pytest.mark.parametrize("name", BY_SAMPLING)
def test_drafts_are_accepted_at_every_depth(
    tiny: TinyEngine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = EagleDrafter.draft

    def checked(*args: object) -> DraftTree:
        tree = draft(*args)
        check_tree(tree)
        return tree

    monkeypatch.setattr(EagleDrafter, "draft", checked)
    plan = BY_SAMPLING[name]
    request = tiny.engine.add(PROMPT, SamplingParams(max_tokens=100, seed=1), plan)
    tiny.run([request])
    assert min(request.metrics.accepted_by_depth) > 0
    assert len(request.metrics.accepted_by_depth) == plan.depth


def test_a_pair_needs_room_for_two(tiny: TinyEngine) -> None:
    for plan in (
        Plan(verifier="spechub", paths=1),
        Plan(verifier="target_only", draft_sampling=DraftSampling.HUB, paths=1),
    ):
        with pytest.raises(InvalidArgument, match=r"paths=1: expected at least 2 .*'hub'"):
            tiny.engine.add(PROMPT, SamplingParams(), plan)


def test_requests_without_a_seed_differ_but_follow_the_engines(tiny: TinyEngine) -> None:
    def answers(seed: int) -> list[list[int]]:
        engine = Engine(tiny.target, None, EngineConfig(seed=seed, kv_slots=4096))
        fresh = dataclasses.replace(tiny, engine=engine)
        return fresh.tokens([PROMPT] * 3, SamplingParams(max_tokens=12), PLANS["none"])

    first, again, other = answers(1), answers(1), answers(2)
    assert first == again
    assert len({tuple(tokens) for tokens in first + other}) == 6


def test_a_waiting_request_is_served_when_slots_are_free() -> None:
    tiny = tiny_engine(slots=64, max_batch=8)
    plan = Plan(paths=2, depth=2)
    params = SamplingParams(max_tokens=20, seed=1)
    requests = [tiny.engine.add(PROMPT, params, plan) for _ in range(6)]
    tiny.engine.step()
    assert sum(request.prefilled for request in requests) == 2
    tiny.run(requests)
    assert {tuple(request.token_ids) for request in requests} == {tuple(requests[0].token_ids)}


def test_broken_logits_fail_their_own_request_only(
    tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_end_of_sequence_inside_an_accepted_path_ends_the_text(tiny: TinyEngine) -> None:
    plan = Plan(paths=3, depth=4)
    [tokens] = tiny.tokens([PROMPT], SamplingParams(max_tokens=30, seed=7), plan)
    for at, stop in enumerate(tokens):
        params = SamplingParams(max_tokens=30, seed=7, stop_token_ids=(stop,))
        request = tiny.engine.add(PROMPT, params, plan)
        tiny.run([request])
        assert request.token_ids == tokens[: tokens.index(stop) + 1]
        last = len(request.token_ids) == 30
        assert request.finish_reason is FinishReason.STOP or (last and at == 29)
        assert request.metrics.committed_tokens == len(request.token_ids) - 1


def test_tokens_behind_the_end_of_a_text_would_be_noticed(
    tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above rests on: a step's tokens are cut at the first that ends the text."""

    def whole(engine: Engine, request: Request, tokens: list[int]) -> list[int]:
        return tokens[: request.max_tokens - len(request.token_ids)]

    plan = Plan(paths=3, depth=4)
    [tokens] = tiny.tokens([PROMPT], SamplingParams(max_tokens=30, seed=7), plan)
    monkeypatch.setattr(Engine, "_cut", whole)
    stops = [SamplingParams(max_tokens=30, seed=7, stop_token_ids=(stop,)) for stop in set(tokens)]
    assert any(
        tiny.tokens([PROMPT], params, plan)[0] != tokens[: tokens.index(*params.stop_token_ids) + 1]
        for params in stops
    )


def test_metrics_add_up(tiny: TinyEngine) -> None:
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


@pytest.mark.parametrize(
    ("prompt", "params", "plan", "error", "message"),
    [
        ([], {}, {}, InvalidArgument, r"prompt=\[\]: expected at least one token"),
        ([99], {}, {}, InvalidArgument, r"prompt=99: expected token ids in \[0, 8\)"),
        ([1] * 256, {}, {}, InvalidArgument, r"prompt='256 tokens': expected at most 255 tokens"),
        ([1], {}, {"verifier": "nope"}, InvalidArgument, r"verifier='nope': expected one of"),
        (
            [1],
            {},
            {"verifier": "gbv", "draft_sampling": "fixed"},
            SamplingMismatch,
            r"draft_sampling='fixed': expected",
        ),
        (
            [1],
            {},
            {"verifier": "block", "paths": 2},
            SamplingMismatch,
            r"paths=2: expected at most 1",
        ),
        (
            [1],
            {},
            {"draft_sampling": "wor"},
            (SamplingMismatch, InvalidArgument),
            r"draft_sampling='wor': expected",
        ),
    ],
)
def test_bad_input_is_refused_by_name(
    tiny: TinyEngine,
    prompt: list[int],
    params: dict[str, object],
    plan: dict[str, object],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        tiny.engine.add(prompt, SamplingParams(**params), Plan(**plan))
    assert not tiny.engine.has_work


def test_a_prompt_over_the_pool_is_refused() -> None:
    tiny = tiny_engine(slots=32)
    with pytest.raises(InvalidArgument, match=r"prompt='20 tokens \+ 30 to generate'.*KV pool"):
        tiny.engine.add([1] * 20, SamplingParams(max_tokens=30), Plan(paths=1, depth=1))


def test_speculation_needs_a_drafter(tiny: TinyEngine) -> None:
    engine = Engine(tiny.target, None)
    with pytest.raises(InvalidArgument, match="drafter=None: expected a drafter"):
        engine.add(PROMPT, SamplingParams(), Plan())
