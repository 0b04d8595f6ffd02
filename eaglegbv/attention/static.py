"""Batches of fixed sizes over a paged pool, whose forwards can be recorded.

    rows      [ tree | tree | ... ][ padding ]
    requests    0      1             one-row padding requests; the last takes all remaining rows

Padding rows write to a scratch slot after those of the allocator, and see only themselves. So they
touch nothing that a request holds, and a request's results do not depend on its padding, except for
rounding: products of more rows may be summed in another order.
"""

from collections.abc import Sequence
from functools import partial

import torch

from eaglegbv.attention.base import (
    Attend,
    PackedBatch,
    PagedAttention,
    Segment,
    joined,
    offsets_of,
)
from eaglegbv.cuda_graphs import Bucket


class StaticBatch:
    """Static buffers of a bucket, and the attention that uses them."""

    def __init__(
        self, bucket: Bucket, attention: PagedAttention, *, max_context: int, scratch_slot: int
    ) -> None:
        """Make the buffers; sequences have ``max_context`` positions at most."""
        self._bucket = bucket
        self._scratch_slot = scratch_slot
        self._pads: dict[tuple[int, torch.device], Segment] = {}
        self._attention = attention.static(bucket, max_context=max_context)
        self.batch: PackedBatch
        device = attention.pool.keys.device
        with torch.inference_mode(mode=False):
            self._token_ids, self._positions, self._slots = (
                torch.zeros(bucket.rows, dtype=torch.int64, device=device) for _ in range(3)
            )

    @property
    def attend(self) -> Attend:
        """Attention over the batch."""
        return partial(self._attention.attend, batch=self.batch)

    def load(self, segments: Sequence[Segment]) -> None:
        """Copy a step's inputs into the buffers, padded, and plan its attention."""
        segments = self._padded(segments)
        buffers = (self._token_ids, self._positions, self._slots)
        parts = zip(*((s.token_ids, s.positions, s.new_slots) for s in segments), strict=True)
        for buffer, parts_of_buffer in zip(buffers, parts, strict=True):
            buffer.copy_(joined(parts_of_buffer, buffer.device), non_blocking=True)
        offsets = offsets_of(segment.num_new for segment in segments)
        self.batch = PackedBatch(tuple(segments), offsets, *buffers)
        self._attention.plan(self.batch)

    def _padded(self, segments: Sequence[Segment]) -> list[Segment]:
        # Where the others are: parts of one place are joined and sent at once.
        device = segments[0].token_ids.device if segments else torch.device("cpu")
        spare = self._bucket.rows - sum(segment.num_new for segment in segments)
        lone = self._bucket.requests - len(segments)
        return [*segments, *[self._pad(1, device)] * lone, self._pad(spare - lone, device)]

    def _pad(self, rows: int, device: torch.device) -> Segment:
        if (rows, device) not in self._pads:
            zeros = torch.zeros(rows, dtype=torch.int64, device=device)
            slots = torch.full((rows,), self._scratch_slot)
            alone = torch.eye(rows, dtype=torch.bool, device=device)
            self._pads[rows, device] = Segment(zeros, zeros, slots[:0], slots, zeros, alone)
        return self._pads[rows, device]
