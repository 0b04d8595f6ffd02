"""Which requests look their drafts up, and what is learned of that."""

from dataclasses import replace

import numpy as np
import pytest

from eaglegbv.config import AUTO, PLAIN, Plan
from eaglegbv.request import PlanReason
from eaglegbv.scheduler.choice import Choice
from eaglegbv.scheduler.costs import StepCosts, StepShape
from eaglegbv.scheduler.lookups import Lookups, look_up

PLANS = AUTO.lookups
DEPTHS = np.array([plan.depth for plan in PLANS])
DRAFTS = Plan(paths=2, depth=3)
MANY = 1000


def milliseconds(shape: StepShape, node: float) -> float:
    """A step of 10, and 1 a request; a drafter that takes 2 a level and 1 a request."""
    _, requests, _, _, drafting, levels, nodes, _ = shape.features
    return float(9 + requests + 2 * levels + drafting + node * nodes)


def learned(node: float) -> StepCosts:
    """Costs of a machine on which a further node takes ``node`` milliseconds."""
    costs = StepCosts()
    shapes = [
        StepShape(r, 100 * r, d, k if d else 0, n if d else 0, looked)
        for r in (1, 4, 8)
        for d in (0, r // 2, r)
        for k, n in ((1, 2), (2, 3), (3, 6))
        for looked in (0, 16 * (r - d))
    ]
    for _ in range(20):
        for shape in shapes:
            costs.observe(shape, milliseconds(shape, node) / 1000)
    return costs


def drafting(each: list[float], places: set[int], seconds: float) -> Choice:
    plan = DRAFTS if places else PLAIN
    weights = np.ones(len(each))
    return Choice(plan, frozenset(places), PlanReason.BEST, np.array(each), weights, seconds)


def chosen(choice: Choice, tokens: list[list[float]], node: float) -> Choice:
    return look_up(choice, PLANS, np.array(tokens), learned(node), context=100 * len(tokens))


def test_a_long_match_is_expected_to_go_on_before_any_was_tried() -> None:
    tokens = Lookups().expected_tokens(np.array([0, 1, 4, 16]), np.full(4, MANY), DEPTHS)
    assert (tokens[0] == 1).all()
    assert (np.diff(tokens, axis=0) > 0).all()
    assert tokens[1, -1] < 3
    assert tokens[3, -1] > 10


def test_a_long_match_is_looked_up_instead_of_drafted() -> None:
    found = chosen(drafting([2.5], {0}, 0.0171), [[2.9, 4.5, 7.5, 12.0]], node=0.05)
    assert found.lookups == {0: PLANS[-1]}
    assert found.plan_of(0) == PLANS[-1]
    assert not found.drafting
    assert found.looked_up == 16
    assert found.tokens == 12
    assert found.seconds == pytest.approx(0.0108, rel=0.05)
    assert found.reason is PlanReason.BEST


def test_where_drafts_promise_more_they_stay() -> None:
    choice = drafting([2.5], {0}, 0.0171)
    for tokens in ([1.1, 1.15, 1.2, 1.2], [1.0, 1.0, 1.0, 1.0]):
        found = chosen(choice, [tokens], node=0.05)
        assert (found.plan, found.drafting, found.lookups) == (DRAFTS, {0}, {})


def test_the_time_of_the_choice_is_that_of_now() -> None:
    """A choice may be older than what is known of costs, and count what drafters read once."""
    for seconds in (0.002, 0.0171, 0.5):
        found = chosen(drafting([2.5], {0}, seconds), [[1.1, 1.15, 1.2, 1.2]], node=0.05)
        assert found.seconds == pytest.approx(0.0173, rel=0.05)
        assert not found.lookups


def test_others_in_the_batch_wait_for_long_lookups() -> None:
    costs, choice = learned(1.0), drafting([1.0], set(), 0.013)
    tokens = np.array([[1.9, 2.6, 3.4, 4.0]])
    depths = []
    for others in (0, 15):
        among = replace(choice, others=others)
        found = look_up(among, PLANS, tokens, costs, context=100 * (1 + others))
        depths.append(max((plan.depth for plan in found.lookups.values()), default=0))
    assert depths[0] > depths[1]


def test_a_lookup_is_no_longer_than_its_nodes_are_worth() -> None:
    tokens = [[2.0, 2.4, 2.6, 2.61]] * 4
    deep = chosen(drafting([1.0] * 4, set(), 0.013), tokens, node=0.01)
    short = chosen(drafting([1.0] * 4, set(), 0.013), tokens, node=1.0)
    assert {plan.depth for plan in deep.lookups.values()} == {8}
    assert {plan.depth for plan in short.lookups.values()} == {2}
    assert not chosen(drafting([1.0] * 4, set(), 0.013), tokens, node=8.0).lookups


def test_of_a_batch_some_look_up_while_others_draft() -> None:
    nothing, much = [1.0, 1.0, 1.0, 1.0], [2.9, 4.7, 8.0, 14.0]
    choice = drafting([3.0] * 6 + [1.0] * 2, set(range(6)), 0.029)
    found = chosen(choice, [nothing] * 3 + [much] + [nothing] * 3 + [much], node=0.05)
    assert set(found.lookups) == {3, 7}
    assert found.drafting == {0, 1, 2, 4, 5}
    assert found.each.tolist() == [3, 3, 3, 14, 3, 3, 1, 14]
    assert [found.plan_of(place) for place in (0, 3, 6)] == [DRAFTS, PLANS[-1], PLAIN]


def test_nobody_drafts_where_lookups_are_enough_for_all() -> None:
    # One request's drafts alone do not pay the drafter's levels.
    tokens = [[1.0] * 4] + [[2.9, 4.7, 8.0, 14.0]] * 3
    found = chosen(drafting([1.9] * 4, {0, 1, 2, 3}, 0.024), tokens, node=0.05)
    assert set(found.lookups) == {1, 2, 3}
    assert not found.drafting


def test_what_was_given_up_is_tried_again() -> None:
    lookups = Lookups()
    for _ in range(MANY):
        lookups.observe(matched=1, offered=4, accepted=0)
    ask = np.array([1]), np.array([100]), DEPTHS
    given_up = lookups.expected_tokens(*ask).max()
    for _ in range(10_000):
        lookups.expected_tokens(*ask)
    assert lookups.expected_tokens(*ask).max() > 1.5 > 1.1 > given_up


def test_longer_matches_are_learned_apart_and_nothing_is_expected_of_none() -> None:
    lookups = Lookups()
    for _ in range(MANY):
        lookups.observe(matched=1, offered=4, accepted=0)
        lookups.observe(matched=12, offered=4, accepted=4)
    limits = np.array([100, 100, 100, 100, 3])
    tokens = lookups.expected_tokens(np.array([0, 1, 12, 3, 12]), limits, DEPTHS)
    assert tokens[0].tolist() == [1, 1, 1, 1]
    assert tokens[1].max() < 1.15
    assert tokens[2, DEPTHS == 4].item() == pytest.approx(5, abs=0.2)
    assert tokens[1].max() < tokens[3].max() < tokens[2].max()
    assert tokens[4].max() <= 3
