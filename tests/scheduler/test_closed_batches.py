"""Batches served to their ends gain by automatic plans, or next to nothing is lost."""

import numpy as np
import pytest
from support.closed_batches import Machine, Shop

WORLDS, REPEATS = 48, 3


@pytest.fixture(scope="module")
def gains() -> dict[int, np.ndarray]:
    """``[worlds, repeats]`` by batch size, of engines that serve ever larger batches."""
    shops = [Shop(Machine(np.random.default_rng(world))) for world in range(WORLDS)]
    generators = [np.random.default_rng((7, world)) for world in range(WORLDS)]
    for shop, generator in zip(shops, generators, strict=True):
        shop.gain(1, generator)
    return {
        batch: np.array(
            [
                [shop.gain(batch, generator) for _ in range(REPEATS)]
                for shop, generator in zip(shops, generators, strict=True)
            ]
        )
        for batch in (1, 2, 4, 8, 16)
    }


@pytest.mark.parametrize(
    ("batch", "least"), [(1, 1.45), (2, 1.18), (4, 1.01), (8, 0.97), (16, 0.985)]
)
def test_on_average_drafting_gains_or_is_left(gains, batch: int, least: float) -> None:
    assert gains[batch].mean() > least


def test_large_batches_lose_little_in_nearly_every_world(gains) -> None:
    medians = np.median(gains[16], axis=1)
    assert np.quantile(medians, 0.1) > 0.98
    assert np.quantile(np.median(gains[8], axis=1), 0.2) > 0.93


def after_a_stall(
    world: int, batch: int, seconds: float, *, chance: float, drafting: bool
) -> float:
    """Return what batches gain some time after the first timed step of a kind was held up."""
    generator = np.random.default_rng((7, world))
    shop = Shop(Machine(np.random.default_rng(world)), chance=chance)
    for _ in range(3):
        shop.gain(1, generator)
    shop.stall = seconds
    shop.stalls = lambda requests: (
        len(requests) == batch and any(r.plan.speculative for r in requests) == drafting
    )
    gains = [shop.gain(batch, generator) for _ in range(10)]
    return float(np.median(gains[-4:]))


@pytest.mark.parametrize("seconds", [0.1, 2.0])
def test_plain_decoding_that_was_held_up_once_is_come_back_to(seconds: float) -> None:
    gains = [after_a_stall(w, 2, seconds, chance=0.15, drafting=False) for w in range(6)]
    assert np.median(gains) > 0.97
    assert min(gains) > 0.9


@pytest.mark.parametrize("seconds", [0.1, 2.0])
def test_drafts_that_were_held_up_once_are_come_back_to(seconds: float) -> None:
    calm = [after_a_stall(w, 2, 0.0, chance=0.75, drafting=True) for w in range(6)]
    held_up = [after_a_stall(w, 2, seconds, chance=0.75, drafting=True) for w in range(6)]
    assert np.median(held_up) > 0.95 * np.median(calm) > 1.3
