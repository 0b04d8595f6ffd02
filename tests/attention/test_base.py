"""What a packed batch says of its segments."""

import torch

from eaglegbv.attention.base import Segment, pack


def text(context: int, count: int) -> Segment:
    slots = torch.arange(context + count)
    return Segment.causal(torch.zeros(count, dtype=torch.int64), slots[:context], slots[context:])


def test_a_window_that_no_text_is_longer_than_is_none() -> None:
    batch = pack([text(3, 1), text(5, 2)])
    found = [batch.effective_window(window) for window in (None, 1, 6, 7, 8)]
    assert found == [None, 1, 6, None, None]
