"""What a round costs outside graphs: operations to launch, and time on the host.

Each operation is a launch on a GPU. Views and allocations launch nothing and are left out, as are
SGLang's own operations. Run as a script, with VERIFIER K L [greedy], it lists them.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from support.launches import Operations
from support.sglang_batch import Req, sampling
from torch.utils._python_dispatch import _disable_current_modes

from eaglegbv.backends.sglang import verify
from eaglegbv.backends.sglang.book import RequestBook
from eaglegbv.backends.sglang.penalties import TokenCounts
from eaglegbv.backends.sglang.rounds import RoundBuffers, numbers_of
from eaglegbv.backends.sglang.verify import GraphJudge, TreeSampling
from eaglegbv.config import Plan
from eaglegbv.cuda_graphs import Recorder, Work

MOST = 15  # in a round with greedy requests, with all that turns logits into a verdict
MOST_TO_JUDGE = 11  # of these; a graph launches 12 more at most: see test_round_launches.py
# A graph launches what drafts: see test_round_launches.py.
VOCAB, DRAFT_VOCAB, WIDTH = 64, 48, 16


class EagerOperations(Operations, Recorder):
    """Notes each operation with the part of the round in which it ran, but for those of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Note what is launched within as a part of the round."""
        with self:
            yield
        self.found += [(name, operation) for operation in self.names]
        self.names.clear()

    def record(self, work: Work) -> Work:
        """Leave out what a graph replays."""
        return _disable_current_modes()(work)


def round_operations(
    verifier: str, paths: int, length: int, *, greedy: bool = False, batch: int = 5
) -> list[tuple[str, str]]:
    """Return part and name of each operation of a round."""
    plan = Plan(verifier=verifier, paths=paths, depth=length, draft_width=WIDTH)
    operations = EagerOperations()
    nodes = paths * length + 1
    book, requests = RequestBook(plan, 0), [Req() for _ in range(batch)]
    target_ids = torch.arange(DRAFT_VOCAB) + VOCAB - DRAFT_VOCAB
    buffers = RoundBuffers(plan, 8, torch.zeros(8, DRAFT_VOCAB), target_ids)
    judge = GraphJudge(buffers, torch.zeros(8 * nodes, VOCAB), 8)
    judge.record(operations)
    settings = sampling(torch.ones(batch, 1), torch.arange(batch) < 2 if greedy else None)
    slots, head = torch.arange(batch), torch.randn(batch * paths, DRAFT_VOCAB)
    drafted = SimpleNamespace(
        draft_token=torch.zeros(batch * nodes),
        draft_token_num=nodes,
        max_tree_depth=length + 1,
        **{f"retrieve_{name}": None for name in ("index", "next_token", "next_sibling")},
    )
    mode = SimpleNamespace(is_idle=lambda: False)
    round_ = SimpleNamespace(sampling_info=settings, forward_mode=mode)
    output = SimpleNamespace(next_token_logits=torch.randn(batch * nodes, VOCAB))
    with operations.part("drafting"):
        buffers.load(book.uniforms(requests, numbers_of(plan)), settings)
    buffers.grow(slots, lambda *_: head)  # in a graph
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "_share", lambda *_: None)
        sample = TreeSampling(Mock(), lambda **_: None, TokenCounts(VOCAB, "cpu"), judge)
        with operations.part("verification"):
            sample(drafted, round_, output)
            book.advance(requests)
    with operations.part("the next round's roots"):
        buffers.keep_roots(slots, head[:batch])
    return operations.found


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(
    ("verifier", "K"), [("otbv", 3), ("gbv", 3), ("block", 1), ("token", 1), ("traversal", 3)]
)
def test_a_round_launches_few_operations(verifier, K, greedy, batch):
    found = round_operations(verifier, K, 4, greedy=greedy, batch=batch)
    parts = Counter(part for part, _ in found)
    assert {*parts} == {"drafting", "verification", "the next round's roots"}
    listed = "\n".join(f"{part}: {name}" for part, name in found)
    assert len(found) <= MOST, listed
    assert parts["verification"] <= MOST_TO_JUDGE, listed


def test_random_numbers_and_bookkeeping_take_a_millisecond_of_the_host():
    batch = 48
    book, requests = RequestBook(Plan(paths=3, depth=4), 0), [Req() for _ in range(batch)]
    plan = Plan(paths=3, depth=4, draft_width=4)
    buffers = RoundBuffers(plan, batch, torch.zeros(batch, 9), torch.arange(9))
    settings = sampling(torch.ones(batch, 1), None)
    book.of(requests)
    took = []
    for _ in range(50):
        start = time.thread_time()
        buffers.load(book.uniforms(requests, 49), settings)
        book.advance(requests)
        took.append(time.thread_time() - start)
    assert min(took) < 1e-3, min(took)


if __name__ == "__main__":
    name, K, L, *rest = sys.argv[1:]
    listed = round_operations(name, int(K), int(L), greedy="greedy" in rest)
    lines = [f"{part:24}{operation}" for part, operation in listed]
    sys.stdout.write("\n".join((*lines, f"{len(lines)} operations\n")))
