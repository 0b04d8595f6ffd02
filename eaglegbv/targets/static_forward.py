"""Forwards of draft trees by buckets: padded to fixed sizes, recorded once, replayed.

    rows      [ tree | tree | ... ][ padding ]
    requests    0      1             one-row padding requests; the last takes all remaining rows

Padding rows write to a scratch slot after those of the allocator, and see only themselves. So they
touch nothing that a request holds, and a request's results do not depend on its padding, except for
rounding: products of more rows may be summed in another order.
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
        counts: Number of forwards that were ``replayed``, or by the reason why they were not.
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
        """Start with nothing recorded.

        Args:
            run: The forward, with logits of all rows.
            attention: The attention it uses, over a pool that has the scratch slot.
            recorder: Records work for replay.
            scratch_slot: A slot without an owner.
            max_context: Most positions of a text.
            device: Device of the model.
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
        """Score the segments' new tokens; return None if they must run without a recording.

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
        """Return the padding requests that fill up a bucket."""
        spare = bucket.rows - sum(segment.num_new for segment in segments)
        lone = bucket.requests - len(segments)
        return [self._pad(1)] * lone + [self._pad(spare - lone)]

    def _pad(self, rows: int) -> Segment:
        zeros = torch.zeros(rows, dtype=torch.int64)
        slots = torch.full_like(zeros, self._scratch_slot)
        return Segment(zeros, zeros, zeros[:0], slots, zeros, torch.eye(rows, dtype=torch.bool))


class _Recorded:
    """Static buffers of a bucket, and the attention and recording that use them."""

    def __init__(self, bucket: Bucket, attention: StaticAttention, device: torch.device) -> None:
        self.attention = attention
        self.batch: PackedBatch
        self.replay: Work
        with torch.inference_mode(mode=False):
            self._token_ids, self._positions, self._slots = (
                torch.zeros(bucket.rows, dtype=torch.int64, device=device) for _ in range(3)
            )

    def load(self, segments: Sequence[Segment]) -> None:
        """Copy a step's inputs into the buffers, and plan its attention."""
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
    """Buffers of the largest size, in which the forwards of all buckets leave their results."""

    def __init__(self, logits: Tensor, features: Tensor | None) -> None:
        self._logits = logits
        self._features = features

    @classmethod
    def like(cls, output: TargetOutput) -> "_Results":
        """Make buffers for results like ``output``, as large as for the largest bucket."""

        def room(rows: Tensor) -> Tensor:
            return rows.new_empty((MAX_ROWS, *rows.shape[1:]))

        with torch.inference_mode(mode=False):
            features = None if output.features is None else room(output.features)
            return cls(room(output.logits), features)

    def take(self, output: TargetOutput) -> None:
        """Copy a forward's results into the buffers."""
        rows = len(output.logits)
        self._logits[:rows].copy_(output.logits)
        if self._features is not None and output.features is not None:
            self._features[:rows].copy_(output.features)

    def first(self, rows: int) -> TargetOutput:
        """Return the first rows, as views of the buffers."""
        features = None if self._features is None else self._features[:rows]
        return TargetOutput(self._logits[:rows], features)
