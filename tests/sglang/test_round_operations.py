"""What a round costs outside graphs: operations to launch, and time on the host."""

import time

import pytest
import torch
from support.sglang_batch import Req, sampling
from support.sglang_round import round_operations

from eaglegbv.backends.sglang.tree_layout import RoundBuffers
from eaglegbv.backends.sglang.verify import RequestBook
from eaglegbv.config import Plan

MOST = 40


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(
    ("verifier", "K"), [("otbv", 3), ("gbv", 3), ("block", 1), ("token", 1), ("traversal", 3)]
)
def test_a_round_launches_few_operations(verifier, K, greedy):
    found = round_operations(verifier, K, 4, greedy=greedy)
    assert {part for part, _ in found} == {"drafting", "verification", "the next round's roots"}
    assert len(found) <= MOST, "\n".join(f"{part}: {name}" for part, name in found)


def test_random_numbers_and_bookkeeping_take_a_millisecond_of_the_host():
    batch = 48
    book, requests = RequestBook(Plan(paths=3, depth=4), 0), [Req() for _ in range(batch)]
    buffers = RoundBuffers(batch, batch, book.numbers, 4)
    settings = sampling(torch.ones(batch, 1), None)
    book.of(requests)
    took = []
    for _ in range(50):
        start = time.thread_time()
        buffers.load(book.uniforms(requests), settings)
        book.advance(requests)
        took.append(time.thread_time() - start)
    assert min(took) < 1e-3, min(took)
