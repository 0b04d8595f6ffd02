"""Plans by load: what promises most tokens a second, chosen alike on all ranks."""

import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray
from support.cli import PAGES

from eaglegbv.backends.sglang.choice import HOLD, Choice, Costs, Why, most_requests
from eaglegbv.backends.sglang.rounds import shape_of
from eaglegbv.backends.sglang.settings import AUTOMATIC, Settings
from eaglegbv.config import PLAIN, Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.scheduler.acceptance import AcceptanceByDepth
from eaglegbv.verifiers.registry import STATEFUL_VERIFIERS

PLANS = Settings(plans=AUTOMATIC).served_plans(6, 6)
BATCHES = (1, 4, 16, 64, 128)


def roofline(read: float, rows: float, head: float = 0.174) -> Costs:
    """Milliseconds of rounds of an 8B model (shared/design/gpu.md, section 5), before attention.

    ``read`` reads the target's weights, as ``rows`` rows compute; ``head`` is a step of a head.
    """

    def took(plan: Plan, batch: int) -> float:
        paths, length = shape_of(plan)
        if batch > most_requests(PLANS, plan, BATCHES[-1]):
            return np.inf
        forward = read * max(1.0, batch * (1 + paths * length) / rows)
        return forward + head * (1 + max(0, length - 1)) + 0.016 * batch + 0.3

    return Costs(BATCHES, np.array([[took(plan, batch) for batch in BATCHES] for plan in PLANS]))


CARDS = {"H100": roofline(4.5, 295), "H200": roofline(3.49, 205)}

MEASURED_PLANS = Settings(plans="4x6,3x4,1x4,none").served_plans(4, 6)
STEPS = PAGES["sglang.md"].parents[1] / "results" / "gpu_steps.jsonl"


def measured() -> Costs:
    """Milliseconds of steps of an 8B shape on an H200, as the package's own engine takes them."""
    steps: dict[tuple[int, int, int], float] = {}
    for line in STEPS.read_text(encoding="utf-8").splitlines()[1:]:
        step = json.loads(line)
        plan, batch = step["setting"]["plan"], step["setting"]["batch"]
        if plan["verifier"] == "otbv":
            steps[plan["paths"], plan["depth"], batch] = step["report"]["seconds"]["step"]
        if plan["verifier"] == "none":
            steps[*shape_of(PLAIN), batch] = step["report"]["seconds"]["step"]
    batches = sorted({batch for *_, batch in steps})
    table = [[steps[*shape_of(plan), batch] for batch in batches] for plan in MEASURED_PLANS]
    return Costs(tuple(batches), np.array(table))


def true_hazards(first: float) -> NDArray[np.float64]:
    """The chances that a target and a head have: those that nothing observed would assume."""
    return AcceptanceByDepth(first).hazards


def play(
    costs: Costs, batch: int, first: float, rounds: int, plans: Sequence[Plan] = PLANS
) -> float:
    """Return the tokens a second of chosen plans over those of the best fixed plan."""
    rng, choice, hazards = np.random.default_rng(batch), Choice(plans, costs), true_hazards(first)
    survival = hazards.cumprod(axis=1).cumsum(axis=1)
    mean = np.array(
        [1 + survival[p.paths - 1, p.depth - 1] if p.speculative else 1.0 for p in plans]
    )
    tokens, seconds = 0.0, 0.0
    for _ in range(rounds):
        index, _ = choice.choose(batch, seeded=False)
        plan = plans[index]
        accepted = np.zeros(batch, dtype=int)
        if plan.speculative:
            chances = hazards[plan.paths - 1, : plan.depth]
            passed = rng.random((batch, plan.depth)) < chances
            accepted = passed.cumprod(axis=1).sum(axis=1)
        choice.observe(accepted.tolist())
        tokens += mean[index]
        seconds += costs.of(batch)[index]
    return float(tokens / seconds / max(mean / costs.of(batch)))


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("first", [0.3, 0.55, 0.8])
def test_chosen_plans_are_nearly_as_fast_as_the_best_one(card, first):
    ratios = {batch: play(CARDS[card], batch, first, 3000) for batch in BATCHES}
    assert min(ratios.values()) >= 0.97, ratios


@pytest.mark.parametrize("first", [0.3, 0.55, 0.8])
def test_chosen_plans_are_nearly_as_fast_as_the_best_by_measured_steps(first):
    costs = measured()
    plans = MEASURED_PLANS
    ratios = {batch: play(costs, batch, first, 3000, plans) for batch in costs.batches}
    assert costs.batches == (1, 4, 16)
    assert min(ratios.values()) >= 0.97, ratios


def test_the_choice_follows_the_table():
    """Each plan wins at a batch of its own."""
    seconds = np.full((len(PLANS), len(PLANS)), 100.0)
    np.fill_diagonal(seconds, 1.0)
    costs = Costs((1, 8, 24, 48, 64), seconds)
    for index, batch in enumerate((1, 5, 24, 30, 64)):
        choice = Choice(PLANS, costs)
        assert choice.choose(batch, seeded=False) == (index, Why.BEST)
        assert choice.choose(batch, seeded=False) == (index, Why.HELD)


def test_a_seed_fixes_the_plan_whatever_the_load():
    for batch in (1, 100):
        index, why = Choice(PLANS, CARDS["H100"]).choose(batch, seeded=True)
        assert (PLANS[index].paths, PLANS[index].depth, why) == (1, 4, Why.SEED)


def test_a_choice_is_held_unless_the_batch_grows():
    choice = Choice(PLANS, CARDS["H200"])
    assert [choice.choose(4, seeded=False)[1] for _ in range(HOLD)].count(Why.BEST) == 1
    assert choice.choose(64, seeded=False)[1] is Why.BEST


def test_choices_are_the_same_wherever_the_same_was_seen():
    rng = np.random.default_rng(3)
    one, other = Choice(PLANS, CARDS["H100"]), Choice(PLANS, CARDS["H100"])
    for _ in range(300):
        batch = int(rng.integers(1, 100))
        index, why = one.choose(batch, seeded=False)
        assert (index, why) == other.choose(batch, seeded=False)
        accepted = rng.integers(0, PLANS[index].depth + 1, batch).tolist()
        one.observe(accepted)
        other.observe(accepted)


def test_plans_by_name():
    shapes = [(plan.paths, plan.depth, plan.verifier) for plan in PLANS]
    assert shapes[:4] == [(6, 6, "otbv"), (4, 6, "otbv"), (3, 4, "otbv"), (1, 4, "block")]
    assert PLANS[4] == PLAIN
    nodes = [shape_of(plan)[0] * shape_of(plan)[1] for plan in PLANS]
    assert all(more > fewer for more, fewer in pairwise(nodes))
    assert Settings(plans=" 2x3 , none").served_plans(2, 3)[0].paths == 2
    assert Settings.from_environment({"EAGLEGBV_PLANS": "2x2,none"}).plans == "2x2,none"


@pytest.mark.parametrize("plans", ["3x4,6x6", "6x6,", "6 by 6", "none,1x4", "3x4,2x6"])
def test_other_lists_are_refused(plans):
    with pytest.raises(InvalidArgument, match="plans="):
        Settings(plans=plans).served_plans(*(Settings(plans=plans).widest() or (1, 1)))


@pytest.mark.parametrize("verifier", sorted(STATEFUL_VERIFIERS))
def test_rules_that_keep_a_modified_target_have_one_plan(verifier):
    with pytest.raises(InvalidArgument, match="keeps a modified target"):
        Settings(verifier=verifier, plans="6x6,none").served_plans(6, 6)
