"""Costs are learned from steps: exactly where the distribution holds, by corrections where it does not."""

import numpy as np
import pytest

from eaglegbv.scheduler.costs import Cell, StepCosts, StepShape, features, size_class

PLANS = [(0, 0), (3, 4), (1, 2), (2, 6), (4, 8)]


def shape(requests: int, paths: int, depth: int, *, context: int = 100) -> StepShape:
    drafting = requests if paths else 0
    return StepShape(requests, requests * context, drafting, paths, depth)


def linear_seconds(step: StepShape) -> float:
    nodes = step.drafting * step.paths * step.depth
    drafts = min(1, step.drafting)
    return (
        4.0
        + 0.5 * step.requests
        + 0.25 * step.context / 1024
        + drafts * (1.5 + 0.5 * step.depth)
        + 0.25 * step.drafting
        + 0.05 * nodes
    ) / 1000


def test_features_of_one_shape_and_of_arrays_agree() -> None:
    one = StepShape(requests=5, context=2048, drafting=3, paths=2, depth=4)
    assert one.features.tolist() == pytest.approx([1, 5, 2, 1, 3, 4, 24, 9.6])
    rows = features(5, 2048, np.arange(1, 4)[:, None], np.array([2, 1]), np.array([4, 8]))
    assert rows.shape == (3, 2, 8)
    assert (rows[2, 0] == one.features).all()
    assert StepShape(5, 2560, 0, 0, 0, looked_up=6).features.tolist()[-2:] == [6, 3]
    assert StepShape(5, 2048, 0, 0, 0).features.tolist() == [1, 5, 2, 0, 0, 0, 0, 0]


def test_sizes_are_classed_by_powers_of_two() -> None:
    assert [size_class(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17)] == [0, 1, 2, 2, 3, 3, 4, 4, 5]
    assert shape(6, 0, 0).cell == Cell(3, 0, 0)
    assert shape(6, 2, 5).cell == Cell(3, 2, 5)


def test_nothing_is_known_at_first() -> None:
    assert StepCosts().seconds(shape(1, 3, 4)) == 0


def test_a_linear_machine_is_known_also_where_it_was_not_tried() -> None:
    costs = StepCosts()
    for _ in range(6):
        for requests in (1, 2, 6, 12):
            for plan in PLANS:
                step = shape(requests, *plan)
                costs.observe(step, linear_seconds(step))
    for requests, paths, depth in [(4, 0, 0), (4, 2, 3), (1, 4, 5), (16, 3, 6), (3, 1, 7)]:
        step = shape(requests, paths, depth)
        assert costs.seconds(step) == pytest.approx(linear_seconds(step), rel=0.03)


def test_a_plan_dearer_than_the_distribution_says_is_corrected_alone() -> None:
    costs = StepCosts()

    def seconds(step: StepShape) -> float:
        dear = (step.paths, step.depth) == (2, 6)
        return linear_seconds(step) * (1.5 if dear else 1)

    for _ in range(30):
        for plan in PLANS:
            costs.observe(shape(1, *plan), seconds(shape(1, *plan)))
    for plan in PLANS:
        assert costs.seconds(shape(1, *plan)) == pytest.approx(seconds(shape(1, *plan)), rel=0.05)


def test_a_slow_minute_of_the_machine_is_not_blamed_on_the_plan() -> None:
    costs = StepCosts()
    for _ in range(40):
        for plan in PLANS:
            costs.observe(shape(1, *plan), linear_seconds(shape(1, *plan)))
    usual = costs.seconds(shape(1, 0, 0))
    for _ in range(12):
        costs.observe(shape(1, 3, 4), 1.5 * linear_seconds(shape(1, 3, 4)))
    slow = costs.seconds(shape(1, 3, 4)) / linear_seconds(shape(1, 3, 4))
    assert slow > 1.3
    # Part of it is taken as the machine's: plain decoding is expected to have slowed down too.
    assert costs.seconds(shape(1, 0, 0)) > 1.08 * usual


def test_a_stall_changes_little() -> None:
    costs = StepCosts()
    for _ in range(20):
        for plan in PLANS:
            costs.observe(shape(1, *plan), linear_seconds(shape(1, *plan)))
    before = costs.seconds(shape(1, 3, 4))
    costs.observe(shape(1, 3, 4), 1.0)
    assert costs.seconds(shape(1, 3, 4)) < 1.12 * before


def test_a_first_step_that_was_held_up_is_forgotten_after_the_second() -> None:
    costs = StepCosts()
    for _ in range(20):
        for plan in PLANS[1:]:
            costs.observe(shape(1, *plan), linear_seconds(shape(1, *plan)))
    plain, others = shape(1, 0, 0), [shape(1, *plan) for plan in PLANS[1:]]
    before = [costs.seconds(other) for other in others]
    costs.observe(plain, 2.0)
    assert costs.seconds(plain) < 3 * linear_seconds(plain)
    costs.observe(plain, linear_seconds(plain))
    assert costs.seconds(plain) == pytest.approx(linear_seconds(plain), rel=0.25)
    assert [costs.seconds(other) for other in others] == pytest.approx(before, rel=0.1)


def test_trees_look_at_long_texts_again_and_plain_decoding_does_not() -> None:
    """A node takes longer in a longer text: two plans at another length tell by how much."""

    def seconds(step: StepShape) -> float:
        nodes = step.drafting * step.paths * step.depth
        return linear_seconds(step) + 0.4e-3 * nodes * step.context / step.requests / 1024

    costs = StepCosts()
    for _ in range(12):
        for requests in (1, 4, 16):
            for plan in PLANS:
                costs.observe(step := shape(requests, *plan), seconds(step))
        for plan in PLANS[:2]:
            costs.observe(step := shape(4, *plan, context=512), seconds(step))
    long = [shape(16, *plan, context=1900) for plan in PLANS]
    off = [costs.linear(step.features) / seconds(step) for step in long]
    assert off == pytest.approx([1] * len(PLANS), rel=0.3)
    assert max(off) < 1.3 * min(off)  # a choice compares them
    further = costs.node_seconds(2048) - costs.node_seconds(1024)
    assert further == pytest.approx(0.4e-3, rel=0.15)


def test_steps_are_counted_by_cell() -> None:
    costs = StepCosts()
    costs.observe(shape(3, 2, 2), 0.01)
    costs.observe(shape(4, 2, 2), 0.01)
    costs.observe(shape(5, 2, 2), 0.01)
    assert costs.steps == 3
    assert costs.steps_in(Cell(2, 2, 2)) == 2
    assert costs.steps_in(Cell(2, 0, 0)) == 0


def test_a_size_far_from_what_the_distribution_says_is_known_after_a_few_steps() -> None:
    costs = StepCosts()
    for _ in range(60):
        costs.observe(shape(1, 3, 4), 0.010)
        costs.observe(shape(1, 0, 0), 0.005)
    # One request says nothing of what each further one costs.
    for _ in range(3):
        costs.observe(shape(32, 0, 0), 0.006)
    assert 0.006 < costs.seconds(shape(32, 0, 0)) < 0.011
    for _ in range(10):
        costs.observe(shape(32, 0, 0), 0.006)
    assert costs.seconds(shape(32, 0, 0)) == pytest.approx(0.006, rel=0.2)
