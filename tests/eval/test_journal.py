"""A journal is read as far as it is whole, and only its writer changes it."""

from pathlib import Path

import pytest

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.records import Journal
from eaglegbv.eval.statistics import Estimate

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
