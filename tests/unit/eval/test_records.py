from pathlib import Path

import pytest
from support.runs import ENVIRONMENT, NONE, record, run_settings

from eaglegbv.config import Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.records import Journal, grid, read_json
from eaglegbv.eval.runner import RunFolder, load_results
from eaglegbv.eval.statistics import Estimate
from eaglegbv.tree import DraftSampling


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


def test_a_file_or_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("x")
    with pytest.raises(InvalidArgument, match="out="):
        RunFolder(occupied, run_settings(), ENVIRONMENT)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="out="):
        RunFolder(tmp_path, run_settings(), ENVIRONMENT)


# --- its files
ENTRIES = [Estimate(2.0, 1.0, 3.0), Estimate(5.0, 4.0, 6.0)]


def journal(folder: Path) -> Journal[Estimate]:
    return Journal(folder / "lines.jsonl", Estimate, "figures")


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


# --- grids of settings: every combination once, named; what is not lossless is left out
def names(*args: object, base: Plan | None = None, **more: object) -> list[str]:
    settings = grid(*args, base=base or Plan(), **more).settings
    return [setting.name for setting in settings]


def test_every_combination_stands_once() -> None:
    assert names(["none", "token", "gbv"], [1, 2], [3, 4], [1.0]) == [
        "none", "token K1 L3", "token K1 L4", "gbv K1 L3", "gbv K1 L4", "gbv K2 L3", "gbv K2 L4",
    ]  # fmt: skip
    assert names(["none", "otbv"], [2], [4], [0.0, 1.0]) == [
        "none T0", "otbv K2 L4 T0", "none", "otbv K2 L4",
    ]  # fmt: skip
    base = Plan(draft_sampling=DraftSampling.FIXED, draft_width=16, draft_temperature=2.0)
    assert names(["otbv"], [2], [4], [1.0], base=base) == ["otbv K2 L4 fixed W16 D2"]


def test_what_is_not_lossless_is_left_out_and_named() -> None:
    samplings = [DraftSampling.IID, DraftSampling.FIXED, DraftSampling.HUB]
    rules = ["block", "otbv", "spechub"]
    found = grid(rules, [1, 2], [3], [1.0], base=Plan(), draft_samplings=samplings)
    assert [s.name for s in found.settings] == [
        "block K1 L3 iid", "otbv K1 L3 iid", "otbv K2 L3 iid", "otbv K1 L3 fixed",
        "otbv K2 L3 fixed", "spechub K2 L3 hub",
    ]  # fmt: skip
    assert {"block K1 L3 fixed", "otbv K2 L3 hub", "spechub K1 L3 hub"} < set(found.left_out)
    assert len(found.left_out) == 9
