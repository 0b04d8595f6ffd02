"""What the planner learns from which step, and what changes its choice, in simulated worlds."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from support.simulated_engine import Simulation, World, constant, decoding, planned

from eaglegbv.config import AUTO, PLAIN, AutoPlan, Plan, Source, plan_name
from eaglegbv.request import PlanReason
from eaglegbv.scheduler.acceptance import AcceptanceByDepth
from eaglegbv.scheduler.costs import KnownCosts, StepCosts, StepShape, size_class
from eaglegbv.scheduler.planner import PlanGroup, Planner

# --- seconds of a step
PLANS = [PLAIN, *(Plan(paths=k, depth=d) for k, d in ((3, 4), (1, 2), (2, 6), (4, 8)))]


def shape(requests: int, plan: Plan, *, context: int = 100) -> StepShape:
    return StepShape.of([plan], requests, requests * context)


def linear(step: StepShape) -> float:
    weights = (4.0, 0.5, 0.25, 1.5, 0.5, 0.25, 0.05, 0.2)
    return float(np.dot(weights, step.features)) / 1000


def learned(seconds=linear, sizes=(1, 2, 6, 12), rounds: int = 12) -> StepCosts:
    costs = StepCosts()
    for _, size, plan in itertools.product(range(rounds), sizes, PLANS):
        costs.observe(shape(size, plan), seconds(shape(size, plan)))
    return costs


def error(costs: StepCosts, step: StepShape, seconds=linear) -> float:
    return abs(math.log(costs.seconds([step]).item() / seconds(step)))


def test_shapes_have_features_and_cells() -> None:
    lookup = Plan(paths=1, depth=6, source=Source.LOOKUP)
    drafting = StepShape.of([PLANS[1], PLANS[1], lookup, PLAIN, PLAIN], 5, 2560)
    assert drafting.features == (1, 5, 2.5, 1, 4, 2, 30, 15)
    assert drafting.cell == (3, 4, 12, 1)
    assert StepShape.of([PLANS[1]], 5, 0).drafting == 5
    assert StepShape.of([lookup, PLAIN], 2, 0).cell == (1, 3, 0, 0)
    assert [size_class(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17)] == [0, 1, 2, 2, 3, 3, 4, 4, 5]


def test_levels_that_one_forward_gives_cost_as_one() -> None:
    plans = [Plan(paths=k, depth=d) for k, d in ((1, 4), (3, 4), (3, 8))]
    every = [StepShape.of([plan], 2, 512) for plan in plans]
    at_once = [StepShape.of([plan], 2, 512, at_once=True) for plan in plans]
    assert [step.levels for step in every] == [4, 4, 8]
    assert [step.levels for step in at_once] == [1, 1, 1]
    assert [step.nodes for step in at_once] == [step.nodes for step in every]


def test_a_linear_machine_is_known_also_where_it_was_not_tried() -> None:
    costs = learned()
    for size, paths, depth in [(4, 2, 3), (1, 4, 5), (16, 3, 6), (3, 1, 7)]:
        assert error(costs, shape(size, Plan(paths=paths, depth=depth))) < 0.05
    assert error(costs, shape(4, PLAIN)) < 0.05
    again = StepCosts(costs.known)
    for size, plan in itertools.product((1, 12), PLANS):
        assert error(again, shape(size, plan)) < 0.03


def test_a_plan_dearer_than_the_fit_says_is_corrected_alone() -> None:
    def seconds(step: StepShape) -> float:
        return linear(step) * (1.5 if step.nodes == 12 and step.levels == 6 else 1)

    costs = learned(seconds, sizes=(1,), rounds=20)
    assert max(error(costs, shape(1, plan), seconds) for plan in PLANS) < 0.05


def test_trees_look_at_long_contexts_again() -> None:
    costs = learned(sizes=(1, 4, 16))
    for plan in PLANS[:2]:
        for _ in range(12):
            costs.observe(long := shape(4, plan, context=1024), linear(long))
    errors = [error(costs, shape(16, plan, context=1900)) for plan in PLANS]
    assert max(errors) < 0.3
    assert costs.node_seconds(2048) - costs.node_seconds(1024) == pytest.approx(0.2e-3, rel=0.2)


def test_a_stall_is_not_blamed_on_the_plan() -> None:
    costs = learned(sizes=(1,))
    costs.observe(step := shape(1, PLANS[1]), 50.0 * linear(step))
    assert max(error(costs, shape(1, plan)) for plan in PLANS) < 0.1


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_news_of_one_plan_is_believed_of_all_that_draft_and_have_rested(factor: float) -> None:
    costs = learned(sizes=(1,))
    for _ in range(30):
        costs.observe(step := shape(1, PLAIN), linear(step))
    surprised = [costs.observe(step := shape(1, PLANS[1]), factor * linear(step)) for _ in "two"]
    assert any(surprised)
    ratios = [costs.seconds([shape(1, plan)]).item() / linear(shape(1, plan)) for plan in PLANS]
    assert ratios[0] == pytest.approx(1, rel=0.2)
    assert ratios[1:] == pytest.approx([factor] * 4, rel=0.35)


def test_a_first_step_that_was_held_up_is_forgotten_after_the_second() -> None:
    costs = StepCosts()
    for plan in PLANS[1:] * 20:
        costs.observe(shape(1, plan), linear(shape(1, plan)))
    for seconds in (2.0, linear(shape(1, PLAIN))):
        costs.observe(shape(1, PLAIN), seconds)
    assert max(error(costs, shape(1, plan)) for plan in PLANS) < 0.25


# --- tokens of a step
def feed(
    acceptance: AcceptanceByDepth, chances: list[float], *, paths: int = 3, steps: int = 300
) -> None:
    generator = np.random.default_rng(7)
    first = acceptance._step
    for step in range(steps):
        accepted = int(np.cumprod(generator.random(len(chances)) < chances).sum())
        acceptance.observe(paths=paths, offered=len(chances), accepted=accepted)
        acceptance.tokens(first + step)
    acceptance.tokens(first + steps + 4)


def test_the_prior_grows_with_paths_and_depth_and_is_no_certainty() -> None:
    hazards = AcceptanceByDepth().hazards
    assert (hazards > 0).all()
    assert (hazards < 1).all()
    assert (np.diff(hazards, axis=0) > 0).all()
    assert (np.diff(AcceptanceByDepth().tokens(0), axis=1) > 0).all()


def test_chances_come_near_the_true_ones_and_follow_a_change() -> None:
    acceptance = AcceptanceByDepth()
    feed(acceptance, [0.9, 0.6, 0.3], steps=1500)
    assert acceptance.hazards[2, :3] == pytest.approx([0.9, 0.6, 0.3], abs=0.09)
    a, b, c = acceptance.hazards[2, :3].tolist()
    assert acceptance.tokens(0)[2, 2] == pytest.approx(1 + a + a * b + a * b * c)
    # Depths that were never offered follow those above them, numbers of paths the others.
    before, acceptance = AcceptanceByDepth().hazards, AcceptanceByDepth()
    feed(acceptance, [0.2, 0.2, 0.2], steps=300)
    assert (acceptance.hazards[:4, :3] < before[:4, :3] - 0.1).all()
    assert (acceptance.hazards[:4, 5] < before[:4, 5] - 0.1).all()
    feed(acceptance, [0.9, 0.9, 0.9], steps=600)
    assert (acceptance.hazards[2, :3] > 0.6).all()


@pytest.mark.parametrize("exponent", [0.2, 0.5, 1.0])
def test_what_a_number_of_paths_brings_follows_from_others(exponent: float) -> None:
    acceptance = AcceptanceByDepth()
    for paths in (1, 4):
        feed(acceptance, [1 - 0.5 ** (paths**exponent)], paths=paths)
    assert acceptance.hazards[1, 0] == pytest.approx(1 - 0.5 ** (2**exponent), abs=0.06)


# --- the choice
LARGE = World(step=(6.0, 0.4), draft=(1.0, 0.0, 0.3, 0.4), chance=constant(0.5))
"""Drafting pays in a batch of 1 and does not in one of 32: a node costs as much as a request."""


def begin(world: World, seed: int = 1) -> Simulation:
    """Return a simulation whose planner starts with the costs of ``world``."""
    return Simulation(world, Planner(world.recorded()), generator=np.random.default_rng(seed))


def test_it_learns_from_nothing() -> None:
    simulation = Simulation(World())
    simulation.run(4, 250)
    assert simulation.log[0][0][0].speculative
    assert simulation.share(PlanReason.LEARNING, 250) == 4 / 250
    assert simulation.run(4, 250) > 0.93 * World().best(4)


def test_wrong_kept_costs_are_scaled_by_the_first_steps_of_their_kind() -> None:
    world, kept = World(), []
    simulation = Simulation(world, Planner(world.recorded(drafts=0.4, plain=2.0), kept.append))
    simulation.planner.keep()
    assert kept == []  # nothing was learned
    simulation.run(1, 40)
    simulation.planner.keep()
    [costs] = kept
    assert costs.greedy == world.recorded(drafts=0.4, plain=2.0).greedy
    for step in costs.sampled:
        nodes = {(p.depth, p.tree_nodes - 1): p for p in AUTO.candidates}
        plan = nodes.get((step.shape.levels, step.shape.nodes), PLAIN)
        true = world.seconds(planned(plan, step.shape.requests))
        assert step.seconds == pytest.approx(true, rel=0.25)
    for _ in range(3):
        simulation.run(1, 400)
    assert len(kept) == 2


def test_kept_costs_are_confirmed_by_two_steps_of_each_kind() -> None:
    world = World()
    simulation = begin(world)
    assert simulation.run(1, 300) > 0.93 * world.best(1)
    assert simulation.share(PlanReason.LEARNING, 300) == 4 / 300


@pytest.mark.parametrize("batch", [1, 8])
def test_probes_are_rare_take_two_steps_and_try_several_plans(batch: int) -> None:
    world = World(draft=(4.0, 0.5, 1.0, 0.3))
    simulation = begin(world)
    simulation.run(batch, 100)
    simulation.run(batch, 1500)
    assert 0 < simulation.share(PlanReason.PROBE, 1500) < 0.05
    probed = [step[0][1] is PlanReason.PROBE for step in simulation.log]
    assert {len(list(run)) for probe, run in itertools.groupby(probed) if probe} == {2}
    tried = {step[0][0] for step, probe in zip(simulation.log, probed, strict=True) if probe}
    assert len(tried) > 2


def test_probes_count_what_drafters_read_for_them() -> None:
    world = World(step=(4.0, 2.0), chance=constant(0.1), draft=(0.4, 0.4, 0.2, 0.1), reading=1.0)
    simulation = begin(world)
    simulation.run(8, 100)
    assert simulation.run(8, 400, missed=100) > 0.985 * world.rate(8, PLAIN)
    assert simulation.share(PLAIN, 400) > 0.95


# --- what changes the choice
def test_a_batch_that_drains_comes_to_draft() -> None:
    simulation = begin(LARGE)
    shares = []
    for batch in (32, 1, 32, 1):
        simulation.run(batch, 100)
        simulation.run(batch, 60)
        shares.append(simulation.share(PLAIN, 60))
    assert shares[0] > 0.9
    assert shares[2] > 0.9
    assert max(shares[1], shares[3]) < 0.2
    # While others prefill, a plan has to pay in the batch that they will make.
    request, drafts = decoding(-1, AUTO, 1.0), []
    for others in (31, 0, 31, 0):
        simulation.planner.assign([request], others=others)
        drafts.append(request.plan.speculative)
    assert drafts == [False, True, False, True]


def test_long_prompts_change_the_choice() -> None:
    world = World(chance=constant(0.5), looks=1.0)
    simulation = begin(world)
    depths = []
    for context in (50, 6000):
        simulation.run(4, 300, context=context)
        assert simulation.run(4, 200, context=context) > 0.93 * world.best(4, context=context)
        plans = [step[0][0] for step in simulation.log[-200:]]
        depths.append(np.mean([p.paths * p.depth if p.speculative else 0 for p in plans]))
    assert depths[0] > 3 > 1 > depths[1]


def test_another_temperature_changes_the_choice() -> None:
    simulation = begin(World())
    for _ in range(2):
        shares = []
        for temperature, chance in ((0.3, 0.85), (1.2, 0.02)):
            simulation.world = World(chance=constant(chance), draft=(3.0, 0.3, 0.6, 0.05))
            simulation.run(2, 150, temperature=temperature)
            shares.append(simulation.share(PLAIN, 60))
    assert shares[0] < 0.2
    assert shares[1] > 0.8


@pytest.mark.parametrize(("missed", "drafts"), [(0, True), (4000, False)])
def test_what_a_drafter_missed_is_weighed_against_what_is_left(missed: int, drafts: bool) -> None:
    world = World(reading=0.2)
    simulation = begin(world)
    simulation.run(1, 60, missed=200)
    simulation.run(1, 60, missed=missed)
    assert (simulation.share(PLAIN, 60) < 0.2) if drafts else (simulation.log[-1][0][0] is PLAIN)


def test_one_hard_text_in_the_beginning_does_not_keep_drafting_off() -> None:
    world = World(step=(9, 0.5), draft=(2, 0.5, 0.7, 0.2), chance=constant(0.45), reading=0.04)
    shares = []
    for seed in range(4):
        planner = Planner(world.recorded())
        simulation = Simulation(world, planner, generator=np.random.default_rng(seed))
        simulation.world = replace(world, chance=constant(0.1))
        simulation.run(1, 60)
        simulation.world = world
        for _ in range(5):
            simulation.run(1, 60)
        shares.append(1 - simulation.share(PLAIN, 180))
    assert min(shares) > 0.5
    assert np.median(shares) > 0.9


# --- lookups
def sometimes(place: int, step: int) -> int:
    """Every other request's text has a loop in the second half of each 40 steps."""
    return 16 if place % 2 == 0 and step % 40 >= 20 else 0


@pytest.mark.parametrize(("batch", "seed"), [(1, 1), (6, 2), (6, 3)])
def test_lookups_take_turns_with_drafts_as_texts_change(batch: int, seed: int) -> None:
    world, rates = World(matched=sometimes, looked_up=0.95), []
    for auto in (AutoPlan(lookup_depth=0), AUTO):
        simulation = Simulation(world, generator=np.random.default_rng(seed))
        simulation.run(batch, 200, auto=auto, temperature=0.0)
        assert bool(simulation.share(Source.LOOKUP, 200)) == bool(auto.lookups)
        rates.append(simulation.run(batch, 400, auto=auto, temperature=0.0))
    assert rates[1] > 1.3 * rates[0]
    for n, entries in enumerate(simulation.log[-400:]):
        for place, entry in enumerate(entries):
            assert entry[0].source is not Source.LOOKUP or sometimes(place, n)
    looped = batch // 2 + batch % 2
    assert simulation.share(Source.LOOKUP, 400) > 0.9 * looped / (2 * batch)


def test_lookups_that_are_not_accepted_are_left_and_sampled_requests_have_none() -> None:
    world = World(matched=lambda place, step: 1, looked_up=0.05)
    simulation = begin(world)
    simulation.run(1, 300, temperature=0.0)
    assert simulation.run(1, 1000, temperature=0.0) > 0.93 * world.best(1)
    assert simulation.share(Source.LOOKUP, 1000) < 0.05
    simulation.world = World(matched=lambda place, step: 16, looked_up=0.95)
    simulation.run(2, 100, temperature=1.0)
    assert simulation.share(Source.LOOKUP, 100) == 0


def test_a_long_match_is_expected_to_go_on_before_any_was_tried() -> None:
    tokens = {}
    for matched in (0, 1, 4, 16):
        planner, request = Planner(World().recorded()), decoding(0, AUTO, 0.0)
        for _ in range(20):
            planner.assign([request], matched=lambda _, count=matched: count)
            planner.observe_step(World().seconds([request]))
        assert (request.plan.source is Source.LOOKUP) <= (matched > 0)
        tokens[matched] = request.plan.depth
    assert tokens[16] == 16


# --- what is learned from which step, and what is told
def expected(planner: Planner, members: int = 1) -> dict[str, float]:
    requests = [decoding(-n, AUTO, 1.0) for n in range(members)]
    scores = planner.scores(PlanGroup(AUTO, requests, members))
    assert scores is not None
    return dict(zip(map(plan_name, scores.plans), scores.seconds.tolist(), strict=True))


def test_a_step_that_others_take_part_in_teaches_nothing() -> None:
    simulation = Simulation(World())
    simulation.run(1, 200)
    planner, before = simulation.planner, expected(simulation.planner)
    members = [decoding(-n, AUTO, 1.0) for n in range(1, 9)]
    for _ in range(100):
        planner.assign([], others=1)
        planner.assign(members[:1], others=7)
        assert members[0].plan_reason is not PlanReason.LEARNING
        planner.observe_step(1.0)
    assert expected(planner) == before
    planner = Planner()
    for _ in range(30):
        planner.assign(members[:1], others=1)
        planner.observe_step(123.0)
    assert planner.explain(members[:1]) == "nothing is known yet about the cost of steps"
    planner.assign(members[:1])  # it uses up no lessons either
    assert members[0].plan_reason is PlanReason.LEARNING
    assert members[0].plan.speculative


def test_times_count_from_the_second_step_alike_on() -> None:
    """The first one of a kind takes ten times as long here, and nobody is misled."""
    simulation = Simulation(World())
    simulation.run(1, 300)
    planner, request = simulation.planner, decoding(-1, AUTO, 1.0)
    before, usual = None, expected(planner)
    for _ in range(300):
        planner.assign([request])
        first, before = request.plan != before, request.plan
        planner.observe_step(simulation.world.seconds([request]) * (10 if first else 1))
        planner.observe_request(request, offered=request.plan.depth, accepted=1)
    assert expected(planner) == pytest.approx(usual, rel=0.2)


def test_plans_keep_to_the_limits_and_fixed_ones_are_kept() -> None:
    auto = AutoPlan(max_paths=2, max_depth=3, draft_temperature=1.5)
    simulation = Simulation(World())
    simulation.run(3, 300, auto=auto)
    plans = {plan for step in simulation.log for plan, _ in step}
    assert plans <= {PLAIN, *auto.candidates}
    assert len(plans) > 4
    planner, plan = Planner(), Plan(paths=2, depth=2)
    fixed, free = decoding(0, None, 1.0), decoding(1, AUTO, 1.0)
    fixed.plan = plan
    for _ in range(20):
        planner.assign([fixed, free])
        assert (fixed.plan, fixed.plan_reason) == (plan, PlanReason.FIXED)
        assert free.plan_reason is not PlanReason.FIXED
        planner.observe_request(fixed, offered=2, accepted=1)
        planner.observe_step(0.01)


def test_greedy_and_sampled_steps_are_learned_apart() -> None:
    simulation = Simulation(World(chance=constant(0.9)))
    simulation.run(1, 100, temperature=0.0)
    assert "tokens/s" in simulation.planner.explain([decoding(-1, AUTO, 0.0)])
    assert "nothing is known" in simulation.planner.explain([decoding(-2, AUTO, 1.0)])


def test_it_says_in_words_why_a_plan_was_chosen() -> None:
    simulation = Simulation(World())
    requests, told = [decoding(n, AUTO, 1.0) for n in (-1, -2)], {}
    for _ in range(4):
        simulation.run(2, 100)
    planner = simulation.planner
    for _ in range(200):
        planner.assign(requests)
        told[requests[0].plan_reason] = (requests[0].plan, planner.why)
    plan, why = told[PlanReason.BEST]
    assert why.startswith(f"{plan_name(plan)}; tokens/s expected at batch 2: ")
    rates = [float(entry.split()[-1]) for entry in why.split(": ")[1].split(", ")]
    assert len(rates) == 5
    assert rates == sorted(rates, reverse=True)
    plan, why = told[PlanReason.PROBE]
    assert why.startswith(f"{plan_name(plan)} has not run for ")
    assert planner.explain(requests).startswith("tokens/s expected at batch 2: ")
    fixed = [decoding(0, None, 1.0)]
    assert planner.explain(fixed) == "no request leaves its plan to the engine"
    planner.assign(fixed)
    assert planner.why == ""
    assert Planner().known == KnownCosts()


# --- whether a drafter should read a prompt
def test_prompts_are_worth_reading_until_plain_decoding_was_better() -> None:
    world = World(chance=constant(0.05), draft=(8.0, 1.0, 2.0, 0.4))
    planner = (simulation := Simulation(world)).planner
    auto, fixed = (decoding(-1, plan, 1.0) for plan in (AUTO, None))
    fixed.drafted = True
    assert planner.worth_reading(auto, rows=20, batch=2)
    simulation.run(2, 200)
    assert not planner.worth_reading(auto, rows=20, batch=2)
    assert planner.worth_reading(fixed, rows=20, batch=2)
    assert planner.worth_reading(decoding(-2, AUTO, 0.0), rows=20, batch=2)


def test_what_is_expected_of_a_batch_is_what_was_best_in_batches_of_its_size() -> None:
    # A request that drafts costs more than it gains, which the step's own cost hides in small ones.
    world = World(step=(20.0, 0.5), draft=(0.5, 3.0, 0.2, 1.5))
    planner, auto = (simulation := Simulation(world)).planner, decoding(-1, AUTO, 1.0)
    for batch in (1, 16):
        simulation.run(batch, 150)
    worth = {n: planner.worth_reading(auto, rows=20, batch=n) for n in (1, 2, 9, 16, 64)}
    assert worth == {1: True, 2: True, 9: False, 16: False, 64: False}


def test_a_long_prompt_is_worth_reading_for_a_long_answer() -> None:
    world = World(step=(10.0, 0.0), chance=constant(0.8), reading=0.1)
    planner = (simulation := Simulation(world)).planner
    simulation.run(4, 150)

    def most(answer: int) -> int:
        """The longest prompt that is read, to a tenth."""
        request = decoding(-1, AUTO, 1.0, max_tokens=1 + answer)
        worth = [planner.worth_reading(request, rows=10 * n, batch=4) for n in range(1000)]
        assert worth == sorted(worth, reverse=True)
        return 10 * sum(worth)

    saved = 64 * (1 / world.rate(4, PLAIN) - 1 / world.best(4))
    assert most(64) == pytest.approx(saved / 0.1e-3, rel=0.3)
    assert most(128) == pytest.approx(2 * most(64), rel=0.1)
    assert most(100_000) == most(256)


def test_a_hiccup_while_one_prompt_is_read_does_not_set_the_price() -> None:
    planner = Planner()
    planner.observe_reading(100, 10.0)
    assert planner.reading_seconds == 0.0  # nothing is known by one
    for seconds in (0.01, 5.0):
        planner.observe_reading(100, seconds)
        assert planner.reading_seconds == pytest.approx(1e-4)
    for _ in range(5):
        planner.observe_reading(100, 0.02)
    assert planner.reading_seconds == pytest.approx(2e-4)
