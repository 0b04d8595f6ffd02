"""Figures by hand, their intervals, and what follows from them."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from support.runs import NONE, OTBV, counted, head, observation, observations, run_of

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.compare import Comparison, Difference, compared_runs, unlike
from eaglegbv.eval.figures import (
    ACCEPTANCE,
    NODES,
    SPEED,
    WALL_SPEED,
    Estimate,
    Sums,
    jackknife,
    position_figures,
)
from eaglegbv.eval.observations import Observation, Run
from eaglegbv.eval.tables import by_setting
from eaglegbv.eval.ways.conversations import Turn, conversation_sums
from eaglegbv.metrics import Phase

STORED = Path(__file__).parents[3] / "docs" / "results" / "mt-bench.json"


def test_a_trace_computed_by_hand() -> None:
    # Three forwards of a tree of depth 3: two, none and three drafted tokens accepted, each with
    # one more token of the target's own.
    metrics = counted([2, 0, 3], offered=3, nodes=6, plan="otbv 2x3")
    metrics.add_seconds(Phase.PREFILL, 1.0)
    turn = Turn(completion_tokens=9, wall_seconds=5.0, metrics=metrics)
    otbv = Observation(setting="otbv", unit="q", sums=conversation_sums([turn]))
    sums = Sums([otbv])
    assert sums.value(ACCEPTANCE, "otbv") == pytest.approx(8 / 3)
    assert [sums.value(f, "otbv") for f in position_figures(3)] == pytest.approx(
        [2 / 3, 2 / 3, 1 / 3]
    )
    # Prefill: one second and one token.
    assert sums.value(SPEED, "otbv") == pytest.approx(8 / 4)
    assert sums.value(WALL_SPEED, "otbv") == pytest.approx(9 / 5)
    assert sums.value(NODES, "otbv") == 6
    # Levels tried: 3 of the first tree, 1, and 3.
    assert sums.total("otbv", "trials") == 7


def test_rates_and_speedups_are_medians_over_repeats() -> None:
    own = []
    # Plain decoding commits 2, 1 and 4 tokens a second in the three repeats, otbv 4, 3 and 4.
    for repeat, (plain, ours) in enumerate([(0.5, 0.25), (1.0, 1 / 3), (0.25, 0.25)]):
        own += observations(NONE, *[(12, 12, 12 * plain)] * 2, repeat=repeat)
        own += observations(OTBV, *[(4, 12, 12 * ours)] * 2, repeat=repeat)
    sums = Sums(own)
    assert sums.value(SPEED, "none") == pytest.approx(2)
    assert sums.value(SPEED, OTBV.name) == pytest.approx(4)
    assert sums.ratio(SPEED, [OTBV.name], [NONE.name]).value == pytest.approx(2)  # of 2, 3, 1
    headings, none, otbv = by_setting(sums, (NONE, OTBV)).texts
    assert headings == ["setting", "acceptance length", "tokens/s", "speed-up", "with prefill"]
    assert none[1:4] == ["1.00", "2.0", "1.00"]
    assert otbv[:2] == ["otbv 2x3", "3.00"]


def test_what_broke_off_counts_in_no_figure_and_pairs_are_of_the_same_questions() -> None:
    own = [
        *observations(NONE, (10, 10, 10.0), (10, 10, 1.0)),
        *observations(OTBV, (5, 10, 5.0), (5, 10, 50.0)),
    ]
    own[1] = replace(own[1], error="too long")
    sums = Sums(own)
    assert (sums.errors["none"], sums.count("none"), sums.errors[OTBV.name]) == (1, 1, 0)
    assert sums.ratio(SPEED, [OTBV.name], ["none"]).value == pytest.approx(2.0)
    broken = Sums([replace(own[0], error="too long")])
    assert not broken.has("none")
    assert broken.value(ACCEPTANCE, "none") == 0


def test_of_one_question_no_interval_is_told() -> None:
    one = observations(OTBV, (3, 7, 1.7))
    assert "[" not in by_setting(Sums(one), (OTBV,)).text
    two = observations(OTBV, (3, 7, 1.7), (3, 9, 1.0))
    assert "[" in by_setting(Sums(two), (OTBV,)).text


def test_coverage_of_intervals() -> None:
    """Of the ratio of two rules, the verdicts' figure, on questions drawn from a stored run.

    Questions are drawn as a whole: tokens and steps of one together. Without a jackknife's t,
    percentiles of resampled questions cover 79% at 4 and 86% at 8.
    """
    run = Run.read(STORED)
    rng = np.random.default_rng(1)
    columns = {}
    for setting in run.head.sheets["conversations"]:
        rows: dict[str, np.ndarray] = {}
        for one in run.observations("conversations"):
            if one.setting == setting.name:
                both = np.array([one.sums["tokens"], one.sums["steps"]])
                rows[one.unit] = rows.get(one.unit, 0) + both
        columns[setting.name] = np.array(list(rows.values())).T
    base = columns["token 1x4"]
    for count in (4, 8, 16, 32):
        covered = []
        for name in ("block 1x4", "traversal 3x4", "gbv 3x4", "otbv 3x4"):
            own = columns[name]
            truth = _ratio(own.sum(axis=1), base.sum(axis=1))
            drawn = rng.integers(own.shape[1], size=(2000, count))
            for units in drawn:
                left = [_with_each_left_out(one[:, units]) for one in (own, base)]
                estimate = jackknife(_ratio(*left))
                covered.append(estimate.low <= truth <= estimate.high)
        assert 0.93 <= np.mean(covered) <= 0.97, count


def _with_each_left_out(columns: np.ndarray) -> np.ndarray:
    totals = columns.sum(axis=1, keepdims=True)
    return np.concatenate((totals, totals - columns), axis=1)


def _ratio(own: np.ndarray, base: np.ndarray) -> np.ndarray:
    return own[0] / own[1] / (base[0] / base[1])


def test_an_interval_is_the_jackknife_s_by_hand() -> None:
    # With each of three units left out: 2, 4 and 8. Logarithms are log 4 - log 2, 0, + log 2.
    found = jackknife(np.array([4.0, 2.0, 4.0, 8.0]))
    error = np.sqrt(2 / 3 * 2 * np.log(2) ** 2)
    half = 4.302652729911275 * error  # Student's t of two degrees
    assert found == Estimate(
        4.0, pytest.approx(4 * np.exp(-half)), pytest.approx(4 * np.exp(half)), 3
    )
    assert jackknife(np.array([0.5, 0.0, 1.0])).low == 0.0
    assert jackknife(np.array([3.0, np.nan])) == Estimate(3.0, 3.0, 3.0, 1)


@pytest.mark.parametrize(
    ("low", "high", "slack", "units", "side"),
    [
        (1.1, 1.2, 0.0, 8, "above"),
        (1.1, 1.2, 0.0, 7, "neither"),
        (1.0, 1.1, 0.0, 8, "neither"),
        (0.9, 1.0, 0.0, 8, "neither"),
        (1.001, 1.1, 0.01, 8, "neither"),
        (0.9, 0.98, 0.01, 8, "below"),
    ],
)
def test_an_interval_that_holds_one_leaves_the_side_open(low, high, slack, units, side) -> None:
    estimate = Estimate((low + high) / 2, low, high, units)
    assert estimate.told("above", "below", "neither", slack) == side


def test_a_mixture_of_trees_has_the_nodes_asked_for() -> None:
    """Unit by unit: a share of the larger tree such that the mean number of nodes is right."""
    trees = {"small": (1, (2.5, 3.0)), "large": (3, (3.5, 5.0))}
    sums = Sums(
        Observation(
            setting=name, unit=str(n), sums={"tokens": own, "steps": 2.0, "nodes": 2.0 * nodes}
        )
        for name, (nodes, tokens) in trees.items()
        for n, own in enumerate(tokens)
    )
    expected = {0.0: [2.0, 2.0], 0.5: [2.25, 2.5], 1.0: [2.5, 3.0], 2.5: [3.25, 4.5]}
    for nodes, tokens in expected.items():
        name = sums.mixture(["small", "large"], nodes)
        assert sums.column(name, "tokens") == pytest.approx(tokens)
        assert sums.value(NODES, name) == pytest.approx(nodes)
    with pytest.raises(ValueError, match="no tree"):
        sums.mixture(["small", "large"], 3.5)


def test_ranks_follow_the_intervals() -> None:
    """Paired by question: what is behind on every question is behind, whatever their spread."""
    tokens = [10 * (1 + n % 5) for n in range(10)]
    own = [*observations(OTBV, *((10, 2 * own, 1.0) for own in tokens))]
    own += observations(NONE, *((10, own, 1.0) for own in tokens))
    rank = Sums(own).rank(ACCEPTANCE, [NONE.name, OTBV.name])
    assert (rank.leader, rank.tied, rank.behind) == (OTBV.name, (), ("none",))


# --- two runs compared, question by question
def figure(comparison: Comparison, name: str) -> Difference:
    return next(one for one in comparison.differences if one.figure == name)


def two_runs(factors: list[float]) -> tuple[Run, Run]:
    """B commits ``factor`` times as many tokens a forward on each question, in the same time."""
    # Questions differ a lot from one another: only pairing can see a small factor.
    tokens = [100 * (1 + number % 7) for number in range(len(factors))]
    more = [round(factor * own) for factor, own in zip(factors, tokens, strict=True)]
    a, b = (run_of(observations(OTBV, *((100, n, 4.0) for n in run))) for run in (tokens, more))
    return a, b


def test_a_small_difference_on_every_question_is_seen_because_questions_are_paired() -> None:
    a, b = two_runs([1.02, 1.04] * 20)
    [comparison] = compared_runs(a, b, None, None)
    found = figure(comparison, "acceptance length")
    assert 1.02 < found.ratio.low < found.ratio.value < found.ratio.high < 1.04
    assert (found.verdict, comparison.questions) == ("higher", 40)
    [reverse] = compared_runs(b, a, None, None)
    assert figure(reverse, "acceptance length").verdict == "lower"
    assert figure(comparison, "ms/forward").verdict == "no difference shown"
    [few] = compared_runs(*two_runs([1.02, 1.04]), None, None)
    assert figure(few, "acceptance length").verdict == "cannot be told"


def test_only_questions_whole_on_both_sides_count() -> None:
    a = run_of(observations(OTBV, (10, 20, 1.0), (10, 90, 1.0), (10, 90, 1.0)))
    both = observations(OTBV, (10, 30, 1.0), (1, 90, 1.0))
    broken = replace(both[1], error="too long")
    [comparison] = compared_runs(a, run_of([both[0], broken]), None, None)
    found = figure(comparison, "acceptance length")
    assert (found.a, found.b, comparison.questions) == (2.0, 3.0, 1)
    with pytest.raises(InvalidArgument, match="both answered"):
        compared_runs(a, run_of([broken]), None, None)
    with pytest.raises(InvalidArgument, match="setting='nope'"):
        compared_runs(a, a, OTBV.name, "nope")
    with pytest.raises(InvalidArgument, match="at least one in both"):
        compared_runs(
            a,
            run_of([observation(NONE, "q0", forwards=1, committed=1, decode_seconds=1.0)]),
            None,
            None,
        )


def test_other_differences_of_the_runs_are_named() -> None:
    a, b = two_runs([1.0])
    assert unlike(a, b) == []
    b.head = head(max_tokens=9, question_ids=["q0", "q9"])
    b.head = replace(b.head, environment=replace(b.head.environment, threads=7))
    lines = unlike(a, b)
    assert "max_tokens: 8 and 9" in lines
    assert "threads: 1 and 7" in lines
    assert "questions asked in one run alone, left out: 3" in lines
