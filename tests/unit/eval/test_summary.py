from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.fake_llm import FakeLLM
from support.runs import ENVIRONMENT, NONE, OTBV, QUESTIONS, counted, record, records, run_settings

from eaglegbv.config import PLAIN
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.comparison import Comparison, Difference, compare, compare_runs, side, unlike
from eaglegbv.eval.records import Record, Results, Setting
from eaglegbv.eval.report import markdown, plain_text, table
from eaglegbv.eval.runner import RunFolder, load_results, run, write_results
from eaglegbv.eval.statistics import FIGURES, Estimate, bootstrap_ratio, summarise
from eaglegbv.metrics import Phase


def results(*records: Record, **changes: object) -> Results:
    return Results(settings=run_settings(**changes), environment=ENVIRONMENT, records=records)


def test_a_trace_computed_by_hand() -> None:
    # Three forwards of a tree of depth 3: two, none and three drafted tokens accepted, each with
    # one more token of the target's own.
    metrics = counted([2, 0, 3], offered=3, nodes=6, plan="otbv 2x3")
    metrics.add_seconds(Phase.PREFILL, 1.0)
    [one], [plain] = records(OTBV, (3, 8, 4.0)), records(NONE, (8, 8, 8.0))
    one.turns[0].metrics = metrics
    [_, summary] = summarise(results(plain, one))
    assert summary.target_forwards == 3
    assert summary.committed_tokens == 8
    assert summary.acceptance_length == pytest.approx(5 / 3)
    assert summary.block_efficiency.value == pytest.approx(8 / 3)
    assert summary.acceptance_by_depth == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    # Prefill: one second and one token. Decoding: 8 tokens in 4 s against 8 in 8 s.
    assert summary.tokens_per_second.value == pytest.approx(8 / 4)
    assert summary.speedup.value == pytest.approx((8 / 4) / (8 / 8))
    assert summary.wall_tokens_per_second.value == pytest.approx(9 / 5)
    assert summary.wall_speedup.value == pytest.approx((9 / 5) / (9 / 9))


def test_baselines_are_compared_with_the_engine_s_plain_decoding() -> None:
    other = Setting(plan=PLAIN, baseline="lookup:3")
    own = [*records(NONE, (8, 8, 8.0)), *records(other, (4, 8, 2.0))]
    # Its place before plain decoding does not make it what others are compared with.
    baseline, none = summarise(results(*own, settings=(other, NONE)))
    assert (baseline.setting, none.setting) == ("lookup:3", "none")
    assert baseline.speedup.value == pytest.approx(4)
    assert none.speedup.value == 1


def test_rates_and_speedups_are_medians_over_repeats() -> None:
    own = []
    # Plain decoding commits 2, 1 and 4 tokens a second in the three repeats, otbv 4, 3 and 4.
    for repeat, (plain, ours) in enumerate([(0.5, 0.25), (1.0, 1 / 3), (0.25, 0.25)]):
        own += records(NONE, *[(12, 12, 12 * plain)] * 2, repeat=repeat)
        own += records(OTBV, *[(4, 12, 12 * ours)] * 2, repeat=repeat)
    none, otbv = summarise(results(*own, repeats=3))
    assert none.tokens_per_second.value == pytest.approx(2)
    assert otbv.tokens_per_second.value == pytest.approx(4)
    assert none.speedup.value == pytest.approx(1)
    assert otbv.speedup.value == pytest.approx(2)  # median of 2, 3, 1
    # With prefill: 26 tokens in 2 s of prefill and 24 / rate of decoding a repeat.
    walls = [(26 / 14, 26 / 8), (26 / 26, 26 / 10), (26 / 8, 26 / 8)]
    assert none.wall_tokens_per_second.value == pytest.approx(sorted(w for w, _ in walls)[1])
    assert otbv.wall_speedup.value == pytest.approx(sorted(b / a for a, b in walls)[1])


def test_the_median_over_repeats_lies_within_its_interval() -> None:
    # Of three repeats one is fast: pooled, it draws an interval away from the median.
    rates = {0: 10.0, 1: 11.0, 2: 40.0}
    own = []
    for repeat, rate in rates.items():
        own += records(OTBV, *((4, 20, (20 + q) / rate) for q in range(8)), repeat=repeat)
        own += records(NONE, *[(20, 20, 20.0)] * 8, repeat=repeat)
    _, otbv = summarise(results(*own, repeats=3))
    for figure in (otbv.tokens_per_second, otbv.speedup):
        assert figure.low < figure.value < figure.high
        assert figure.value == pytest.approx(11 * 160 / 188)


def test_speedup_compares_the_same_conversations() -> None:
    own = [*records(NONE, (10, 10, 10.0), (10, 10, 1.0)), *records(OTBV, (5, 10, 5), (5, 10, 50))]
    own[1].error = "too long"
    none, otbv = summarise(results(*own))
    assert (none.errors, none.conversations, otbv.errors) == (1, 1, 0)
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


def test_of_one_question_no_interval_is_told() -> None:
    one = [*records(OTBV, (3, 7, 1.7)), *records(OTBV, (3, 7, 1.7), repeat=1)]
    run = results(*one)
    assert "[" not in plain_text(table(summarise(run)))
    assert "[" not in markdown(run, summarise(run)).partition("What the figures mean")[0]
    two = results(one[1], *records(OTBV, (3, 7, 1.7), (3, 9, 1.0)))
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


@pytest.mark.parametrize(
    ("low", "high", "slack", "side"),
    [
        (1.1, 1.2, 0.0, "above"),
        (1.0, 1.1, 0.0, "neither"),
        (0.9, 1.0, 0.0, "neither"),
        (1.001, 1.1, 0.01, "neither"),
        (0.9, 0.98, 0.01, "below"),
    ],
)
def test_an_interval_that_holds_one_leaves_the_side_open(low, high, slack, side) -> None:
    assert Estimate((low + high) / 2, low, high).told("above", "below", "neither", slack) == side


# --- two runs compared, question by question
def figure(comparison: Comparison, name: str) -> Difference:
    return next(one for one in comparison.differences if one.figure == name)


def two_runs(factors: list[float]) -> tuple[Results, Results]:
    """B commits ``factor`` times as many tokens a forward on each question, in the same time."""
    # Questions differ a lot from one another: only pairing can see a small factor.
    tokens = [100 * (1 + number % 7) for number in range(len(factors))]
    more = [round(factor * own) for factor, own in zip(factors, tokens, strict=True)]
    a, b = (results(*records(OTBV, *((100, own, 4.0) for own in run))) for run in (tokens, more))
    return a, b


def test_a_small_difference_on_every_question_is_seen_because_questions_are_paired() -> None:
    a, b = two_runs([1.02, 1.04] * 20)
    [comparison] = compare_runs(a, b)
    efficiency = figure(comparison, "block efficiency")
    assert 1.02 < efficiency.ratio.low < efficiency.ratio.value < efficiency.ratio.high < 1.04
    assert efficiency.verdict == "higher"
    assert figure(compare_runs(b, a)[0], "block efficiency").verdict == "lower"
    assert figure(comparison, "ms/forward").verdict == "no difference shown"
    # Without pairing the spread of the questions would hide it.
    assert efficiency.b / efficiency.a == pytest.approx(efficiency.ratio.value)


def test_values_are_computed_by_hand() -> None:
    a = results(*records(OTBV, (10, 20, 5.0)))
    b = results(*records(OTBV, (10, 30, 4.0)), *records(OTBV, (10, 50, 6.0), repeat=1))
    comparison = compare(side(a, OTBV.name), side(b, OTBV.name))
    found = {one.figure: (one.a, one.b) for one in comparison.differences}
    assert found == {
        "block efficiency": pytest.approx((2.0, 4.0)),
        "acceptance length": pytest.approx((1.0, 3.0)),
        "tokens/s": pytest.approx((4.0, 8.0)),
        "tokens/s with prefill": pytest.approx((21 / 6, 82 / 12)),
        "ms/forward": pytest.approx((500.0, 500.0)),
    }
    assert set(found) == set(FIGURES)
    assert figure(comparison, "block efficiency").verdict == "cannot be told"  # one question


def test_only_questions_whole_on_both_sides_count() -> None:
    a = results(*records(OTBV, (10, 20, 1.0), (10, 90, 1.0), (10, 90, 1.0)))
    b = results(*records(OTBV, (10, 30, 1.0), (1, 90, 1.0)))
    b.records[1].error = "too long"
    efficiency = figure(compare_runs(a, b)[0], "block efficiency")
    assert (efficiency.a, efficiency.b, efficiency.questions) == (2.0, 3.0, 1)
    broken = results(b.records[1])
    with pytest.raises(InvalidArgument, match="both answered"):
        compare_runs(a, broken)


def test_other_differences_of_the_runs_are_named() -> None:
    a, b = two_runs([1.0])
    assert unlike(a, b) == []
    b.settings = run_settings(max_tokens=9, question_ids=("q0", "q9"))
    b.environment = msgspec.structs.replace(ENVIRONMENT, threads=7)
    lines = unlike(a, b)
    assert "max_tokens: 8 and 9" in lines
    assert "threads: 1 and 7" in lines
    assert "questions asked in one run alone, left out: 3" in lines


def test_a_run_is_read_from_its_folder_before_and_after_it_is_finished(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, run_settings(), ENVIRONMENT)
    run(FakeLLM(), QUESTIONS, run_settings(), on_record=folder.add)
    with (tmp_path / "records.jsonl").open("ab") as file:
        file.write(b'{"question_id": "cut')
    assert load_results(tmp_path) == folder.results()
    path = write_results(tmp_path, folder.results(), [])
    assert load_results(path) == folder.results()
    for file in ("run.json", "records.jsonl"):
        (tmp_path / file).unlink()
    assert load_results(tmp_path) == folder.results()
    path.unlink()
    with pytest.raises(InvalidArgument, match="results="):
        load_results(tmp_path)


def test_records_of_settings_the_run_does_not_have_are_not_dropped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, run_settings(), ENVIRONMENT)
    named_otherwise = msgspec.structs.replace(OTBV.plan, draft_width=7)
    other = msgspec.structs.replace(OTBV, plan=named_otherwise)
    folder.add(record(other, "q0", 0, forwards=4, committed=8, decode_seconds=2.0))
    with pytest.raises(InvalidArgument, match=r"not of otbv K2 L3 W7"):
        load_results(tmp_path)
    with pytest.raises(InvalidArgument, match=r"not of otbv K2 L3 W7"):
        RunFolder(tmp_path, run_settings(), ENVIRONMENT)
    path = write_results(tmp_path, folder.results(), [])
    with pytest.raises(InvalidArgument, match=r"not of otbv K2 L3 W7"):
        load_results(path)
