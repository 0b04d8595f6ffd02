"""Progress of a run: beside the bar stands the setting that ran last, and no other."""

import io
import sys

import pytest
from support.runs import NONE, OTBV, record, run_settings

from eaglegbv.cli.measuring import progress


class Terminal(io.StringIO):
    """Standard error that is a terminal, or is not."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_for_a_terminal_and_shows_what_ran_last(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    shown = Terminal(terminal=terminal)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("COLUMNS", "200")
    with progress(run_settings()) as show:
        for setting, committed in ((NONE, 10), (OTBV, 25)):
            show(record(setting, "q0", 0, forwards=10, committed=committed, decode_seconds=1.0))
        show(record(NONE, "q1", 0, forwards=1, committed=1, decode_seconds=1.0, error="broke off"))
    last = shown.getvalue().split("\r")[-1]
    assert ("none: 1.00 tokens/forward, 10 tokens/s" in last) is terminal
    assert "otbv" not in last
    assert bool(shown.getvalue()) is terminal
