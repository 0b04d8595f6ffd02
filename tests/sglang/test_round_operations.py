"""What a round costs outside graphs: operations to launch, and time on the host.

Each operation is a launch on a GPU, where one more copies the random numbers there. Views and
allocations launch nothing and are left out, as are SGLang's own operations. Run as a script, with
VERIFIER K L [greedy], it lists them.
"""

import sys
import time
from functools import partial
from typing import Any

import pytest
import torch
from support.sglang_batch import Req, kernel_arguments, sampling
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from eaglegbv.backends.sglang import verify
from eaglegbv.backends.sglang.tree_layout import RoundBuffers
from eaglegbv.backends.sglang.verify import Acceptance, GraphJudge, RequestBook, Round, verifying
from eaglegbv.config import Plan
from eaglegbv.cuda_graphs import Recorder, Work

MOST = 40
VOCAB, DRAFT_VOCAB, WIDTH = 64, 48, 16


class EagerOperations(TorchDispatchMode, Recorder):
    """Notes each operation with the part of the round in which it ran, but for those of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.part = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        aliases = [result.alias_info for result in func._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in aliases)
        if not (view or name.startswith(("aten.empty", "aten.new_empty"))):
            self.found.append((self.part, name))
        return func(*args, **(kwargs or {}))

    def record(self, work: Work) -> Work:
        """Leave out what a graph replays."""
        return _disable_current_modes()(work)


def round_operations(
    verifier: str, paths: int, length: int, *, greedy: bool = False, batch: int = 5
) -> list[tuple[str, str]]:
    """Return part and name of each operation of a round."""
    plan = Plan(verifier=verifier, paths=paths, depth=length)
    operations = EagerOperations()
    nodes = paths * length + 1
    book, requests = RequestBook(plan, 0), [Req() for _ in range(batch)]
    target_ids = torch.arange(DRAFT_VOCAB) + VOCAB - DRAFT_VOCAB
    buffers = RoundBuffers(8, 8, book.numbers, WIDTH, target_ids=target_ids)
    judge = GraphJudge(plan, buffers, torch.zeros(8 * nodes, VOCAB))
    judge.record(operations)
    settings = sampling(torch.ones(batch, 1), torch.arange(batch) < 2 if greedy else None)
    slots, head = torch.arange(batch), torch.randn(batch * paths, DRAFT_VOCAB)
    given = kernel_arguments(torch.zeros(batch, nodes).long(), length)
    logits, temperatures = torch.randn(batch * nodes, VOCAB), torch.ones(batch * nodes, 1)
    sample = partial(verify.sample, lambda **_: None, walk=lambda **_: None)
    with operations:
        operations.part = "drafting"
        buffers.load(book.uniforms(requests), settings)
        with _disable_current_modes():
            (*_, tokens), drafted = buffers.grow(slots, paths, length, lambda _: head)
            tokens = torch.cat((torch.ones(batch, 1).long(), tokens), dim=1)
        operations.part = "verification"

        def accept(probs: Tensor) -> Acceptance:
            return judge.accept(tokens, drafted, probs)

        with verifying(Round(accept, judge.space(batch), settings)):
            target = verify.in_place_softmax(lambda *_: logits, logits, temperatures)
            sample(**given, target_probs=target.view(batch, nodes, -1))
        book.advance(requests)
        operations.part = "the next round's roots"
        buffers.keep_roots(slots, head[:batch])
    return operations.found


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


if __name__ == "__main__":
    name, K, L, *rest = sys.argv[1:]
    listed = round_operations(name, int(K), int(L), greedy="greedy" in rest)
    lines = [f"{part:24}{operation}" for part, operation in listed]
    sys.stdout.write("\n".join((*lines, f"{len(lines)} operations\n")))
