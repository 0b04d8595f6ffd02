"""Plans chosen by the engine: the text keeps its distribution, whatever the choice depends on.

The choice may depend on all of the past. So one planner here is made to choose by the committed
text and the acceptances so far, a new plan every step; and a planner that peeks at the numbers of
the step to come, which must be noticed, shows what the tests can see.
"""

import random
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.g_test import GTest, g_test
from support.tiny_engine import TinyEngine, cells_of, tiny_engine

from eaglegbv.config import AUTO, PLAIN, AutoPlan, Plan, plans_of
from eaglegbv.cuda_graphs import GraphMode
from eaglegbv.drafters.eagle import EagleDrafter
from eaglegbv.drafters.host_drafting import DraftCall
from eaglegbv.engine import Engine
from eaglegbv.errors import InvalidArgument
from eaglegbv.metrics import COMMITTED, FINISHED, FORWARDS, PREEMPTIONS, REASONS, StepRecord
from eaglegbv.request import PlanReason, Request
from eaglegbv.rng import Purpose
from eaglegbv.sampling import SamplingParams
from eaglegbv.scheduler.planner import Planner
from eaglegbv.tree import DraftTree

PROMPT = [3, 1, 4, 1, 5]
VOCAB = 8
TOKENS = 3
SAMPLES, SHIFT, POWER = 1_500, 0.08, 0.65
LEVEL = 1e-3
LIMITS = AutoPlan(max_paths=3, max_depth=3)


@pytest.fixture
def tiny() -> TinyEngine:
    """An engine of its own planner, which knows nothing yet."""
    return tiny_engine(vocab=VOCAB, sharpness=3.0, slots=16_384, max_batch=256)


@pytest.fixture
def engine(tiny: TinyEngine) -> Engine:
    return tiny.engine


@pytest.fixture(scope="module")
def dist() -> np.ndarray:
    """The exact joint distribution of the first tokens, from the plain model."""
    return tiny_engine(vocab=VOCAB, sharpness=3.0).joint_probs(PROMPT, TOKENS)


class RestlessPlanner(Planner):
    """Another plan every step, by the text and the acceptances of all requests so far."""

    plans = (PLAIN, *plans_of(LIMITS, greedy=True))

    def __init__(self, *, auto_only: bool = False) -> None:
        super().__init__()
        self.accepted = 0
        self.auto_only = auto_only

    def assign(self, requests: list[Request], **_: object) -> None:
        for request in requests:
            if self.auto_only and request.auto is None:
                continue
            choice = 3 * sum(request.token_ids) + request.step + self.accepted
            request.plan = self.plans[choice % len(self.plans)]

    def observe_request(self, request: Request, *, offered: int, accepted: int) -> None:
        self.accepted += accepted


def keep_little(monkeypatch: pytest.MonkeyPatch, kept: int, most: int) -> None:
    """Have no prompt be worth the drafter's reading, and few positions kept of what it missed."""
    monkeypatch.setattr(Planner, "worth_reading", lambda *_, **__: False)
    monkeypatch.setattr("eaglegbv.drafting._KEPT", kept)
    monkeypatch.setattr("eaglegbv.drafting._MOST_KEPT", most)


class PeekingPlanner(Planner):
    """Decodes plainly where the number that draws a plain step's token is small."""

    def assign(self, requests: list[Request], **_: object) -> None:
        for request in requests:
            [number] = request.rng.draw(request.step, Purpose.CORRECTION, 1)
            request.plan = PLAIN if number < 0.4 else Plan(paths=3, depth=2)


def check(tiny: TinyEngine, dist: np.ndarray, samples: int) -> GTest:
    """The G-test of requests that differ in their seeds alone; the engine runs them in batches."""
    requests = tiny.sample(PROMPT, SamplingParams(max_tokens=TOKENS), [LIMITS], samples)
    return g_test(cells_of(requests, VOCAB), dist, shift=SHIFT, level=LEVEL)


def test_joint_distribution_is_the_targets(tiny, engine, dist):
    result = check(tiny, dist, SAMPLES)
    assert result.power > POWER, result
    assert result.p_value > LEVEL, result
    assert len(engine.metrics.values[FORWARDS]) > 1  # by drafts and without


def test_joint_distribution_when_plans_follow_the_texts_and_drafters_begin_anew(
    monkeypatch, tiny, engine, dist
):
    """Another plan every step; drafters missed nearly all of what was read before they draft."""
    forgotten: set[int] = set()
    skip = EagleDrafter.skip

    def noted(self: EagleDrafter, request: Request, *, keep: int) -> None:
        forgotten.add(request.number)
        skip(self, request, keep=keep)

    monkeypatch.setattr(EagleDrafter, "skip", noted)
    keep_little(monkeypatch, 1, 2)
    engine._planner = RestlessPlanner()
    result = check(tiny, dist, SAMPLES)
    assert result.p_value > LEVEL, result
    assert len(forgotten) == SAMPLES
    assert len(engine.metrics.values[FORWARDS]) == 1 + len(plans_of(LIMITS, greedy=True))


def test_a_planner_that_peeks_is_noticed(tiny, dist):
    tiny.engine._planner = PeekingPlanner()
    assert check(tiny, dist, 2_500).p_value < LEVEL


@pytest.mark.parametrize("graphs", [GraphMode.OFF, GraphMode.EAGER])
def test_greedy_text_is_that_of_plain_decoding(graphs):
    """A text in a loop is looked up, where that may be, beside trees that the drafter goes on with.

    Sampled texts are never looked up.
    """
    tiny = tiny_engine(vocab=VOCAB, sharpness=3.0, graphs=graphs)
    params, prompts = SamplingParams(temperature=0, max_tokens=60), [PROMPT, PROMPT[1:]]
    expected = tiny.tokens(prompts, params, PLAIN)
    for planner, plan in (
        (Planner(), AUTO), (RestlessPlanner(), LIMITS), (Planner(), AutoPlan(lookup_depth=0))
    ):  # fmt: skip
        tiny.engine._planner = planner
        requests = [tiny.engine.add(prompt, params, plan) for prompt in prompts]
        sampled = tiny.engine.add(PROMPT, SamplingParams(max_tokens=60, seed=1), AUTO)
        tiny.run([*requests, sampled])
        assert [request.token_ids for request in requests] == expected
        assert len(sampled.token_ids) == 60
        assert not {**sampled.draft_states, **requests[0].draft_states}
        lookups = [sum(n for p, n in r.metrics.plans.items() if "lookup" in p) for r in requests]
        assert (lookups[0] > 1) == bool(plan.lookup_depth)
        if isinstance(planner, RestlessPlanner):  # it looks at no temperature, and uses all plans
            assert len(requests[0].metrics.plans) > 4
        else:
            assert not any("lookup" in name for name in sampled.metrics.plans)


def test_requests_of_one_seed_draw_numbers_of_their_own(engine):
    params, plan = SamplingParams(max_tokens=12, seed=5), Plan(paths=2, depth=2)
    auto = [engine.add(PROMPT, params, AUTO) for _ in range(2)]
    fixed = [engine.add(PROMPT, params, plan) for _ in range(2)]
    numbers = [r.rng.draw(0, Purpose.DRAFT, 4).tolist() for r in auto + fixed]
    assert numbers[0] != numbers[1]
    assert numbers[2] == numbers[3]
    assert numbers[2] not in numbers[:2]


def test_metrics_say_which_plans_were_used_and_why(engine):
    request = engine.add(PROMPT, SamplingParams(max_tokens=60, seed=1, ignore_eos=True), AUTO)
    assert engine.explain_plans() == "no request leaves its plan to the engine"
    records: list[StepRecord] = []
    engine.observe(SimpleNamespace(on_step=records.append))
    for _ in range(12):
        engine.step()
    assert engine.explain_plans().startswith("tokens/s expected at batch 1: ")
    while engine.has_work:
        engine.step()
    metrics = engine.metrics
    assert sum(request.metrics.plans.values()) == request.metrics.target_forwards
    assert request.metrics.plans == {k: int(v) for k, v in metrics.values[FORWARDS].items()}
    assert sum(metrics.values[REASONS].values()) == request.metrics.target_forwards
    assert PlanReason.LEARNING in metrics.values[REASONS]
    assert metrics.value(COMMITTED) == request.metrics.committed_tokens
    assert metrics.value(FINISHED, "length") == 1
    assert sum((Counter(r.plans) for r in records), Counter()) == Counter(request.metrics.plans)
    assert sum(r.nodes for r in records) == request.metrics.drafted_nodes
    assert sum(r.accepted for r in records) == request.metrics.accepted_tokens
    assert [r.number for r in records] == list(range(len(records)))
    assert records[0].prefilling == 1
    assert records[-1].kv_slots == 16_384
    assert "has to be timed" in records[1].why


def plain(self: Planner, requests: list[Request], **_: object) -> None:
    """Have those decode plainly that leave it open; see :meth:`Planner.assign`."""
    for request in requests:
        if request.auto is not None:
            request.plan = PLAIN


@pytest.mark.parametrize("graphs", [GraphMode.OFF, GraphMode.EAGER])
def test_a_drafter_long_at_rest_keeps_the_end_of_what_it_missed(monkeypatch, graphs):
    tiny = tiny_engine(vocab=VOCAB, sharpness=3.0, prefix_cache=False, graphs=graphs)
    keep_little(monkeypatch, 10, 20)
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    expected = tiny.tokens([PROMPT * 9], params, PLAIN)
    with monkeypatch.context() as resting:
        resting.setattr(Planner, "assign", plain)
        request = tiny.engine.add(PROMPT * 9, params, AUTO)
        tiny.engine.step()
        seen = []
        while len(request.token_ids) < 50:
            tiny.engine.step()
            seen.append(tiny.engine._drafting.behind(request))
        assert seen[:3] == [11, 12, 13]  # all of the prompt but its end
        assert max(seen) == 21
        assert seen.count(11) == 5
    tiny.engine._planner = RestlessPlanner()
    tiny.run([request])
    assert request.metrics.drafted_nodes > 0
    assert [request.token_ids] == expected


def test_drafters_that_skip_read_no_row_that_they_did_not_run(monkeypatch):
    """Texts that begin alike come, rest, draft and are pre-empted at random, in little room."""
    chance = random.Random(0)
    tiny = tiny_engine(vocab=VOCAB, sharpness=3.0, slots=900, max_batch=6, check_slots=True)
    engine, allocator = tiny.engine, tiny.target.allocator
    assert isinstance(engine._drafting.drafter, EagleDrafter)
    pool = engine._drafting.drafter._forward.attention.pool
    release, blank = allocator.release, allocator.blank

    def spoil(slots: torch.Tensor) -> None:
        for part in (pool.keys, pool.values):
            part[:, slots] = torch.nan

    spoil(torch.arange(900))
    monkeypatch.setattr(allocator, "release", lambda slots: (spoil(slots), release(slots))[1])
    monkeypatch.setattr(allocator, "blank", lambda slots: (spoil(slots), blank(slots))[1])
    draft = EagleDrafter.draft

    def sound(self: EagleDrafter, call: DraftCall) -> DraftTree:
        tree = draft(self, call)
        # What the head comes to at the root rests on all rows that it reads.
        assert all(self._root_hidden(request).isfinite().all() for request in call.requests)
        return tree

    monkeypatch.setattr(EagleDrafter, "draft", sound)
    keep_little(monkeypatch, 5, 12)
    monkeypatch.setattr(Planner, "worth_reading", lambda *_, **__: chance.random() < 0.3)
    resting = Planner()
    monkeypatch.setattr(resting, "assign", partial(plain, resting))
    prompts = [PROMPT * n + [n % VOCAB] * m for n in (4, 9, 20) for m in (1, 3, 30)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    alone = tiny_engine(vocab=VOCAB, sharpness=3.0, prefix_cache=False)
    expected = alone.tokens(prompts, params, PLAIN)
    requests, skipped = [], 0
    for _ in range(4):
        order = chance.sample(range(len(prompts)), len(prompts))
        plans = chance.choices((AUTO, Plan(paths=2, depth=2), PLAIN), (6, 1, 1), k=len(order))
        own = [engine.add(prompts[n], params, p) for n, p in zip(order, plans, strict=True)]
        requests += zip(order, own, strict=True)
        while engine.has_work:
            engine._planner = chance.choice((resting, RestlessPlanner(auto_only=True)))
            engine.step()
            skipped += any(request.skipped for request in engine._scheduler.running)
            if engine._scheduler.running and chance.random() < 0.05:
                engine._scheduler.preempt(chance.choice(engine._scheduler.running))
    assert [request.token_ids for _, request in requests] == [expected[n] for n, _ in requests]
    assert skipped > 20
    assert engine._cache.shared > 500
    assert engine.metrics.value(PREEMPTIONS) > 3
    assert sum(request.metrics.accepted_tokens for _, request in requests) > 300


def test_room_is_kept_for_the_largest_plan(engine):
    request = engine.add(PROMPT, SamplingParams(max_tokens=5), AUTO)
    assert request.step_slots == max(plan.tree_slots for plan in AUTO.candidates)
    assert request.drafted
    small = AutoPlan(max_paths=1, max_depth=2)
    greedy = engine.add(PROMPT, SamplingParams(max_tokens=5, temperature=0), small)
    assert greedy.step_slots == 1 + small.lookup_depth


def test_lookups_serve_an_answer_to_the_end_of_the_context(engine):
    for prompt in (PROMPT * 8, PROMPT * 50):
        request = engine.add(prompt, SamplingParams(temperature=0, max_tokens=10_000), AUTO)
        while engine.has_work:
            engine.step()
        assert len(prompt) + len(request.token_ids) == 256


def test_what_cannot_be_chosen_from_is_refused(engine, tiny):
    with pytest.raises(InvalidArgument, match=r"verifier='greedy_block'"):
        engine.check_plan(AutoPlan(verifier="greedy_block", max_paths=1))
    with pytest.raises(InvalidArgument, match="drafter=None"):
        Engine(tiny.target, None).check_plan(AUTO)
