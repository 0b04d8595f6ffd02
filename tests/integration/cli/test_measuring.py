"""Progress: a bar on a terminal, with what ran last; elsewhere lines, so that logs show it."""

import io
import sys

import pytest
from support.runs import NONE, OTBV, record, run_settings

from eaglegbv.cli import options
from eaglegbv.cli.bench import _watched
from eaglegbv.eval.records import Record


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_what_is_done_and_how_it_goes(monkeypatch, terminal, seconds):
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(options, "LINE_SECONDS", seconds)
    monkeypatch.setenv("COLUMNS", "200")
    kept: list[Record] = []
    with _watched(run_settings(), kept.append) as show:
        for setting, committed in ((NONE, 10), (OTBV, 25)):
            show(record(setting, "q0", 0, forwards=10, committed=committed, decode_seconds=1.0))
        show(record(NONE, "q1", 0, forwards=1, committed=1, decode_seconds=1.0, error="broke off"))
    assert len(kept) == 3
    text = shown.getvalue()
    figures = "none: 1.00 tokens/forward, 10 tokens/s"
    if terminal:
        last = text.split("\r")[-1]
        assert figures in last
        assert "otbv" not in last
    else:
        lines = text.splitlines()
        assert len(lines) == (3 if seconds == 0 else 0)
        assert all("/12 conversations, about " in line for line in lines)
        assert [line.rpartition("; ")[2] for line in lines[::2]] == [figures, figures][: len(lines)]
