"""The command line, run in this process."""

from dataclasses import dataclass

import pytest

from eaglegbv.cli.main import main


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Result:
    """Run ``eaglegbv`` with these arguments."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    captured = capsys.readouterr()
    code = exit_.value.code
    return Result(code if isinstance(code, int) else 0, captured.out, captured.err)
