"""What a packed batch says of its segments."""

import torch

from eaglegbv.attention.base import Segment, offsets_of, pack


def text(context: int, count: int) -> Segment:
    slots = torch.arange(context + count)
    return Segment.causal(torch.zeros(count, dtype=torch.int64), slots[:context], slots[context:])


def test_a_window_that_no_text_is_longer_than_is_none() -> None:
    batch = pack([text(3, 1), text(5, 2)])
    found = [batch.effective_window(window) for window in (None, 1, 6, 7, 8)]
    assert found == [None, 1, 6, None, None]


def test_offsets_are_where_parts_begin_and_the_last_ends() -> None:
    assert offsets_of([3, 0, 2]) == (0, 3, 3, 5)
    assert offsets_of([]) == (0,)
    assert pack([text(3, 1), text(5, 2)]).offsets == (0, 1, 3)
