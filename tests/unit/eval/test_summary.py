import numpy as np
import pytest
from support.runs import ENVIRONMENT, NONE, OTBV, QUESTIONS, record, run_settings

from eaglegbv.config import PLAIN
from eaglegbv.eval.records import Record, Results, Setting
from eaglegbv.eval.report import markdown, plain_text, table
from eaglegbv.eval.statistics import (
    Estimate,
    SideOfOne,
    bootstrap_ratio,
    summarise,
)
from eaglegbv.metrics import Phase, RequestMetrics


def results(*records: Record, **changes: object) -> Results:
    return Results(settings=run_settings(**changes), environment=ENVIRONMENT, records=records)


def test_a_trace_computed_by_hand() -> None:
    # Three forwards of a tree of depth 3: two, none and three drafted tokens accepted, each with
    # one more token of the target's own.
    metrics = RequestMetrics()
    for accepted in (2, 0, 3):
        metrics.count_forward(
            offered=3, accepted=accepted, committed=accepted + 1, nodes=6, plan="otbv 2x3"
        )
    metrics.add_seconds(Phase.PREFILL, 1.0)
    one = record(OTBV, "q0", 0, forwards=3, committed=8, decode_seconds=4.0)
    one.turns[0].metrics = metrics
    plain = record(NONE, "q0", 0, forwards=8, committed=8, decode_seconds=8.0)
    [_, summary] = summarise(results(plain, one))
    assert summary.target_forwards == 3
    assert summary.committed_tokens == 8
    assert summary.acceptance_length == pytest.approx(5 / 3)
    assert summary.block_efficiency.value == pytest.approx(8 / 3)
    assert summary.acceptance_by_depth == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    # Prefill: one second and one token. Decoding: 8 tokens in 4 s against 8 in 8 s.
    assert summary.tokens_per_second.value == pytest.approx(8 / 4)
    assert summary.speedup is not None
    assert summary.speedup.value == pytest.approx((8 / 4) / (8 / 8))
    assert summary.wall_tokens_per_second.value == pytest.approx(9 / 5)
    assert summary.wall_speedup is not None
    assert summary.wall_speedup.value == pytest.approx((9 / 5) / (9 / 9))


def test_baselines_are_compared_with_the_engine_s_plain_decoding() -> None:
    other = Setting(plan=PLAIN, baseline="lookup:3")
    records = [
        record(NONE, "q0", 0, forwards=8, committed=8, decode_seconds=8.0),
        record(other, "q0", 0, forwards=4, committed=8, decode_seconds=2.0),
    ]
    # Its place before plain decoding does not make it what others are compared with.
    run = results(*records, settings=(other, NONE))
    baseline, none = summarise(run)
    assert (baseline.setting, none.setting) == ("lookup:3", "none")
    assert baseline.speedup is not None
    assert baseline.speedup.value == pytest.approx(4)
    assert none.speedup is not None
    assert none.speedup.value == 1


def test_phases_that_are_not_told_are_missing_not_zero() -> None:
    other = Setting(plan=PLAIN, baseline="transformers")
    one = record(other, "q0", 0, forwards=8, committed=8, decode_seconds=8.0)
    del one.turns[0].metrics.seconds[Phase.FORWARD]
    plain = record(NONE, "q0", 0, forwards=8, committed=8, decode_seconds=8.0)
    run = results(plain, one, settings=(NONE, other))
    _, summary = summarise(run)
    assert set(summary.milliseconds_by_phase) == {"prefill", "other"}
    lines = [line for line in markdown(run, summarise(run)).splitlines() if "111.11" in line]
    assert lines[-1] == "| transformers | 111.11 | - | 888.89 |"


def test_rates_and_speedups_are_medians_over_repeats() -> None:
    records = []
    # Plain decoding commits 2, 1 and 4 tokens a second in the three repeats, otbv 4, 3 and 4.
    for repeat, (plain, ours) in enumerate([(0.5, 0.25), (1.0, 1 / 3), (0.25, 0.25)]):
        for question in ("q0", "q1"):
            records += [
                record(
                    NONE, question, repeat, forwards=12, committed=12, decode_seconds=12 * plain
                ),
                record(OTBV, question, repeat, forwards=4, committed=12, decode_seconds=12 * ours),
            ]
    none, otbv = summarise(results(*records, repeats=3))
    assert none.tokens_per_second.value == pytest.approx(2)
    assert otbv.tokens_per_second.value == pytest.approx(4)
    assert none.speedup is not None
    assert none.speedup.value == pytest.approx(1)
    assert otbv.speedup is not None
    assert otbv.speedup.value == pytest.approx(2)  # median of 2, 3, 1
    # With prefill: 26 tokens in 2 s of prefill and 24 / rate of decoding a repeat.
    walls = [(26 / 14, 26 / 8), (26 / 26, 26 / 10), (26 / 8, 26 / 8)]
    assert none.wall_tokens_per_second.value == pytest.approx(sorted(w for w, _ in walls)[1])
    assert otbv.wall_speedup is not None
    assert otbv.wall_speedup.value == pytest.approx(sorted(b / a for a, b in walls)[1])


def test_the_median_over_repeats_lies_within_its_interval() -> None:
    # Of three repeats one is fast: pooled, it draws an interval away from the median.
    rates = {0: 10.0, 1: 11.0, 2: 40.0}
    records = [
        record(OTBV, f"q{q}", repeat, forwards=4, committed=20, decode_seconds=(20 + q) / rate)
        for repeat, rate in rates.items()
        for q in range(8)
    ]
    plain = [
        record(NONE, f"q{q}", repeat, forwards=20, committed=20, decode_seconds=20.0)
        for repeat in rates
        for q in range(8)
    ]
    _, otbv = summarise(results(*plain, *records, repeats=3))
    assert otbv.speedup is not None
    for figure in (otbv.tokens_per_second, otbv.speedup):
        assert figure.low < figure.value < figure.high
        assert figure.value == pytest.approx(11 * 160 / 188)


def test_figures_pool_sums_rather_than_average_ratios() -> None:
    records = [
        record(OTBV, "q0", 0, forwards=10, committed=10, decode_seconds=1.0),
        record(OTBV, "q1", 0, forwards=10, committed=40, decode_seconds=9.0),
    ]
    [summary] = summarise(results(*records))
    assert summary.block_efficiency.value == pytest.approx(2.5)
    assert summary.tokens_per_second.value == pytest.approx(5.0)
    assert summary.block_efficiency.low == pytest.approx(1.0)
    assert summary.block_efficiency.high == pytest.approx(4.0)
    assert summary.speedup is None


def test_speedup_compares_the_same_conversations() -> None:
    records = [
        record(NONE, "q0", 0, forwards=10, committed=10, decode_seconds=10.0),
        record(NONE, "q1", 0, forwards=10, committed=10, decode_seconds=1.0, error="too long"),
        record(OTBV, "q0", 0, forwards=5, committed=10, decode_seconds=5.0),
        record(OTBV, "q1", 0, forwards=5, committed=10, decode_seconds=50.0),
    ]
    none, otbv = summarise(results(*records))
    assert (none.errors, none.conversations, otbv.errors) == (1, 1, 0)
    assert otbv.speedup is not None
    assert otbv.speedup.value == pytest.approx(2.0)


def test_a_setting_with_nothing_but_errors_has_no_figures() -> None:
    broken = record(OTBV, "q0", 0, forwards=0, committed=0, decode_seconds=0.0, error="too long")
    run = results(broken)
    [summary] = summarise(run)
    assert (summary.conversations, summary.errors) == (0, 1)
    assert summary.block_efficiency.value == 0
    assert summary.tokens_per_second.value == 0
    assert summary.speedup is None
    assert "too long" in markdown(run, [summary])


def test_time_outside_the_phases_is_shown() -> None:
    one = record(NONE, "q0", 0, forwards=9, committed=9, decode_seconds=4.0, prefill_seconds=2.0)
    [summary] = summarise(results(one))
    phases = summary.milliseconds_by_phase
    assert phases["prefill"] == pytest.approx(200)
    assert phases["forward"] == pytest.approx(300)
    assert phases["other"] == pytest.approx(100)
    assert sum(phases.values()) == pytest.approx(600)


def test_report_names_settings_machine_and_definitions() -> None:
    records = [
        record(s, q.id, r, forwards=4, committed=8, decode_seconds=2.0)
        for s in (NONE, OTBV)
        for q in QUESTIONS
        for r in (0, 1)
    ]
    run = results(*records)
    text = markdown(run, summarise(run))
    for expected in (
        "# test",
        "otbv K2 L3",
        "prefill",
        "2 cores",
        "Acceptance by depth",
        "| none |",
    ):
        assert expected in text
    assert "broke off" not in text
    lines = plain_text(table(summarise(run))).splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("otbv K2 L3")
    assert " 2.00  " in lines[2]  # all questions alike: the interval is a point


def test_of_one_question_no_interval_is_told() -> None:
    own = {"forwards": 3, "committed": 7, "decode_seconds": 1.7}
    one = [record(OTBV, "q0", repeat, **own) for repeat in (0, 1)]
    run = results(*one)
    assert "[" not in plain_text(table(summarise(run)))
    assert "[" not in markdown(run, summarise(run)).partition("What the figures mean")[0]
    two = results(*one, record(OTBV, "q1", 0, forwards=3, committed=9, decode_seconds=1.0))
    assert "[" in plain_text(table(summarise(two)))


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
    estimate = bootstrap_ratio(double, ones, length, ones)
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
