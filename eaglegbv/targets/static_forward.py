"""Forwards of draft trees by buckets: padded to fixed sizes, recorded once, replayed.

    rows      [ tree | tree | ... ][ padding ]
    requests    0      1             one-row padding requests; the last takes all remaining rows

Rows that pad write to a scratch slot behind those of the allocator, and see themselves alone. So
nothing that a request holds is touched, and nothing of it depends on how it was padded, but for
rounding: products of more rows may add up in another order.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eaglegbv.attention.base import (
    PackedBatch,
    PagedAttention,
    Segment,
    StaticAttention,
    joined,
    offsets_of,
)
from eaglegbv.graphs import MAX_ROWS, REPLAYED, Bucket, NotRecordable, Recorder, Work
from eaglegbv.targets.base import TargetOutput

Run = Callable[[PackedBatch, PagedAttention], TargetOutput]


class StaticForward:
    """Forwards of trees over static buffers, one recording for each bucket that occurs.

    Attributes:
        counts: Forwards by what became of them: ``replayed``, or why they ran as they are.
    """

    def __init__(
        self,
        run: Run,
        attention: PagedAttention,
        recorder: Recorder,
        *,
        scratch_slot: int,
        max_context: int,
        device: torch.device,
    ) -> None:
        """Begin with nothing recorded.

        Args:
            run: The forward, with logits of all rows.
            attention: What it attends with, over a pool that has the scratch slot.
            recorder: Makes work repeatable.
            scratch_slot: A slot nobody owns.
            max_context: Most positions of a text.
            device: Where the model is.
        """
        self.counts: Counter[str] = Counter()
        self._run = run
        self._attention = attention
        self._recorder = recorder
        self._scratch_slot = scratch_slot
        self._max_context = max_context
        self._device = device
        self._recorded: dict[Bucket, _Recorded] = {}
        self._results: _Results | None = None
        self._refused: dict[Bucket, str] = {}

    def forward(self, segments: Sequence[Segment]) -> TargetOutput | None:
        """Score the segments' new tokens; None where they have to run as they are.

        The result is overwritten by the next forward.
        """
        rows = sum(segment.num_new for segment in segments)
        bucket = Bucket.holding(len(segments), rows)
        if any(segment.visible is None for segment in segments):
            self.counts["prefill"] += 1
        elif bucket is None:
            self.counts["too many rows"] += 1
        elif bucket in self._refused:
            self.counts[self._refused[bucket]] += 1
        else:
            try:
                found = self._replay(bucket, segments)
            except NotRecordable as obstacle:
                self._refused[bucket] = obstacle.reason
                self.counts[obstacle.reason] += 1
                return None
            self.counts[REPLAYED] += 1
            return found.first(rows)
        return None

    def _replay(self, bucket: Bucket, segments: Sequence[Segment]) -> "_Results":
        padded = [*segments, *self._pads(bucket, segments)]
        recorded = self._recorded.get(bucket)
        if recorded is None:
            attention = self._attention.static(bucket, max_context=self._max_context)
            recorded = _Recorded(bucket, attention, self._device)
            recorded.load(padded)
            if self._results is None:
                self._results = _Results.like(self._run(recorded.batch, attention))
            recorded.replay = self._recorder.record(self._work(recorded, self._results))
            self._recorded[bucket] = recorded
        else:
            recorded.load(padded)
        recorded.replay()
        assert self._results is not None  # made with the first recording
        return self._results

    def _work(self, recorded: "_Recorded", results: "_Results") -> Work:
        def work() -> tuple[Tensor, ...]:
            results.take(self._run(recorded.batch, recorded.attention))
            return ()

        return work

    def _pads(self, bucket: Bucket, segments: Sequence[Segment]) -> list[Segment]:
        """Return the requests that fill a bucket up."""
        spare = bucket.rows - sum(segment.num_new for segment in segments)
        lone = bucket.requests - len(segments)
        return [self._pad(1)] * lone + [self._pad(spare - lone)]

    def _pad(self, rows: int) -> Segment:
        zeros = torch.zeros(rows, dtype=torch.int64)
        slots = torch.full_like(zeros, self._scratch_slot)
        return Segment(zeros, zeros, zeros[:0], slots, zeros, torch.eye(rows, dtype=torch.bool))


class _Recorded:
    """Static buffers of a bucket, and what computes over them."""

    def __init__(self, bucket: Bucket, attention: StaticAttention, device: torch.device) -> None:
        self.attention = attention
        self.batch: PackedBatch
        self.replay: Work
        with torch.inference_mode(mode=False):
            self._token_ids, self._positions, self._slots = (
                torch.zeros(bucket.rows, dtype=torch.int64, device=device) for _ in range(3)
            )

    def load(self, segments: Sequence[Segment]) -> None:
        """Copy a step's numbers into the buffers, and plan its attention."""
        for buffer, parts in (
            (self._token_ids, [segment.token_ids for segment in segments]),
            (self._positions, [segment.positions for segment in segments]),
            (self._slots, [segment.new_slots for segment in segments]),
        ):
            buffer.copy_(joined(parts, buffer.device))
        offsets = offsets_of(segment.num_new for segment in segments)
        buffers = (self._token_ids, self._positions, self._slots)
        self.batch = PackedBatch(tuple(segments), offsets, *buffers)
        self.attention.plan(self.batch)


class _Results:
    """Where all buckets leave their results: one of the largest size."""

    def __init__(self, logits: Tensor, features: Tensor | None) -> None:
        self._logits = logits
        self._features = features

    @classmethod
    def like(cls, output: TargetOutput) -> "_Results":
        """Make room for results of the largest bucket of the same kind."""

        def room(rows: Tensor) -> Tensor:
            return rows.new_empty((MAX_ROWS, *rows.shape[1:]))

        with torch.inference_mode(mode=False):
            features = None if output.features is None else room(output.features)
            return cls(room(output.logits), features)

    def take(self, output: TargetOutput) -> None:
        """Copy a forward's results here."""
        rows = len(output.logits)
        self._logits[:rows].copy_(output.logits)
        if self._features is not None and output.features is not None:
            self._features[:rows].copy_(output.features)

    def first(self, rows: int) -> TargetOutput:
        """Return the first rows, where they lie."""
        features = None if self._features is None else self._features[:rows]
        return TargetOutput(self._logits[:rows], features)
