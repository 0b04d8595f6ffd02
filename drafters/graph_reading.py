"""An EAGLE head's forward on the features of committed tokens, recorded once and replayed.

It runs in every step, between what the host learns of the last one and the next draft, so that the
device would wait for each of its launches.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from operator import methodcaller

import torch
from torch import Tensor

from eaglegbv.attention import Segment, StaticBatch
from eaglegbv.cuda_graphs import Bucket, NotRecordable, Recorder, Recordings, Work
from eaglegbv.drafters.eagle_model import EagleHead, HeadForward
from eaglegbv.utils import power_of_two


class DeviceReading:
    """Forwards of a head on true features by replayed recordings.

    Attributes:
        counts: Forwards by outcome: ``replayed``, or the reason why they were not.
    """

    def __init__(
        self, head: EagleHead, forward: HeadForward, recorder: Recorder, *, max_context: int
    ) -> None:
        """Begin with nothing recorded; the last slot of the pool of ``forward`` is nobody's."""
        self._recordings = Recordings[Bucket, _Reading]("catch-ups", recorder, _Reading.work)
        self.counts = self._recordings.counts
        self._make = partial(_Reading, head, forward, max_context)

    def read(
        self, segments: Sequence[Segment], features: Sequence[Tensor], most: int
    ) -> Tensor | None:
        """Return the head's output ``[requests, hidden]`` at each segment's last row.

        ``features`` ``[rows, F]`` together are those of the rows. The result is None where they
        have to be run as they are, as where a segment has more than ``most`` rows.
        """
        sizes = [segment.num_new for segment in segments]
        bucket = _bucket(len(segments), most) or Bucket.holding(len(segments), sum(sizes))
        with self._recordings.counting():
            if max(sizes) > most:
                raise NotRecordable("prefill")
            if bucket is None:
                raise NotRecordable("too many rows")
            [hidden] = self._loaded(bucket, segments, features)()
            return hidden[: len(segments)].clone()  # other recordings overwrite it
        return None

    def record(self, requests: int, rows_each: int) -> None:
        """Record now what up to so many requests with up to so many rows each will need."""
        for count in Bucket.sizes(requests):
            bucket = _bucket(count, rows_each)
            if bucket is not None and bucket not in self._recordings:
                with suppress(NotRecordable):
                    self._loaded(bucket, [], [])

    def _loaded(
        self, bucket: Bucket, segments: Sequence[Segment], features: Sequence[Tensor]
    ) -> Work:
        load = methodcaller("load", segments, features)
        return self._recordings.loaded(bucket, self._make, load)


def _bucket(requests: int, most: int) -> Bucket | None:
    """Return the bucket of a batch with up to ``most`` rows each, None if there is none.

    How many rows a step commits is chance: a bucket for each number would be recorded time and
    again, and rows of one layer cost next to nothing.
    """
    padded = power_of_two(requests)
    return Bucket.holding(padded, padded * most)


class _Reading:
    """Static buffers of a bucket, and the forward over them."""

    def __init__(
        self, head: EagleHead, forward: HeadForward, max_context: int, bucket: Bucket
    ) -> None:
        pool = forward.attention.pool
        self._forward = forward
        self._batch = StaticBatch(
            bucket, forward.attention, max_context=max_context, scratch_slot=pool.num_slots - 1
        )
        with torch.inference_mode(mode=False):
            width = head.config.feature_size
            self._features = pool.keys.new_zeros((bucket.rows, width))
            self._ends = torch.zeros(bucket.requests, dtype=torch.int64, device=pool.keys.device)

    def load(self, segments: Sequence[Segment], features: Sequence[Tensor]) -> None:
        """Copy a step's inputs into the buffers, and plan attention."""
        self._batch.load(segments)
        ends = torch.tensor(self._batch.batch.offsets[1 : len(self._ends) + 1]) - 1
        self._ends.copy_(ends, non_blocking=True)
        if features:
            parts = torch.cat(list(features))
            self._features[: len(parts)].copy_(parts)

    def work(self) -> tuple[Tensor, ...]:
        """Run the rows, and return the output at the last of each request."""
        hidden = self._forward.read_batch(self._batch.batch, self._features, self._batch.attend)
        return (hidden.index_select(0, self._ends),)
