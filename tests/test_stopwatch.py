"""Phases are timed one by one, by a clock that is set by hand."""

import time

import pytest

from eaglegbv.metrics import Phase, Span, Stopwatch


def test_a_stopwatch_adds_up_what_each_phase_takes(monkeypatch):
    ticks = iter([0.0, 0.0, 1.0, 10.0, 12.5, 20.0, 24.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    watch = Stopwatch()
    with watch.phase(Phase.DRAFT):
        pass
    with watch.phase(Phase.VERIFY):
        pass
    with watch.phase(Phase.DRAFT):
        pass
    assert watch.seconds == {Phase.DRAFT: 5.0, Phase.VERIFY: 2.5}


def test_a_stopwatch_counts_a_phase_that_fails(monkeypatch):
    ticks = iter([0.0, 0.0, 2.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    watch = Stopwatch()
    with pytest.raises(KeyError), watch.phase(Phase.COMMIT):
        raise KeyError
    assert watch.seconds == {Phase.COMMIT: 2.0}


def test_spans_stand_in_order_with_their_starts(monkeypatch):
    ticks = iter([5.0, 6.0, 8.0, 9.0, 9.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    watch = Stopwatch()
    with watch.phase(Phase.DRAFT):
        pass
    with watch.phase(Phase.VERIFY):
        pass
    assert watch.spans == [Span(Phase.DRAFT, 1.0, 2.0), Span(Phase.VERIFY, 4.0, 0.5)]
