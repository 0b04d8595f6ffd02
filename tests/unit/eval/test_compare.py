from pathlib import Path

import msgspec
import pytest
from support.fake_llm import FakeLLM
from support.runs import ENVIRONMENT, NONE, OTBV, QUESTIONS, record, run_settings

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.comparison import (
    Comparison,
    Difference,
    compare,
    compare_runs,
    side,
    table,
    unlike,
)
from eaglegbv.eval.records import Record, Results
from eaglegbv.eval.runner import RunFolder, load_results, run, write_results
from eaglegbv.eval.statistics import FIGURES


def results(*records: Record, **changes: object) -> Results:
    return Results(settings=run_settings(**changes), environment=ENVIRONMENT, records=records)


def figure(comparison: Comparison, name: str) -> Difference:
    return next(one for one in comparison.differences if one.figure == name)


def two_runs(factors: list[float]) -> tuple[Results, Results]:
    """B commits ``factor`` times as many tokens a forward on each question, in the same time."""
    a, b = [], []
    for number, factor in enumerate(factors):
        # Questions differ a lot from one another: only pairing can see a small factor.
        committed = 100 * (1 + number % 7)
        more = round(factor * committed)
        a.append(record(OTBV, f"q{number}", 0, forwards=100, committed=committed, decode_seconds=4))
        b.append(record(OTBV, f"q{number}", 0, forwards=100, committed=more, decode_seconds=4))
    return results(*a), results(*b)


def test_a_small_difference_on_every_question_is_seen_because_questions_are_paired() -> None:
    a, b = two_runs([1.02, 1.04] * 20)
    [comparison] = compare_runs(a, b)
    efficiency = figure(comparison, "block efficiency")
    assert efficiency.ratio is not None
    assert 1.02 < efficiency.ratio.low < efficiency.ratio.value < efficiency.ratio.high < 1.04
    assert efficiency.verdict == "higher"
    assert figure(compare_runs(b, a)[0], "block efficiency").verdict == "lower"
    assert figure(comparison, "ms/forward").verdict == "no difference shown"
    # Without pairing the spread of the questions would hide it.
    assert efficiency.b / efficiency.a == pytest.approx(efficiency.ratio.value)


def test_differences_both_ways_are_no_difference() -> None:
    a, b = two_runs([0.9, 1.1] * 20)
    assert figure(compare_runs(a, b)[0], "block efficiency").verdict == "no difference shown"


def test_values_are_computed_by_hand() -> None:
    a = results(record(OTBV, "q0", 0, forwards=10, committed=20, decode_seconds=5.0))
    b = results(
        record(OTBV, "q0", 0, forwards=10, committed=30, decode_seconds=4.0),
        record(OTBV, "q0", 1, forwards=10, committed=50, decode_seconds=6.0),
    )
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
    a = results(
        record(OTBV, "q0", 0, forwards=10, committed=20, decode_seconds=1.0),
        record(OTBV, "q1", 0, forwards=10, committed=90, decode_seconds=1.0),
        record(OTBV, "q2", 0, forwards=10, committed=90, decode_seconds=1.0),
    )
    b = results(
        record(OTBV, "q0", 0, forwards=10, committed=30, decode_seconds=1.0),
        record(OTBV, "q1", 0, forwards=1, committed=90, decode_seconds=1.0, error="too long"),
    )
    efficiency = figure(compare_runs(a, b)[0], "block efficiency")
    assert (efficiency.a, efficiency.b, efficiency.questions) == (2.0, 3.0, 1)
    broken = results(b.records[1])
    with pytest.raises(InvalidArgument, match="both answered"):
        compare_runs(a, broken)


def test_two_settings_of_one_run() -> None:
    one = results(
        record(NONE, "q0", 0, forwards=10, committed=10, decode_seconds=2.0),
        record(OTBV, "q0", 0, forwards=5, committed=10, decode_seconds=1.0),
    )
    comparison = compare(side(one, NONE.name), side(one, OTBV.name))
    assert figure(comparison, "tokens/s").ratio is not None
    assert figure(comparison, "tokens/s").ratio.value == pytest.approx(2.0)
    accepted = figure(comparison, "acceptance length")
    assert accepted.ratio is None  # plain decoding accepts nothing
    assert accepted.verdict == "cannot be told"
    rows = table(comparison)
    assert rows[0] == ["figure", "A", "B", "B / A", "B is"]
    assert "-" in rows[2]


def test_what_was_not_measured_is_refused() -> None:
    a, _ = two_runs([1.0])
    with pytest.raises(InvalidArgument, match=r"setting='nope'.*otbv K2 L3"):
        side(a, "nope")
    other = results(record(NONE, "q0", 0, forwards=1, committed=1, decode_seconds=1.0))
    with pytest.raises(InvalidArgument, match="at least one in both runs"):
        compare_runs(a, other)


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
