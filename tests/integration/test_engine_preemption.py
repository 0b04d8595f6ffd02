"""Pre-emption, parts of prompts and shared beginnings with a real model and head: nothing changes.

The text of a pre-empted request is read again, in one go and not token by token, so its keys and
values may differ by rounding (float32: about 1e-6 of a logit). That flips a token where a uniform
number lies as close to a boundary, which is rare; the seeds here are fixed.
"""

import numpy as np
import pytest
import torch
from support.g_test import g_test, joint_probs
from support.tiny_engine import TinyEngine, tiny_engine
from torch import Tensor

from eaglegbv.config import PLAIN, Plan
from eaglegbv.drafters.eagle import EagleDrafter
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.models.target import TargetOutput
from eaglegbv.request import Request
from eaglegbv.sampling import SamplingParams, WarpSettings, warp
from eaglegbv.tree import DraftSampling

VOCAB = 6
LEVEL = 1e-4
"""A right engine fails a G-test of this file once in ten thousand seeds; the seeds are fixed."""

PLANS = [
    Plan(verifier="otbv", paths=3, depth=3),
    Plan(verifier="greedy_block", paths=1, depth=4),
    Plan(verifier="spectr_gbv", paths=2, depth=3),
    Plan(verifier="target_only", paths=2, depth=3, draft_sampling=DraftSampling.FIXED),
    PLAIN,
]


def named(plan: Plan) -> str:
    return plan.verifier


@pytest.fixture(scope="module", params=list(Arch))
def tiny(request: pytest.FixtureRequest) -> TinyEngine:
    return tiny_engine(
        vocab=VOCAB,
        arch=request.param,
        sharpness=2.5,
        slots=512,
        prefill_tokens=11,
        check_slots=True,
        prefix_cache=False,
    )


# In float64: a text read in other parts differs in float32 by up to 4e-5 of a value, by the CPU.


@pytest.fixture(scope="module")
def sharing() -> TinyEngine:
    return tiny_engine(vocab=VOCAB, sharpness=2.5, slots=512, check_slots=True, dtype=torch.float64)


@pytest.fixture(scope="module")
def plain() -> TinyEngine:
    return tiny_engine(
        vocab=VOCAB, sharpness=2.5, slots=512, prefix_cache=False, dtype=torch.float64
    )


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(VOCAB, size=length).tolist() for length in lengths]


def watch_outputs(tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> list[TargetOutput]:
    outputs: list[TargetOutput] = []
    forward = tiny.target.forward

    def watched(segments: object, *, logit_rows: Tensor) -> TargetOutput:
        outputs.append(forward(segments, logit_rows=logit_rows))
        return outputs[-1]

    monkeypatch.setattr(tiny.target, "forward", watched)
    return outputs


@pytest.mark.parametrize("plan", PLANS, ids=named)
def test_preempted_requests_go_on_where_they_were(tiny: TinyEngine, plan: Plan) -> None:
    """After every number of steps; verifiers with state leave something at many of them."""
    [prompt] = prompts(0, 17)
    params = SamplingParams(max_tokens=22, seed=4)
    [expected] = tiny.tokens([prompt], params, plan)
    left = 0
    for steps in (1, 2, 3, 4, 5, 6, 8):
        request = tiny.engine.add(prompt, params, plan)
        for _ in range(steps):
            tiny.engine.step()
        if request.finished:
            break
        layers, tokens = request.target_layers, list(request.token_ids)
        left += len(layers)
        tiny.engine.preempt(request)
        assert request.context == 0
        assert not request.draft_states
        assert tiny.target.allocator.num_free == tiny.target.allocator.num_slots
        assert request.target_layers == layers
        tiny.run([request])
        assert request.token_ids[: len(tokens)] == tokens
        assert request.token_ids == expected
        assert request.metrics.preemptions == 1
    assert bool(left) == (plan.verifier in ("greedy_block", "spectr_gbv"))


def test_dropped_layers_would_be_noticed(tiny: TinyEngine) -> None:
    """What the test above rests on: a layer forgotten in pre-emption changes the text."""
    plan = Plan(verifier="spectr_gbv", paths=2, depth=3)
    changed = 0
    for seed in range(12):
        [prompt] = prompts(seed, 9)
        params = SamplingParams(max_tokens=22, seed=seed)
        [expected] = tiny.tokens([prompt], params, plan)
        request = tiny.engine.add(prompt, params, plan)
        while not request.finished and not request.target_layers:
            tiny.engine.step()
        request.target_layers = ()
        if not request.finished:
            tiny.engine.preempt(request)
        tiny.run([request])
        changed += request.token_ids != expected
    assert changed > 0


@pytest.mark.parametrize("plan", PLANS[:3], ids=named)
def test_preempted_between_others_nobody_differs(tiny: TinyEngine, plan: Plan) -> None:
    texts = prompts(1, 5, 23, 9, 14)
    params = SamplingParams(max_tokens=16, seed=8)
    expected = [tiny.tokens([text], params, plan)[0] for text in texts]
    requests = [tiny.engine.add(text, params, plan) for text in texts]
    turn = 0
    while tiny.engine.has_work:
        tiny.engine.step()
        turn += 1
        running = [r for r in requests if r.context and not r.finished]
        if turn % 2 and running and turn < 60:
            tiny.engine.preempt(running[turn % len(running)])
    assert [r.token_ids for r in requests] == expected
    assert sum(r.metrics.preemptions for r in requests) > 5


def test_a_prompt_read_in_parts_gives_what_it_gives_at_once(
    tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    [prompt] = prompts(2, 40)
    request = tiny.engine.add(prompt, SamplingParams(max_tokens=1, seed=1), PLANS[0])
    outputs = watch_outputs(tiny, monkeypatch)
    tiny.run([request])
    # Parts of 11 tokens; only the last one's last row has logits.
    assert [len(o.features) for o in outputs if o.features is not None] == [11, 11, 11, 7]
    assert [len(o.logits) for o in outputs] == [0, 0, 0, 1]
    with torch.inference_mode():
        whole = tiny.model(torch.tensor([prompt]), output_hidden_states=True)
    torch.testing.assert_close(outputs[-1].logits[0], whole.logits[0, -1], atol=1e-5, rtol=1e-5)


def test_the_head_knows_the_same_after_parts_and_after_pre_emption(
    tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hidden state that the next tree is drawn from, by three ways of coming to it."""
    [prompt] = prompts(3, 40)
    drafter = tiny.engine._drafting.drafter
    assert isinstance(drafter, EagleDrafter)

    def state(budget: int, *, preempted: bool) -> Tensor:
        monkeypatch.setattr(tiny.engine._scheduler, "_prefill_tokens", budget)
        request = tiny.engine.add(prompt, SamplingParams(max_tokens=30, seed=1), PLANS[0])
        while len(request.token_ids) < 6:
            tiny.engine.step()
        if preempted:
            tiny.engine.preempt(request)
            while request.to_prefill:
                tiny.engine.step()
        drafter.catch_up([request])
        hidden = drafter.snapshot(request).hidden
        tiny.engine.cancel(request)
        return hidden

    whole = state(1000, preempted=False)
    torch.testing.assert_close(state(7, preempted=False), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state(7, preempted=True), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state(1000, preempted=True), whole, atol=1e-5, rtol=1e-5)


def read(tiny: TinyEngine, text: list[int], params: SamplingParams, plan: Plan) -> Request:
    """Return a request that has read its prompt, and nothing more."""
    request = tiny.engine.add(text, params, plan)
    tiny.engine.step()
    assert request.to_prefill == 0
    return request


def rows_of(tiny: TinyEngine, request: Request) -> list[Tensor]:
    """Keys and values of the text in the pools of the target and, where it follows, the head."""
    drafter = tiny.engine._drafting.drafter
    assert isinstance(drafter, EagleDrafter)
    pools = [tiny.target.pool, *([drafter._forward.attention.pool] if request.drafted else [])]
    slots = request.slots
    return [rows[:, slots].clone() for pool in pools for rows in (pool.keys, pool.values)]


def check_like_alone(
    sharing: TinyEngine, plain: TinyEngine, text: list[int], params: SamplingParams, plan: Plan
) -> Request:
    """Check that rows of a prompt and answer are what an engine without a cache has."""
    ours, alone = (read(tiny, text, params, plan) for tiny in (sharing, plain))
    torch.testing.assert_close(rows_of(sharing, ours), rows_of(plain, alone), atol=1e-5, rtol=1e-5)
    sharing.run([ours])
    plain.run([alone])
    assert ours.token_ids == alone.token_ids
    return ours


@pytest.mark.parametrize("plan", PLANS, ids=named)
def test_texts_that_begin_alike_share_and_give_what_they_give_alone(
    sharing: TinyEngine, plain: TinyEngine, plan: Plan
) -> None:
    """At block boundaries too: the head's row before the first own token reads that token."""
    [stem] = prompts(4, 48)
    texts = [[*stem[:cut], *tail] for cut in (32, 33, 47, 48) for tail in ([0], [1, 2], [3] * 9)]
    params = SamplingParams(max_tokens=12, seed=3)
    shared = 0
    for text in texts:
        request = check_like_alone(sharing, plain, text, params, plan)
        assert request.metrics.cached_tokens % 16 == 0
        shared += request.metrics.cached_tokens
    assert shared >= 11 * 16


def test_a_second_turn_reads_only_what_is_new(sharing: TinyEngine, plain: TinyEngine) -> None:
    """The answer of the first turn is shared too, as far as the head's rows are final."""
    for seed in range(6):
        [prompt] = prompts(50 + seed, 20)
        params = SamplingParams(max_tokens=29 + seed, seed=seed)
        first = sharing.engine.add(prompt, params, PLANS[0])
        sharing.run([first])
        conversation = [*prompt, *first.token_ids, 1, 2, 3]
        second = check_like_alone(sharing, plain, conversation, params, PLANS[0])
        # The last tokens of the first turn were never run through the head.
        assert second.metrics.cached_tokens in (32, 48)


def test_plain_requests_leave_nothing_to_drafted_ones(sharing: TinyEngine) -> None:
    """The head has no rows for a text that it was not shown."""
    [prompt] = prompts(6, 40)
    cached = []
    for plan in (PLAIN, PLANS[0], PLAIN, PLANS[0]):
        request = sharing.engine.add(prompt, SamplingParams(max_tokens=2), plan)
        sharing.run([request])
        cached.append(request.metrics.cached_tokens)
    assert cached == [0, 0, 32, 32]


SETTINGS = [
    (Plan(verifier="otbv", paths=3, depth=2), 1.0, 1.0),
    (Plan(verifier="gbv", paths=2, depth=3, draft_temperature=1.5), 0.7, 0.95),
    (Plan(verifier="greedy_block", paths=1, depth=3), 1.0, 1.0),
    (PLAIN, 0.7, 0.95),
    (Plan(verifier="spectr_gbv", paths=2, depth=2), 1.0, 1.0),
    (Plan(verifier="spectr_gbv", paths=2, depth=3), 0.7, 0.95),
]
"""Plan, temperature and top-p of requests in turn; each distribution comes from three plans."""


def sample(tiny: TinyEngine, count: int) -> dict[float, list[int]]:
    """First three tokens by temperature, from crowds of all settings, pre-empted at random."""
    rng = np.random.default_rng(7)
    requests = []
    for number in range(count):
        plan, temperature, top_p = SETTINGS[number % len(SETTINGS)]
        params = SamplingParams(max_tokens=3, seed=number, temperature=temperature, top_p=top_p)
        requests.append(tiny.engine.add([3, 1, 2], params, plan))
    while tiny.engine.has_work:
        tiny.engine.step()
        running = list(tiny.engine._scheduler.running)
        for place in np.flatnonzero(rng.random(len(running)) < 0.1):
            tiny.engine.preempt(running[place])
    assert tiny.target.allocator.num_free == tiny.target.allocator.num_slots
    assert sum(bool(r.metrics.preemptions) for r in requests) > count // 20
    cells: dict[float, list[int]] = {}
    for request in requests:
        own = cells.setdefault(request.params.temperature, [])
        own.append(int(np.ravel_multi_index(request.token_ids, [4] * 3)))
    return cells


def test_joint_distributions_of_mixed_batches_under_pre_emption() -> None:
    crowded = tiny_engine(vocab=4, sharpness=1.5, slots=1 << 13, max_batch=500)
    for (_, temperature, top_p), cells in zip(
        SETTINGS, sample(crowded, 18_000).values(), strict=False
    ):
        settings = SamplingParams(temperature=temperature, top_p=top_p)

        @torch.inference_mode()
        def next_probs(
            prefixes: list[list[int]], settings: SamplingParams = settings
        ) -> np.ndarray:
            logits = crowded.model(torch.tensor(prefixes)).logits[:, -1]
            warped = warp(logits, WarpSettings.of([settings], [len(prefixes)]))
            return warped.double().softmax(dim=1).numpy()

        result = g_test(cells, joint_probs(next_probs, [3, 1, 2], 3))
        assert result.power > 0.8, result
        assert result.p_value > LEVEL, result
