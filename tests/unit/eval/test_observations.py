"""Runs in folders: begun, gone on with, refused; and as compact files."""

from pathlib import Path

import msgspec
import pytest
from support.runs import NONE, OTBV, head, observation, observations, run_of

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.observations import Observation, Run, read_json

SHEET = "conversations"


def measured() -> list[Observation]:
    return observations(OTBV, (3, 7, 1.7))


def test_what_is_measured_is_kept_and_not_measured_again(tmp_path: Path) -> None:
    run = Run.open(tmp_path, head())
    assert run.part(SHEET, "a", measured) == measured()
    assert run.has(SHEET, "a")
    lines = tmp_path / "observations.jsonl"
    whole = lines.read_bytes()
    for cut in (0, 1, len(whole) // 2):  # a line that a kill cut short is measured again
        lines.write_bytes(whole + whole[:cut])
        again = Run.open(tmp_path, head())
        assert again.part(SHEET, "a", lambda: pytest.fail("again")) == measured()
        assert lines.read_bytes() == whole
    lines.write_bytes(whole[: len(whole) // 2])
    assert Run.read(tmp_path).observations(SHEET) == []
    assert not Run.open(tmp_path, head()).has(SHEET, "a")


def test_another_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    Run.open(tmp_path, head())
    with pytest.raises(InvalidArgument, match=r"--out NEW.*another \(max_tokens 8, now 9; ") as e:
        Run.open(tmp_path, head(seed=1, max_tokens=9, question_ids=["q"]))
    assert str(e.value).endswith("; seed 0, now 1; other question_ids)")
    with pytest.raises(InvalidArgument, match=r"\(system none, now Be brief\.\)"):
        Run.open(tmp_path, head(system="Be brief."))
    with pytest.raises(InvalidArgument, match=r"\(other settings\)"):
        Run.open(tmp_path, head(settings=(NONE,)))


def test_a_run_written_by_two_processes_at_once_is_refused(tmp_path: Path) -> None:
    for run in [Run.open(tmp_path, head()), Run.open(tmp_path, head())]:
        run.part(SHEET, "a", measured)
    for read in (Run.read, lambda folder: Run.open(folder, head())):
        with pytest.raises(InvalidArgument, match="two processes"):
            read(tmp_path)


@pytest.mark.parametrize("name", ["run.json", "results.json", "cells.json", "study.json"])
def test_what_an_older_version_measured_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(InvalidArgument, match=r"version 0\.1 reads this"):
            Run.read(path)
    with pytest.raises(InvalidArgument, match=r"version 0\.1 reads this"):
        Run.open(tmp_path, head())


def test_a_file_or_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("x")
    with pytest.raises(InvalidArgument, match="out="):
        Run.open(occupied, head())
    (tmp_path / "head.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="out="):
        Run.open(tmp_path, head())
    with pytest.raises(InvalidArgument, match="No such file"):
        Run.read(tmp_path / "none")


def test_a_compact_file_has_all_but_texts(tmp_path: Path) -> None:
    told = observation(OTBV, "q0", forwards=3, committed=7, decode_seconds=1.23456789, texts=("a",))
    run = run_of([told, *observations(NONE, (8, 8, 8.0))])
    path = tmp_path / "run.json.gz"
    path = tmp_path / "kept.json"
    path.write_bytes(run.compact())
    read = Run.read(path)
    assert read.head == run.head
    first, second = read.observations(SHEET)
    assert first.texts == ()
    assert first.sums["seconds"] == 1.234568
    assert second == run.observations(SHEET)[1]
    assert read.compact() == run.compact()


def test_content_is_read_or_refused_by_the_name_a_user_gave(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(msgspec.json.encode(measured()[0]))
    found = read_json(path, Observation, argument="file", expected="an observation")
    assert found == measured()[0]
    for content in (b"[", b"\xff", b"[1]"):
        path.write_bytes(content)
        with pytest.raises(InvalidArgument, match=r"file='.*a\.json': expected an observation \("):
            read_json(path, Observation, argument="file", expected="an observation")
