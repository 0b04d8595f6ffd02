from fractions import Fraction

import pytest

from eaglegbv.errors import InvalidProbabilities
from eaglegbv.rng import Purpose
from eaglegbv.verifiers.proof.chooser import exact_probs, inverse_cdf


@pytest.mark.parametrize(
    ("weights", "u", "chosen"),
    [
        ((0.25, 0.75), 0.0, 0),
        ((0.25, 0.75), 0.2499, 0),
        ((0.25, 0.75), 0.25, 1),
        ((0.0, 1.0), 0.0, 1),
        ((0.5, 0.0, 0.5), 0.5, 2),
        ((1.0, 0.0), 1.0, 0),  # u rounded up to 1: still no token of probability 0
        ((0.3, 0.7, 0.0), 1.0, 1),
        ((2, 6), 0.3, 1),  # weights need not be normalised
    ],
)
def test_inverse_cdf(weights: tuple[float, ...], u: float, chosen: int) -> None:
    assert inverse_cdf(weights, u) == chosen


@pytest.mark.parametrize("weights", [(0.0, 0.0), (float("nan"), 1.0), (-0.5, 1.5)])
def test_weights_without_mass_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(InvalidProbabilities, match="positive sum"):
        inverse_cdf(weights, 0.5)


def test_exact_distribution_walks_every_branch_once() -> None:
    def run(chooser):
        if chooser.choose((Fraction(1, 3), 0, Fraction(2, 3)), Purpose.DRAFT, 0) == 0:
            return "a"
        return "b" + str(chooser.choose((Fraction(1, 4), Fraction(3, 4)), Purpose.ACCEPTANCE, 0))

    assert exact_probs(run) == {"a": Fraction(1, 3), "b0": Fraction(1, 6), "b1": Fraction(1, 2)}


def test_a_number_must_not_decide_twice() -> None:
    def run(chooser):
        chooser.choose((0.5, 0.5), Purpose.ACCEPTANCE, 3)
        return chooser.choose((0.5, 0.5), Purpose.ACCEPTANCE, 3)

    with pytest.raises(IndexError, match="twice"):
        exact_probs(run)
