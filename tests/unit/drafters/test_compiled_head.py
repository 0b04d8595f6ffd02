"""A compiled head computes what the plain one does, for any number of rows.

As with targets the compiler's front end is what can go wrong, so its graphs are run as they are.
"""

import copy
from collections.abc import Sequence

import pytest
import torch
from support.drafting import HEAD_DIM, KV_HEADS, Pair, random_pair
from torch import Tensor
from torch._dynamo.config import patch

from eaglegbv.attention.base import Segment
from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.attention.torch import TorchPagedAttention
from eaglegbv.drafters.eagle_model import Arch, HeadForward

SLOTS = 1100
"""More than the positions whose angles are known from the start."""


def pool() -> KVPool:
    return KVPool(1, SLOTS, KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))


def forward(pair: Pair, backend: str | None) -> HeadForward:
    head = copy.deepcopy(pair.head)
    attention = TorchPagedAttention(pool())
    return HeadForward(head, attention, compile_backend=backend)


def results(head: HeadForward, pair: Pair, *, lengths: Sequence[int]) -> list[Tensor]:
    """Read a text, then go on from it by several numbers of rows, of one text and of two."""
    generator = torch.Generator().manual_seed(4)
    found: list[Tensor] = []
    for length in lengths:
        slots = torch.randperm(SLOTS, generator=generator)
        features = torch.randn((length, pair.head.config.feature_size), generator=generator)
        tokens = torch.arange(length) % 7
        text = Segment.causal(tokens, slots[:0], slots[:length])
        hidden = head.read([text], features)[-1:]
        found.append(hidden)
        used = length
        for rows in (1, 3, 1, 2):
            new = slots[used : used + rows]
            segments = [Segment.causal(torch.arange(rows), slots[:used], new)]
            above = hidden.repeat(rows, 1)
            if rows == 2:  # two texts, one of them a single token
                segments.append(Segment.causal(torch.tensor([5]), slots[:0], slots[-1:]))
                above = hidden.repeat(3, 1)
            found += head.go_on(segments, above)
            found.append(head.logits(above))
            used += rows
    return found


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations
@pytest.mark.parametrize("arch", Arch)
@torch.inference_mode()
def test_compiled_rows_equal_plain_ones(arch: Arch) -> None:
    pair = random_pair(arch)
    plain = results(forward(pair, None), pair, lengths=(6, 1050))
    compiled = forward(pair, "eager")
    with patch(error_on_recompile=True):  # one row and any number: all there is, from the start
        ours = results(compiled, pair, lengths=(6, 1050))
    for own, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(own, expected)
