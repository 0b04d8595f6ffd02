"""Captures hold, and what fails in them is named; CUDA itself is a stand-in here."""

import gc
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from eaglegbv.cuda_graphs import REPLAYED, CudaRecorder, NotRecordable, Outcomes


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

    [result] = CudaRecorder().record(work)()
    assert torch.equal(result, torch.ones(2))
    # Twice outside, then once in the capture: behind the collection, with none to come.
    assert collecting == [(True, 0), (True, 0), (False, 1)]
    assert gc.isenabled()
    assert captures == [{"pool": None, "capture_error_mode": "thread_local"}]


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
