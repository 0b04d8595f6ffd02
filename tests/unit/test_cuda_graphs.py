"""Captures hold, and what fails in them is named; CUDA itself is a stand-in here."""

import gc
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from eaglegbv.cuda_graphs import (
    REPLAYED,
    CudaRecorder,
    GraphMode,
    NotRecordable,
    Outcomes,
    make_recorder,
)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of captures that were made."""
    made: list[dict[str, Any]] = []

    def graph(graph: Mock, **how: Any) -> nullcontext[None]:
        made.append(how)
        return nullcontext()

    for name, stand in {
        "Stream": Mock,
        "current_stream": Mock,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": Mock,
        "graph": graph,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand)
    return made


def test_captures_leave_other_threads_alone_and_collect_no_garbage(captures, monkeypatch):
    collected: list[int] = []
    collecting: list[tuple[bool, int]] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(len(collecting)))

    def work() -> tuple[Tensor, ...]:
        collecting.append((gc.isenabled(), len(collected)))
        return (torch.ones(2),)

    recorder = CudaRecorder()
    [result] = recorder.record(work)()
    assert torch.equal(result, torch.ones(2))
    # Twice outside, then once in the capture: behind the collection, with none to come.
    assert collecting == [(True, 0), (True, 0), (False, 1)]
    assert gc.isenabled()
    [how] = captures
    assert how.pop("stream") is not None
    assert how == {"pool": None, "capture_error_mode": "thread_local"}


def test_all_captures_share_a_stream_with_their_warm_ups_and_memory(captures, monkeypatch):
    warmed: list[Any] = []

    def on(stream: Any) -> nullcontext[None]:
        warmed.append(stream)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Mock(pool=lambda: "memory"))
    recorder = CudaRecorder()
    for _ in range(3):
        recorder.record(lambda: (torch.ones(2),))
    streams = {id(how["stream"]) for how in captures}
    # The other stream is the one that is current, from which a capture starts.
    assert streams == {id(stream) for stream in warmed[::2]}
    assert len(streams) == 1
    assert [how["pool"] for how in captures] == [None, "memory", "memory"]


def test_a_drafter_records_with_its_targets_recorder():
    shared = CudaRecorder()
    how: dict[str, Any] = {"cuda": True, "recordable": True, "shared": shared}
    assert make_recorder(GraphMode.AUTO, **how) is shared
    assert make_recorder(GraphMode.OFF, **how) is None
    assert make_recorder(GraphMode.AUTO, **{**how, "recordable": False}) is None
    assert make_recorder(GraphMode.EAGER, **how) is not shared


def test_what_cannot_be_recorded_is_named_and_told_once(captures, caplog):
    def waits() -> tuple[Tensor, ...]:
        # On a device the error is that of waiting; here it is another one.
        return (torch.ones(2).add(1).dot(torch.ones(3)),)

    recorder = CudaRecorder()
    for _ in range(2):
        with pytest.raises(NotRecordable) as refused:
            recorder.record(waits)
        assert refused.value.reason == "not recordable: aten.dot.default"
    assert [r.getMessage().split(";")[0] for r in caplog.records] == [refused.value.reason]
    assert captures == []


def test_what_runs_eagerly_is_counted_and_logged_once(caplog):
    counts = Outcomes()
    for outcome in (REPLAYED, "prefill", "too many rows", "too many rows", "shape"):
        counts.note("forwards", outcome)
    assert counts == {REPLAYED: 1, "prefill": 1, "too many rows": 2, "shape": 1}
    assert caplog.messages == ["forwards run eagerly: too many rows", "forwards run eagerly: shape"]
