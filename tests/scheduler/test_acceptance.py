"""Chances are learned from counts, carried over between plans, and told apart by request."""

import numpy as np
import pytest

from eaglegbv.scheduler.acceptance import Acceptance, Evidence, kind_of


def feed(
    acceptance: Acceptance, evidence: Evidence, chances: list[float], *, paths: int, steps: int
) -> None:
    """Show steps of trees as deep as ``chances`` is long."""
    generator = np.random.default_rng(7)
    for _ in range(steps):
        draws = generator.random(len(chances)) < chances
        accepted = int(np.cumprod(draws).sum())
        acceptance.observe(evidence, paths=paths, offered=len(chances), accepted=accepted)


def tokens(
    acceptance: Acceptance, *, shift: float = 0.0, limit: int = 1000, paths: int = 3, depth: int = 3
) -> float:
    result = acceptance.expected_tokens(
        np.array([shift]), np.array([limit]), np.array([paths]), np.array([depth])
    )
    return float(result[0, 0])


def test_the_prior_grows_with_paths_and_depth_and_is_no_certainty() -> None:
    acceptance = Acceptance()
    assert (acceptance.hazards > 0).all()
    assert (acceptance.hazards < 1).all()
    assert (np.diff(acceptance.hazards, axis=0) > 0).all()
    assert tokens(acceptance, depth=2) < tokens(acceptance, depth=5)


def test_chances_come_near_the_true_ones() -> None:
    acceptance = Acceptance()
    feed(acceptance, Evidence(), [0.9, 0.6, 0.3], paths=3, steps=1500)
    assert acceptance.hazards[2, :3] == pytest.approx([0.9, 0.6, 0.3], abs=0.07)
    assert tokens(acceptance) == pytest.approx(1 + 0.9 + 0.54 + 0.162, abs=0.15)


def test_expected_tokens_are_those_of_the_hazards() -> None:
    acceptance = Acceptance()
    feed(acceptance, Evidence(), [0.6, 0.6], paths=2, steps=2000)
    a, b = acceptance.hazards[1, :2].tolist()
    assert tokens(acceptance, paths=2, depth=2) == pytest.approx(1 + a + a * b, abs=0.01)


def test_depths_of_which_little_was_seen_look_worth_a_try() -> None:
    acceptance = Acceptance()
    a, b = acceptance.hazards[1, :2].tolist()
    assert tokens(acceptance, paths=2, depth=2) > 1 + a + a * b + 0.1
    # Depth 1 is well known now, depth 2 is not.
    feed(acceptance, Evidence(), [0.6], paths=2, steps=400)
    a, b = acceptance.hazards[1, :2].tolist()
    assert tokens(acceptance, paths=2, depth=1) == pytest.approx(1 + a, abs=0.002)
    assert tokens(acceptance, paths=2, depth=2) > 1 + a + a * b + 0.02


def test_what_one_number_of_paths_shows_is_carried_over_to_others() -> None:
    acceptance = Acceptance()
    before = acceptance.hazards.copy()
    feed(acceptance, Evidence(), [0.2, 0.2, 0.2], paths=3, steps=300)
    assert (acceptance.hazards[:4, :3] < before[:4, :3] - 0.1).all()
    # Depths that were never offered follow those above them.
    assert (acceptance.hazards[:4, 5] < before[:4, 5] - 0.1).all()


@pytest.mark.parametrize("exponent", [0.2, 0.5, 1.0])
def test_how_much_more_paths_bring_is_learned_from_two_numbers_of_them(exponent: float) -> None:
    acceptance = Acceptance()
    for paths in (1, 4):
        chance = 1 - 0.5 ** (paths**exponent)
        feed(acceptance, Evidence(), [chance], paths=paths, steps=300)
    # Of two paths nothing was seen.
    assert acceptance.hazards[1, 0] == pytest.approx(1 - 0.5 ** (2**exponent), abs=0.06)


def test_requests_are_told_apart_by_few_steps() -> None:
    acceptance, good, bad = Acceptance(), Evidence(), Evidence()
    for _ in range(12):
        acceptance.observe(good, paths=2, offered=4, accepted=4)
        acceptance.observe(bad, paths=2, offered=4, accepted=0)
    assert good.shift > 0.5
    assert bad.shift < -0.5
    assert tokens(acceptance, shift=good.shift) > tokens(acceptance, shift=bad.shift) + 0.5


def test_evidence_fades_while_nothing_is_drafted() -> None:
    evidence = Evidence(score=-5.0, information=4.0)
    before = evidence.shift
    evidence.age(60)
    assert before < evidence.shift < 0
    evidence.age(600)
    assert evidence.shift == pytest.approx(0, abs=1e-3)


def test_nothing_is_expected_beyond_the_last_token() -> None:
    acceptance = Acceptance()
    assert tokens(acceptance, limit=1, depth=6) == 1
    assert tokens(acceptance, limit=2, depth=6) == tokens(acceptance, depth=1)
    assert tokens(acceptance, limit=3, depth=6) == tokens(acceptance, depth=2)


def test_old_counts_fade_when_things_change() -> None:
    acceptance = Acceptance()
    for chance in (0.9, 0.1):
        for _ in range(100):
            feed(acceptance, Evidence(), [chance], paths=1, steps=30)
    assert acceptance.hazards[0, 0] == pytest.approx(0.1, abs=0.07)


def test_temperatures_fall_into_kinds() -> None:
    assert [kind_of(t) for t in (0.0, 0.1, 0.49, 0.5, 1.0, 1.4, 2.0, 50.0)] == [
        0, 1, 1, 2, 3, 3, 5, 5
    ]  # fmt: skip


def test_another_kind_starts_from_a_hint_that_few_trials_outweigh() -> None:
    acceptance = Acceptance()
    feed(acceptance, Evidence(), [0.1], paths=2, steps=400)
    other = acceptance.hint()
    assert other.hazards[1, 0] < Acceptance().hazards[1, 0] - 0.1
    feed(other, Evidence(), [0.9], paths=2, steps=60)
    assert other.hazards[1, 0] > 0.6
    assert acceptance.hazards[1, 0] < 0.2
