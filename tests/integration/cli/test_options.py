"""What options of several commands mean together."""

from pathlib import Path

import pytest
from support.cli import run

from eaglegbv.cli.options import QUESTION_SETS
from eaglegbv.eval.questions import SUITES


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
