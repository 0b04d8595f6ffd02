"""What options of several commands mean together."""

import io
from pathlib import Path

import pytest
from support.cli import run

from eaglegbv.cli.options import QUESTION_SETS, fitting_paths
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.questions import SUITES


def test_as_many_paths_as_a_verifier_takes() -> None:
    assert fitting_paths("otbv", 5) == 5
    assert fitting_paths("block", 5) == 1
    assert fitting_paths("greedy_block", 5) == 1
    assert fitting_paths("none", 5) == 5
    with pytest.raises(InvalidArgument, match="verifier"):
        fitting_paths("nothing", 5)


def test_help_names_every_set_of_questions() -> None:
    assert set(QUESTION_SETS.replace(" or ", ", ").split(", ")) == set(SUITES)


def test_files_that_cannot_be_written_are_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "no" / "file.json")
    for command, option in (
        (("bench", "batch"), "out"),
        (("bench", "step"), "out"),
        (("generate", "--prompt", "a"), "trace"),
    ):
        result = run(capsys, *command, f"--{option}", missing)
        assert result.status != 0
        assert f"{option}='{missing}': expected a file in a folder" in result.err
        assert not result.out


def test_standard_input_that_is_no_text_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abc\xff")))
    result = run(capsys, "generate", "--prompt-file", "-")
    assert result.status != 0
    assert "prompt-file='-': expected a readable file" in result.err
