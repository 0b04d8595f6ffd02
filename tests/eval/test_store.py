from pathlib import Path

import msgspec
import pytest
from support.fake_llm import FakeLLM
from support.runs import ENVIRONMENT, NONE, OTBV, QUESTIONS, record, run_settings

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.records import Journal, Record, Setting, read_json
from eaglegbv.eval.runner import RunFolder, load_results, read_results, run, write_results
from eaglegbv.eval.statistics import Estimate, summarise


class Killed(Exception):
    pass


def test_a_killed_run_is_resumed_and_loses_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, run_settings(), ENVIRONMENT)

    def die_after_three(one: Record) -> None:
        folder.add(one)
        if len(folder.records) == 3:
            raise Killed

    with pytest.raises(Killed):
        run(FakeLLM(), QUESTIONS, run_settings(), on_record=die_after_three)
    with (tmp_path / "records.jsonl").open("ab") as file:
        file.write(b'{"question_id": "q2", "cate')

    again = RunFolder(tmp_path, run_settings(), msgspec.structs.replace(ENVIRONMENT, cores=9))
    assert len(again.records) == 3
    assert again.environment == ENVIRONMENT
    run(
        FakeLLM(),
        QUESTIONS,
        run_settings(),
        done=[r.key for r in again.records],
        on_record=again.add,
    )
    keys = [r.key for r in RunFolder(tmp_path, run_settings(), ENVIRONMENT).records]
    assert len(set(keys)) == len(keys) == 12


def test_a_folder_knows_what_is_measured(tmp_path: Path) -> None:
    settings = run_settings(repeats=1)
    folder = RunFolder(tmp_path, settings, ENVIRONMENT)
    keys = list(settings.keys([NONE]))
    for setting, question, repeat in keys:
        assert not folder.has_all([NONE])
        assert setting == NONE.name
        folder.add(record(NONE, question, repeat, forwards=4, committed=8, decode_seconds=2.0))
    assert folder.done == {*keys}
    assert folder.has_all([NONE])
    assert not folder.has_all(settings.settings)


def test_another_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    RunFolder(tmp_path, run_settings(), ENVIRONMENT)
    with pytest.raises(
        InvalidArgument, match=r"out=.*--out NEW.*another \(max_tokens 8, now 9; "
    ) as e:
        RunFolder(tmp_path, run_settings(seed=1, max_tokens=9, question_ids=("q",)), ENVIRONMENT)
    assert str(e.value).endswith("; seed 0, now 1; other question_ids)")
    with pytest.raises(InvalidArgument, match=r"\(system none, now Be brief\.\)"):
        RunFolder(tmp_path, run_settings(system="Be brief."), ENVIRONMENT)


def test_a_run_written_by_two_processes_at_once_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, run_settings(), ENVIRONMENT)
    other = RunFolder(tmp_path, run_settings(), ENVIRONMENT)
    one = record(NONE, "q0", 1, forwards=4, committed=8, decode_seconds=2.0)
    folder.add(one)
    assert load_results(tmp_path).records == [one]
    other.add(one)
    with pytest.raises(InvalidArgument, match="two processes"):
        load_results(tmp_path)
    with pytest.raises(InvalidArgument, match="two processes"):
        RunFolder(tmp_path, run_settings(), ENVIRONMENT)


def test_a_line_that_was_cut_short_costs_no_other(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, run_settings(), ENVIRONMENT)
    folder.add(record(NONE, "q0", 0, forwards=4, committed=8, decode_seconds=2.0))
    lines = tmp_path / "records.jsonl"
    whole = lines.read_bytes()
    for cut in (0, 1, len(whole) // 2, len(whole) - 1):
        lines.write_bytes(whole + whole[:cut])
        assert len(RunFolder(tmp_path, run_settings(), ENVIRONMENT).records) == 1
        assert lines.read_bytes() == whole
    lines.write_bytes(whole[:-1])  # cut at the very first
    assert RunFolder(tmp_path, run_settings(), ENVIRONMENT).records == []
    assert lines.read_bytes() == b""


def test_a_file_or_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("x")
    with pytest.raises(InvalidArgument, match="out="):
        RunFolder(occupied, run_settings(), ENVIRONMENT)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="out="):
        RunFolder(tmp_path, run_settings(), ENVIRONMENT)


@pytest.mark.parametrize("setting", [NONE, OTBV], ids=lambda setting: setting.name)
def test_results_are_read_back(tmp_path: Path, setting: Setting) -> None:
    folder = RunFolder(tmp_path, run_settings(), ENVIRONMENT)
    folder.add(record(setting, "q0", 0, forwards=4, committed=8, decode_seconds=2.0))
    results = folder.results()
    path = write_results(tmp_path, results, summarise(results))
    assert read_results(path) == results
    with pytest.raises(InvalidArgument, match="results="):
        read_results(tmp_path / "run.json")


# Its files.

ENTRIES = [Estimate(2.0, 1.0, 3.0), Estimate(5.0, 4.0, 6.0)]


def journal(folder: Path) -> Journal[Estimate]:
    return Journal(folder / "lines.jsonl", Estimate, "figures")


def test_entries_are_read_in_order(tmp_path: Path) -> None:
    assert journal(tmp_path).read() == journal(tmp_path).resume() == []
    for entry in ENTRIES:
        journal(tmp_path).add(entry)
    assert journal(tmp_path).read() == journal(tmp_path).resume() == ENTRIES


def test_reading_leaves_a_torn_line_to_its_writer(tmp_path: Path) -> None:
    mine, path = journal(tmp_path), tmp_path / "lines.jsonl"
    for entry in ENTRIES:
        mine.add(entry)
    whole = path.read_bytes()
    for cut in (0, 1, len(whole) // 4):
        path.write_bytes(whole + whole[:cut])
        assert mine.read() == ENTRIES
        assert path.read_bytes() == whole + whole[:cut]
        assert mine.resume() == ENTRIES
        assert path.read_bytes() == whole
    path.write_bytes(whole[: len(whole) // 4])
    assert mine.resume() == []
    assert path.read_bytes() == b""


def test_a_line_of_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"value": 1}\n{"val')
    with pytest.raises(InvalidArgument, match=r"results=.*figures"):
        journal(tmp_path).read("results")
    with pytest.raises(InvalidArgument, match=r"out=.*figures"):
        journal(tmp_path).resume()
    assert path.read_bytes() == b'{"value": 1}\n{"val'


def test_content_is_read_or_refused_by_the_name_a_user_gave(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"value": 2, "low": 1, "high": 3}')
    assert read_json(path, Estimate, argument="file", expected="a figure") == Estimate(2, 1, 3)
    for content in (b"{}", b"[", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(InvalidArgument, match=r"file='.*a\.json': expected a figure \("):
            read_json(path, Estimate, argument="file", expected="a figure")
    path.unlink()
    with pytest.raises(InvalidArgument, match="No such file"):
        read_json(path, Estimate, argument="file", expected="a figure")
