import numpy as np
import pytest

from eaglegbv.eval.statistics import Estimate, SideOfOne, bootstrap_ratio, bootstrap_ratio_of_ratios


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        forwards = rng.integers(20, 40, size=60).astype(float)
        committed = forwards * rng.uniform(2, 4, size=60)
        estimate = bootstrap_ratio(list(committed), list(forwards), seed=trial)
        covered += estimate.low <= 3.0 <= estimate.high
    # 95% of 200 is 190; below 178 or at 200 has probability under 0.001 of being chance.
    assert 178 <= covered < 200


def test_pairing_cancels_what_units_share() -> None:
    rng = np.random.default_rng(2)
    length = list(rng.uniform(1, 100, size=20))
    ones = [1.0] * 20
    double = [2 * x for x in length]
    estimate = bootstrap_ratio_of_ratios(double, ones, length, ones)
    assert estimate.value == pytest.approx(2)
    assert (estimate.low, estimate.high) == pytest.approx((2, 2))


def test_nothing_measured_is_zero() -> None:
    assert bootstrap_ratio([], []).value == 0
    assert bootstrap_ratio([0.0], [0.0]).value == 0


@pytest.mark.parametrize(
    ("low", "high", "slack", "side"),
    [
        (1.1, 1.2, 0.0, SideOfOne.ABOVE),
        (0.8, 0.9, 0.0, SideOfOne.BELOW),
        (0.9, 1.1, 0.0, SideOfOne.OPEN),
        (1.0, 1.1, 0.0, SideOfOne.OPEN),
        (0.9, 1.0, 0.0, SideOfOne.OPEN),
        (1.001, 1.1, 0.01, SideOfOne.OPEN),
        (0.9, 0.999, 0.01, SideOfOne.OPEN),
        (1.02, 1.1, 0.01, SideOfOne.ABOVE),
        (0.9, 0.98, 0.01, SideOfOne.BELOW),
    ],
)
def test_an_interval_that_holds_one_leaves_the_side_open(
    low: float, high: float, slack: float, side: SideOfOne
) -> None:
    assert Estimate((low + high) / 2, low, high).side_of_one(slack) is side
