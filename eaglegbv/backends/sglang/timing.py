"""Seconds of forwards of made rows, by which a server's plans are compared when it starts."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.eagle_info import EagleDraftInput
from torch import Tensor

from eaglegbv.cuda_graphs import NotRecordable, Recorder

ROWS = (1, 4, 16, 64, 256)
"""Rows of the forwards that are timed; times of others lie between."""
REPEATS = 5


class ForwardTimes:
    """Times of a model's forwards by their rows, apart from attention, each measured once."""

    def __init__(self, runner: Any, recorder: Recorder) -> None:
        """Time the model of one of SGLang's runners, recorded where its forwards are."""
        self._runner, self._recorder = runner, recorder
        self._times: list[float] = []

    def of(self, rows: int) -> float:
        """Return the seconds of a forward of ``rows``."""
        if not self._times:
            self._times = [self._measure(count) for count in ROWS]
        beyond = max(1.0, rows / ROWS[-1])  # as many times the largest
        return float(np.interp(rows, ROWS, self._times)) * beyond

    def _measure(self, rows: int) -> float:
        runner, null = self._runner, CaptureHiddenMode.NULL
        zeros = torch.zeros(rows, dtype=torch.int64, device=runner.device)
        spec_info = None
        if runner.is_draft_worker:
            size = runner.model_config.hidden_size
            hidden = torch.zeros((rows, size), dtype=runner.dtype, device=runner.device)
            spec_info = EagleDraftInput(hidden_states=hidden, capture_hidden_mode=null)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=rows,
            input_ids=zeros,
            req_pool_indices=zeros,
            seq_lens=zeros + 1,
            out_cache_loc=zeros,
            seq_lens_sum=rows,
            positions=zeros,
            spec_algorithm=runner.spec_algorithm,
            spec_info=spec_info,
            capture_hidden_mode=null,
        )

        def work() -> tuple[Tensor, ...]:
            with forward_context(ForwardContext(attn_backend=_NoAttention()), forward_batch=batch):
                return (runner.model.forward(zeros, zeros, batch).next_token_logits,)

        try:
            replay = self._recorder.record(work)
        except NotRecordable:
            replay = work
        return seconds_of(replay, runner.device)


def seconds_of(work: Callable[[], object], device: torch.device | str) -> float:
    """Return how long work takes, the median of a few times."""
    cuda = torch.device(device).type == "cuda"
    wait = partial(torch.cuda.synchronize, device) if cuda else partial(int, 0)
    times: list[float] = []
    for _ in range(1 + REPEATS):  # the first is a warm-up
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return median(times[1:])


class _NoAttention(AttentionBackend):  # type: ignore[misc]
    """Attention that takes no time."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, *_: Any, **__: Any) -> Tensor:
        """Return ``[rows, heads * dim]`` zeros."""
        del k, v
        return q.new_zeros((len(q), layer.tp_q_head_num * layer.v_head_dim))
