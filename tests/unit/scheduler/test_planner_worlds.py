"""How near the planner comes to the best fixed plan, in simulated worlds: what it is accepted by.

Every figure is the tokens a second of automatic plans over those of the best fixed plan.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from support.simulated_engine import Simulation, World, constant

from eaglegbv.config import PLAIN
from eaglegbv.scheduler.planner import Planner

WORLDS = {
    "good drafter": World(chance=constant(0.8)),
    "middling drafter": World(),
    "poor drafter": World(chance=constant(0.15), draft=(2.0, 0.4, 0.7, 0.1)),
    "dear drafts": World(draft=(8.0, 1.0, 2.0, 0.4)),
    "first drafts only": World(chance=lambda place, depth: 0.8 * 0.7**depth),
    "cheap levels": World(chance=constant(0.92), draft=(0.5, 0.1, 0.2, 0.02)),  # for deep trees
}
BAD_DRAFTER = World(chance=constant(0.05), draft=(3.0, 0.3, 0.6, 0.05))
CHANGES = {
    "a better drafter": (BAD_DRAFTER, replace(BAD_DRAFTER, chance=constant(0.85))),
    "a worse drafter": (replace(BAD_DRAFTER, chance=constant(0.85)), BAD_DRAFTER),
    "dearer drafts": (World(), World(draft=(15.0, 0.0, 3.0, 0.0))),
    "cheaper drafts": (World(draft=(4.0, 0.5, 1.0, 0.3)), World()),
    "cheaper nodes": (World(draft=(1.0, 0.2, 0.5, 0.4)), World(draft=(1.0, 0.2, 0.5, 0.01))),
}
WRONG = [(2.0, 2.0), (2.5, 1.0), (1.0, 2.0), (0.5, 0.5), (0.4, 1.0)]  # drafts, plain decoding
BATCHES = (1, 4, 16)
SEEDS = range(4)


def planned_by(planner: Planner, world: World, seed: int) -> Simulation:
    return Simulation(world, planner, generator=np.random.default_rng(seed))


def shares(world: World, batch: int, *lengths: int, kept: bool = True) -> Iterator[list[float]]:
    """Yield of every seed what it reaches in runs of these lengths, one after another."""
    for seed in SEEDS:
        simulation = planned_by(Planner(world.recorded() if kept else None), world, seed)
        yield [simulation.run(batch, steps) / world.best(batch) for steps in lengths]


def steady() -> dict[tuple[str, int], float]:
    """Return the share of every world and batch, once it has run for 150 steps."""
    return {
        (name, batch): float(np.mean([last for _, last in shares(world, batch, 150, 250)]))
        for name, world in WORLDS.items()
        for batch in BATCHES
    }


def from_nothing() -> dict[tuple[str, int], float]:
    """Return the share of every world and batch in the first steps, where nothing is known."""
    return {
        (name, batch): float(np.mean(list(shares(world, batch, 64, kept=False))))
        for name, world in WORLDS.items()
        for batch in BATCHES
    }


def wrong_costs() -> np.ndarray:
    """Return ``[2]``: the shares of the first 60 steps and the next 200, where costs are wrong."""
    world, reached = World(), []
    for drafts, plain in WRONG:
        for seed in SEEDS:
            planner = Planner(world.recorded(drafts=drafts, plain=plain))
            simulation = planned_by(planner, world, seed)
            reached.append([simulation.run(1, steps) / world.best(1) for steps in (60, 200)])
    return np.mean(reached, axis=0)


def after_change(name: str, batch: int) -> list[float]:
    """Return the shares of every seed in steps 1000 to 1300 after a change."""
    before, after = CHANGES[name]
    reached = []
    for seed in SEEDS:
        simulation = planned_by(Planner(before.recorded()), before, seed)
        for _ in range(2):
            simulation.run(batch, 200)
        simulation.world = after
        for _ in range(4):
            simulation.run(batch, 250)
        reached.append(simulation.run(batch, 300) / after.best(batch))
    return reached


def search(batch: int) -> list[float]:
    """Return the shares where plain decoding is best, and found to be."""
    world = World(draft=(4.0, 0.5, 1.0, 0.3))
    assert world.best(batch) == world.rate(batch, PLAIN)
    return [last for _, last in shares(world, batch, 100, 1500)]


def test_in_the_end_it_comes_near_the_best_fixed_plan() -> None:
    reached = steady()
    assert np.mean(list(reached.values())) >= 0.97, reached
    assert min(reached.values()) >= 0.93, reached


def test_from_nothing_the_first_steps_are_good_already() -> None:
    reached = from_nothing()
    assert np.mean(list(reached.values())) >= 0.87, reached
    middling = [reached["middling drafter", batch] for batch in BATCHES]
    assert np.mean(middling) >= 0.87, reached


def test_wrong_kept_costs_do_little_harm() -> None:
    first, next_ones = wrong_costs()
    assert first >= 0.90
    assert next_ones >= 0.95


def test_long_after_a_change_it_comes_near_the_best_plan_again() -> None:
    reached = {
        (name, batch): float(np.mean(after_change(name, batch)))
        for name in CHANGES
        for batch in BATCHES[:2]
    }
    assert np.mean(list(reached.values())) >= 0.95, reached
    assert min(reached.values()) >= 0.85, reached


@pytest.mark.parametrize("batch", [1, 8])
def test_the_search_costs_little_while_plain_decoding_is_best(batch: int) -> None:
    assert np.mean(search(batch)) >= 0.985
