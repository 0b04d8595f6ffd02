"""How near the planner comes to the best fixed plan, in simulated worlds: what it is accepted by.

Every figure is the tokens a second of automatic plans over those of the best fixed plan.
``PYTHONPATH=tests python tests/unit/scheduler/test_planner_worlds.py`` prints them all.
"""

import sys
from collections.abc import Iterable, Iterator
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
FEW, ALL = range(1), range(4)
SEEDS = pytest.mark.parametrize("seeds", [FEW, pytest.param(ALL, marks=pytest.mark.thorough)])

Seeds = Iterable[int]
Reached = dict[tuple[str, int], float]
"""The mean over seeds, of every world and batch."""


def planned_by(planner: Planner, world: World, seed: int) -> Simulation:
    return Simulation(world, planner, generator=np.random.default_rng(seed))


def shares(
    world: World, batch: int, *lengths: int, seeds: Seeds, kept: bool = True
) -> list[list[float]]:
    """Return of every seed what it reaches in runs of these lengths, one after another."""
    reached = []
    for seed in seeds:
        simulation = planned_by(Planner(world.recorded() if kept else None), world, seed)
        reached.append([simulation.run(batch, steps) / world.best(batch) for steps in lengths])
    return reached


def steady(seeds: Seeds) -> Reached:
    """Return what is reached once it has run for 150 steps."""
    return {
        (name, batch): float(
            np.mean([last for _, last in shares(world, batch, 150, 250, seeds=seeds)])
        )
        for name, world in WORLDS.items()
        for batch in BATCHES
    }


def from_nothing(seeds: Seeds) -> Reached:
    """Return what is reached in the first steps, where nothing is known."""
    return {
        (name, batch): float(np.mean(shares(world, batch, 64, seeds=seeds, kept=False)))
        for name, world in WORLDS.items()
        for batch in BATCHES
    }


def wrong_costs(seeds: Seeds) -> tuple[float, float]:
    """Return the shares of the first 60 steps and the next 200, where kept costs are wrong."""
    world = World()
    reached = []
    for drafts, plain in WRONG:
        for seed in seeds:
            planner = Planner(world.recorded(drafts=drafts, plain=plain))
            simulation = planned_by(planner, world, seed)
            reached.append([simulation.run(1, steps) / world.best(1) for steps in (60, 200)])
    first, following = np.mean(reached, axis=0)
    return float(first), float(following)


def after_changes(seeds: Seeds) -> Reached:
    """Return what is reached in steps 1000 to 1300 after every change."""
    return {
        (name, batch): float(np.mean([after_change(name, batch, seed) for seed in seeds]))
        for name in CHANGES
        for batch in BATCHES[:2]
    }


def after_change(name: str, batch: int, seed: int) -> float:
    before, after = CHANGES[name]
    simulation = planned_by(Planner(before.recorded()), before, seed)
    for _ in range(2):
        simulation.run(batch, 200)
    simulation.world = after
    for _ in range(4):
        simulation.run(batch, 250)
    return simulation.run(batch, 300) / after.best(batch)


def search(batch: int, seeds: Seeds) -> float:
    """Return what is reached where plain decoding is best, and found to be."""
    world = World(draft=(4.0, 0.5, 1.0, 0.3))
    assert world.best(batch) == world.rate(batch, PLAIN)
    return float(np.mean([last for _, last in shares(world, batch, 100, 1500, seeds=seeds)]))


@SEEDS
def test_in_the_end_it_comes_near_the_best_fixed_plan(seeds: Seeds) -> None:
    reached = steady(seeds)
    assert np.mean(list(reached.values())) >= 0.97, reached
    assert min(reached.values()) >= 0.93, reached


@SEEDS
def test_from_nothing_the_first_steps_are_good_already(seeds: Seeds) -> None:
    reached = from_nothing(seeds)
    assert np.mean(list(reached.values())) >= 0.87, reached
    middling = [reached["middling drafter", batch] for batch in BATCHES]
    assert np.mean(middling) >= 0.87, reached


@SEEDS
def test_wrong_kept_costs_do_little_harm(seeds: Seeds) -> None:
    first, following = wrong_costs(seeds)
    assert first >= 0.90
    assert following >= 0.95


@SEEDS
def test_long_after_a_change_it_comes_near_the_best_plan_again(seeds: Seeds) -> None:
    reached = after_changes(seeds)
    assert np.mean(list(reached.values())) >= 0.95, reached
    assert min(reached.values()) >= 0.85, reached


@SEEDS
@pytest.mark.parametrize("batch", [1, 8])
def test_the_search_costs_little_while_plain_decoding_is_best(batch: int, seeds: Seeds) -> None:
    assert search(batch, seeds) >= 0.985


def table() -> Iterator[str]:
    """Yield a table's lines, of all seeds: those of docs/inside/planning.md, and every world."""
    for title, reached in (
        ("steady", steady(ALL)),
        ("first 64 steps", from_nothing(ALL)),
        ("after a change", after_changes(ALL)),
    ):
        values = list(reached.values())
        yield f"{title}: mean {np.mean(values):.3f}, worst {min(values):.3f}"
        for (name, batch), value in reached.items():
            yield f"    {name}, batch {batch}: {value:.3f}"
    first, following = wrong_costs(ALL)
    yield f"wrong kept costs: first 60 steps {first:.3f}, next 200 {following:.3f}"
    yield f"search: batch 1 {search(1, ALL):.3f}, batch 8 {search(8, ALL):.3f}"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in table())
