"""Random numbers: a pure function of (seed, step, purpose), never shared, never 1.

The statistical tests have fixed seeds: they are computations with one outcome. Their thresholds,
p > 1e-4, say that the outcome is no accident of a bad generator; a good one would fail a fresh seed
once in ten thousand.
"""

import itertools

import numpy as np
import pytest
from scipy import stats

from eaglegbv.rng import Purpose, RequestRng, request_seed

SEEDS = [0, 1, 2, 1000, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1]
STEPS = [0, 1, 2, 63, 64, 2**32, 2**63]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("purpose", list(Purpose))
def test_numbers_are_the_documented_ones_of_their_key_however_many(seed, purpose):
    # A change of the generator would change every seeded text: it must be deliberate.
    key, counter = np.array([seed, purpose], np.uint64), np.array([0, 9, 0, 0], np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(64)
    stream = RequestRng(seed)
    for count in (33, *range(65)):
        stream.draw(5, Purpose.CORRECTION, 7)  # what is drawn between changes nothing
        numbers = stream.draw(9, purpose, count)
        assert np.array_equal(numbers, (raw[:count] >> np.uint64(11)) * 2.0**-53)
        assert numbers.dtype == np.float64
    assert [int(purpose) for purpose in Purpose] == [0, 1, 2, 3]


def test_no_number_is_shared_between_seeds_steps_and_purposes():
    # 53-bit numbers: the chance that any two of 12 * 7 * 4 * 64 agree by accident is 3e-8.
    count = 64
    numbers = [
        RequestRng(seed).draw(step, purpose, count)
        for seed, step, purpose in itertools.product(SEEDS, STEPS, Purpose)
    ]
    assert len(np.unique(np.concatenate(numbers))) == len(numbers) * count


def test_first_numbers_of_successive_steps_are_uniform_and_independent():
    # A request takes a few numbers at each step: these, not a long draw, decide its text.
    firsts = {
        purpose: np.array([RequestRng(5).draw(step, purpose, 1)[0] for step in range(4000)])
        for purpose in Purpose
    }
    for numbers in firsts.values():
        assert stats.kstest(numbers, "uniform").pvalue > 1e-4
        assert stats.pearsonr(numbers[:-1], numbers[1:]).pvalue > 1e-4
    for one, other in itertools.combinations(firsts.values(), 2):
        joint = np.histogram2d(one, other, bins=8, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(joint.ravel()).pvalue > 1e-4


@pytest.mark.parametrize("first_seed", [0, 2**63])
def test_first_numbers_of_successive_seeds_are_uniform_and_independent(first_seed):
    seeds = range(first_seed, first_seed + 4000)
    numbers = np.array([RequestRng(seed).draw(0, Purpose.DRAFT, 2) for seed in seeds])
    assert stats.kstest(numbers[:, 0], "uniform").pvalue > 1e-4
    assert stats.pearsonr(numbers[:-1, 0], numbers[1:, 0]).pvalue > 1e-4
    joint = np.histogram2d(*numbers.T, bins=8, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(joint.ravel()).pvalue > 1e-4


def test_requests_without_a_seed_get_seeds_of_their_own():
    pairs = list(itertools.product([0, 1, 2**32, 2**64 - 1], range(500)))
    seeds = [request_seed(engine, number) for engine, number in pairs]
    assert all(isinstance(seed, int) and 0 <= seed < 2**64 for seed in seeds)
    assert len(set(seeds)) == len(seeds)
    assert seeds == [request_seed(engine, number) for engine, number in pairs]
    assert max(seeds) > 2**63  # the upper half is used, and streams must take it
