from eaglegbv.eval.plots import whiskers
from eaglegbv.eval.statistics import Estimate


def test_whiskers_reach_to_the_ends_and_are_never_negative() -> None:
    figures = [Estimate(2.0, 1.5, 3.0), Estimate(1.0, 1.25, 1.5), Estimate(2.0, 1.0, 1.75)]
    assert whiskers(figures) == [[0.5, 0.0, 1.0], [1.0, 0.5, 0.0]]
