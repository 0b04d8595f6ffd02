"""The planner in a simulated world finds what is best there, and follows when the world changes."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support.simulated_engine import Simulation, World, make_request

from eaglegbv.config import AUTO, PLAIN, AutoPlan, Plan, Source, plan_name
from eaglegbv.request import PlanReason
from eaglegbv.scheduler.planner import Planner


def is_plain(plan: Plan, reason: PlanReason) -> bool:
    return plan is PLAIN


def chance(value: float) -> Callable[[int, int], float]:
    return lambda place, depth: value


def falling(place: int, depth: int) -> float:
    return 0.8 * 0.7**depth


WORLDS = {
    "good drafter": World(chance=chance(0.8)),
    "middling drafter": World(),
    "poor drafter": World(chance=chance(0.15), draft=(2.0, 0.4, 0.7, 0.1)),
    "dear drafts": World(draft=(8.0, 1.0, 2.0, 0.4)),
    "first drafts only": World(chance=falling),
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_it_comes_near_the_best_fixed_plan(name: str, batch: int) -> None:
    simulation = Simulation(WORLDS[name])
    simulation.run(batch, 250)
    assert simulation.run(batch, 250) > 0.93 * simulation.best(batch)


def test_plain_decoding_where_drafts_do_not_pay() -> None:
    simulation = Simulation(WORLDS["dear drafts"])
    simulation.run(8, 100)
    rate = simulation.run(8, 300)
    assert rate > 0.97 * simulation.rate(8, PLAIN)
    assert simulation.share(is_plain, 300) > 0.95


SLIGHT = World(step=(4.0, 2.0), chance=chance(0.1), draft=(0.4, 0.4, 0.2, 0.1), reading=1.0)
"""Drafts lose a little, and a drafter takes a quarter of a lone step for a position it missed."""


def test_probes_count_what_drafters_read_for_them() -> None:
    simulation = Simulation(SLIGHT)
    for _ in range(4):
        simulation.run(8, 100, prompt=100)
    rate = simulation.run(8, 400, prompt=100)
    assert simulation.share(is_plain, 400) > 0.95
    assert rate > 0.985 * simulation.rate(8, PLAIN)


@pytest.mark.parametrize(("missed", "drafts"), [(0, True), (4000, False)])
def test_what_a_drafter_missed_is_weighed_against_what_is_left(missed: int, drafts: bool) -> None:
    simulation = Simulation(World(chance=chance(0.6), reading=0.2))
    for _ in range(3):
        simulation.run(1, 60, prompt=200)  # what reading costs is learned
    simulation.run(1, 60, prompt=missed)
    assert (
        simulation.share(lambda plan, reason: plan.speculative, 60) > 0.8
        if drafts
        else (simulation.share(is_plain, 60) > 0.8)
    )


def test_deep_trees_where_drafts_are_accepted_and_levels_are_cheap() -> None:
    simulation = Simulation(World(chance=chance(0.92), draft=(0.5, 0.1, 0.2, 0.02)))
    simulation.run(1, 200)
    simulation.run(1, 100)
    assert simulation.share(lambda plan, reason: plan.depth >= 6, 100) > 0.8


def test_large_batches_decode_plainly_where_small_ones_draft() -> None:
    # Rows are free up to a point only: a node costs as much as a request.
    world = World(step=(6.0, 0.4), draft=(1.0, 0.0, 0.3, 0.4), chance=chance(0.5))
    simulation = Simulation(world)
    for batch in (1, 32):
        simulation.run(batch, 150)
    assert simulation.rate(1, Plan(paths=1, depth=3)) > 1.2 * simulation.rate(1, PLAIN)
    assert simulation.best(32) == simulation.rate(32, PLAIN)
    simulation.run(1, 100)
    assert simulation.share(is_plain, 100) < 0.2
    rate = simulation.run(32, 100)
    assert simulation.share(is_plain, 100) > 0.9
    assert rate > 0.97 * simulation.rate(32, PLAIN)


def test_while_others_read_a_plan_has_to_pay_in_the_batch_they_will_make() -> None:
    # Drafting pays in a batch of 1 and does not in one of 32.
    simulation = Simulation(World(step=(6.0, 0.4), draft=(1.0, 0.0, 0.3, 0.4), chance=chance(0.5)))
    for batch in (1, 32, 1):
        simulation.run(batch, 150)
    request = make_request(-1, AUTO, 1.0)
    drafts = []
    for others in (31, 0, 31, 0):
        simulation.planner.assign([request], others=others)
        drafts.append(request.plan.speculative)
    assert drafts == [False, True, False, True]


def test_it_returns_when_the_drafter_gets_better() -> None:
    simulation = Simulation(World(chance=chance(0.05), draft=(3.0, 0.3, 0.6, 0.05)))
    simulation.run(2, 300)
    assert simulation.share(is_plain, 100) > 0.9
    simulation.world = dataclasses.replace(simulation.world, chance=chance(0.85))
    simulation.run(2, 1500)
    assert simulation.share(is_plain, 100) < 0.2


def test_it_gives_up_when_the_drafter_gets_worse() -> None:
    simulation = Simulation(World(chance=chance(0.8), draft=(3.0, 0.3, 0.6, 0.05)))
    simulation.run(2, 300)
    assert simulation.share(is_plain, 100) < 0.1
    simulation.world = dataclasses.replace(simulation.world, chance=chance(0.02))
    simulation.run(2, 600)
    assert simulation.share(is_plain, 100) > 0.8


def test_it_follows_a_machine_on_which_drafting_becomes_dear() -> None:
    simulation = Simulation(World())
    simulation.run(1, 300)
    assert simulation.share(is_plain, 100) < 0.1
    simulation.world = dataclasses.replace(simulation.world, draft=(15.0, 0.0, 3.0, 0.0))
    simulation.run(1, 900)
    assert simulation.share(is_plain, 200) > 0.6


def test_of_one_batch_those_draft_whose_drafts_are_accepted() -> None:
    def mixed(place: int, depth: int) -> float:
        return 0.9 if place < 4 else 0.03

    world = World(chance=mixed, step=(9.0, 0.2), draft=(0.5, 1.5, 0.3, 0.1))
    shares = []
    for seed in range(5):
        simulation = Simulation(world, generator=np.random.default_rng(seed))
        simulation.run(8, 400)
        drafts = [[plan is not PLAIN for plan, _ in step] for step in simulation.log[-100:]]
        shares.append(np.mean(drafts, axis=0))
    # Where all of them drafted at first, what each one costs is not known.
    good, bad = np.median(shares, axis=0)[:4].mean(), np.median(shares, axis=0)[4:].mean()
    assert good > 0.9
    assert bad < 0.3


def is_lookup(plan: Plan, reason: PlanReason) -> bool:
    return plan.source is Source.LOOKUP


def sometimes(place: int, step: int) -> int:
    """Every other request's text has a loop in the second half of each 40 steps."""
    return 16 if place % 2 == 0 and step % 40 >= 20 else 0


@pytest.mark.parametrize(("batch", "seed"), [(1, 1), (6, 2), (6, 3), (6, 22), (6, 24)])
def test_lookups_take_turns_with_drafts_as_texts_change(batch: int, seed: int) -> None:
    world = World(matched=sometimes, looked_up=0.95)
    rates, simulations = [], []
    for auto in (AUTO, AutoPlan(lookup_depth=0)):
        simulation = Simulation(world, generator=np.random.default_rng(seed))
        simulation.run(batch, 200, auto=auto, temperature=0.0)
        rates.append(simulation.run(batch, 400, auto=auto, temperature=0.0))
        simulations.append(simulation)
    assert rates[0] > 1.3 * rates[1]
    assert simulations[1].share(is_lookup, 400) == 0
    for n, entries in enumerate(simulations[0].log[-400:]):
        for place, entry in enumerate(entries):
            assert not is_lookup(*entry) or sometimes(place, n)
    looped = batch // 2 + batch % 2
    share = simulations[0].share(is_lookup, 400)
    assert share > 0.9 * looped / (2 * batch)


def test_lookups_that_are_not_accepted_are_left() -> None:
    simulation = Simulation(World(matched=lambda place, step: 1, looked_up=0.05))
    simulation.run(1, 300, temperature=0.0)
    rate = simulation.run(1, 1200, temperature=0.0)
    assert simulation.share(is_lookup, 1200) < 0.05
    assert rate > 0.93 * simulation.best(1)


def test_sampled_requests_look_nothing_up() -> None:
    simulation = Simulation(World(matched=lambda place, step: 16, looked_up=0.95))
    simulation.run(2, 200, temperature=1.0)
    assert simulation.share(is_lookup, 200) == 0


def test_probes_are_rare_and_cheap() -> None:
    simulation = Simulation(WORLDS["dear drafts"])
    simulation.run(4, 100)
    simulation.run(4, 1500)
    probes = simulation.share(lambda plan, reason: reason is PlanReason.PROBE, 1500)
    assert 0 < probes < 0.05


def test_those_furthest_behind_draft_first_where_nobody_waits() -> None:
    # Every request that drafts costs a quarter of a step.
    simulation = Simulation(World(step=(9.0, 0.2), draft=(0.5, 2.5, 0.3, 0.1)))
    simulation.run(1, 200)
    simulation.run(4, 400)

    def drafting(numbers: Sequence[int], waiting: int) -> list[bool]:
        requests = [make_request(number, AUTO, 1.0) for number in numbers]
        for request, left in zip(requests, (40, 200, 40, 200), strict=True):
            request.max_tokens = left
        for _ in range(3):  # a plan that was never tried with so many is tried first
            simulation.planner.assign(requests, waiting=waiting)
        assert {request.plan_reason for request in requests} == {PlanReason.BEST}
        return [request.plan.speculative for request in requests]

    assert drafting([-1, -2, -3, -4], waiting=0) == [False, True, False, True]
    assert drafting([-5, -6, -7, -8], waiting=1) == [True] * 4


def test_one_hard_text_in_the_beginning_does_not_keep_drafting_off() -> None:
    world = World(step=(9.0, 0.5), draft=(2.0, 0.5, 0.7, 0.2), chance=chance(0.45), reading=0.04)
    shares = []
    for seed in range(8):
        hard = dataclasses.replace(world, chance=chance(0.1))
        simulation = Simulation(hard, generator=np.random.default_rng(seed))
        simulation.run(1, 60)
        simulation.world = world
        for _ in range(5):
            simulation.run(1, 60)
        shares.append(1 - simulation.share(is_plain, 180))
    assert min(shares) > 0.5
    assert np.median(shares) > 0.9


def test_probes_are_as_many_steps_as_it_takes_to_time_them() -> None:
    simulation = Simulation(World())
    simulation.run(4, 1000)
    probed = [
        next((r for _, r in step if r is PlanReason.PROBE), None) for step in simulation.log[200:]
    ]
    runs = [len(list(own)) for reason, own in itertools.groupby(probed) if reason is not None]
    assert len(runs) > 5
    assert set(runs) == {2}


def test_other_plans_and_plain_decoding_are_probed_in_turn() -> None:
    simulation = Simulation(World())
    simulation.run(1, 2500)
    probed = [step[0][0] for step in simulation.log[200:] if step[0][1] is PlanReason.PROBE]
    plainly = sum(plan is PLAIN for plan in probed)
    assert len(probed) > 40
    assert 0.4 < plainly / len(probed) < 0.6
    assert len(set(probed)) > 5


def test_plain_decoding_is_probed_though_some_always_decode_plainly() -> None:
    def mixed(place: int, depth: int) -> float:
        return 0.9 if place < 7 else 0.03

    simulation = Simulation(World(chance=mixed, draft=(1.0, 1.5, 0.5, 0.05)))
    simulation.run(8, 300)
    simulation.run(8, 700)
    steps = simulation.log[-600:]
    assert np.mean([any(p is PLAIN for p, _ in step) for step in steps]) > 0.5
    assert any(all(p is PLAIN and r is PlanReason.PROBE for p, r in step) for step in steps)


def test_a_step_behind_a_prompt_is_no_usual_one() -> None:
    simulation = Simulation(World())
    simulation.run(1, 300)
    planner, request = simulation.planner, make_request(-1, AUTO, 1.0)
    before = {e.plan: e.seconds for e in planner.explain([request])}
    for _ in range(200):
        planner.assign([], others=1)
        planner.assign([request])
        planner.observe_step(1.0)
    assert {e.plan: e.seconds for e in planner.explain([request])} == before


def test_what_others_share_in_uses_up_no_trials() -> None:
    simulation = Simulation(World())
    simulation.run(1, 200)
    members = [make_request(-n, AUTO, 1.0) for n in range(1, 9)]
    for _ in range(30):
        simulation.planner.assign(members[:1], others=7)
        assert members[0].plan_reason is not PlanReason.LEARNING
    simulation.planner.assign(members)
    assert {request.plan_reason for request in members} == {PlanReason.LEARNING}


def test_little_known_texts_are_hoped_of_where_they_decode_alone() -> None:
    """More is expected of a new text than of the same text in a batch, which waits for it."""
    simulation = Simulation(World())
    simulation.run(1, 300)
    one = [make_request(-1, AUTO, 1.0)]
    alone, among = (
        {e.plan: e.tokens / count for e in simulation.planner.explain(one * count)}
        for count in (1, 16)
    )
    assert all(alone[plan] > among[plan] for plan in alone if plan != "none")


def test_times_count_from_the_second_step_alike_on() -> None:
    """The first one of a kind takes ten times as long here, and nobody is misled."""
    simulation = Simulation(World())
    simulation.run(1, 300)
    planner, request = simulation.planner, make_request(-1, AUTO, 1.0)
    before, expected = None, {e.plan: e.seconds for e in planner.explain([request])}
    for _ in range(300):
        planner.assign([request])
        first, before = request.plan != before, request.plan
        planner.observe_step(simulation.world.seconds([request]) * (10 if first else 1))
        planner.observe_request(request, offered=request.plan.depth, accepted=1)
    for estimate in planner.explain([request]):
        assert estimate.seconds == pytest.approx(expected[estimate.plan], rel=0.2)


def test_every_plan_keeps_to_the_limits() -> None:
    auto = AutoPlan(max_paths=2, max_depth=3, draft_temperatures=(1.0, 1.5))
    simulation = Simulation(World())
    simulation.run(3, 200, auto=auto)
    plans = {plan for step in simulation.log for plan, _ in step}
    assert plans <= {PLAIN, *auto.candidates}
    room = max(plan.tree_slots for plan in auto.candidates)
    assert all(plan.tree_slots <= room for plan in plans)
    assert len(plans) > 4


def test_a_request_with_a_plan_of_its_own_keeps_it() -> None:
    planner, plan = Planner(), Plan(paths=2, depth=2)
    fixed, free = make_request(0, None, 1.0), make_request(1, AUTO, 1.0)
    fixed.plan = plan
    for _ in range(20):
        planner.assign([fixed, free])
        assert fixed.plan is plan
        assert fixed.plan_reason is PlanReason.FIXED
        assert free.plan_reason is not PlanReason.FIXED
        planner.observe_request(fixed, offered=2, accepted=1)
        planner.observe_request(free, offered=free.plan.depth, accepted=0)
        planner.observe_step(0.01)
    assert fixed.plan_state is None


def test_times_of_steps_that_also_do_other_things_are_not_learned() -> None:
    planner, request = Planner(), make_request(0, AUTO, 1.0)
    for _ in range(30):
        planner.assign([request], others=1)
        planner.observe_step(123.0)
    assert planner.explain([request]) == []


def test_greedy_and_sampled_steps_are_learned_apart() -> None:
    simulation = Simulation(World(chance=chance(0.9)))
    simulation.run(1, 100, temperature=0.0)
    assert simulation.planner.explain([make_request(-1, AUTO, 0.0)])
    assert not simulation.planner.explain([make_request(-2, AUTO, 1.0)])


def test_the_explanation_lists_all_plans_best_first() -> None:
    simulation = Simulation(World())
    simulation.run(2, 100)
    estimates = simulation.planner.explain([make_request(-n, AUTO, 1.0) for n in (1, 2)])
    assert {e.plan for e in estimates} == {plan_name(p) for p in (PLAIN, *AUTO.candidates)}
    assert [e.rate for e in estimates] == sorted((e.rate for e in estimates), reverse=True)
    plain = next(e for e in estimates if e.plan == "none")
    assert plain.tokens == 2
    assert plain.rate == pytest.approx(plain.tokens / plain.seconds)
    assert Planner().explain([make_request(0, None, 1.0)]) == []


def test_nothing_is_known_without_steps_and_the_first_one_drafts() -> None:
    planner, request = Planner(), make_request(0, AUTO, 1.0)
    planner.assign([request])
    assert request.plan.speculative
    assert request.plan_reason is PlanReason.LEARNING
