"""A round on a GPU: what it launches in graphs, and kernels, interpreted, against tensor code."""

import math
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.launches import launches
from support.sglang_batch import sampling
from torch import Tensor

from eaglegbv.backends.sglang import rounds
from eaglegbv.backends.sglang.rounds import Acceptance, RoundBuffers, acceptance, numbers_of
from eaglegbv.backends.sglang.verify import GraphJudge
from eaglegbv.config import Plan
from eaglegbv.drafters import draft_probs, drawn_paths
from eaglegbv.verifiers import fused
from eaglegbv.verifiers.base import Verdict

pytest.importorskip("triton", reason="Triton, which runs the kernels, is not installed")
import eaglegbv.draft_kernels
import eaglegbv.kernels
from eaglegbv import sampling as warping
from eaglegbv.backends.sglang import kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # else interpreted
DRAFT, JUDGE = (
    ("warp_rows", "draw_children", "number_children"),
    ("judge_nodes", "judge_paths", "draw_corrections", "report_paths"),
)
KERNELS = {
    eaglegbv.kernels: ("warp_rows", *JUDGE[:3]),
    eaglegbv.draft_kernels: DRAFT[1:],
    kernels: JUDGE[3:],
}
BATCH, VOCAB = 4, 40
ROUNDING = 1e-14
MOST = 106  # recorded operations that draft at K = 3, L = 4, beside the head's own
MOST_TO_JUDGE = 12
SHAPES = ((3, 4), (1, 3), (3, 1), (1, 1), (2, 2), (5, 3))  # paths, length
PATHS = {"token": 1, "block": 1, "gbv": 3, "otbv": 3}  # of the rules that kernels judge by


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lists in the order of a GPU's top-k."""
    monkeypatch.setattr(draft_probs, "_most_likely", lambda logits, n: logits.topk(n).indices)
    monkeypatch.setattr(draft_probs, "takes_rows", lambda *_: False)
    with np.errstate(all="ignore"):  # what programs compute in masked lanes means nothing
        yield


def switch(patch: pytest.MonkeyPatch, *, on: bool) -> None:
    """Let kernels run here, whatever the device is, or tensor code."""
    for module in (rounds, fused, drawn_paths, warping):
        patch.setattr(module, "runs_kernels", lambda _: on)


class Round(NamedTuple):
    """What a round starts from, and its head's logits, which depend on the row alone."""

    buffers: RoundBuffers
    greedy: Tensor  # [batch] bool
    logits: list[Tensor]  # of each depth, [batch * paths, draft_vocab]


def round_of(
    paths: int,
    length: int,
    *,
    width: int = 7,
    draft_temperature: float = 1.0,
    mapped: bool = False,
    batch: int = BATCH,
    broken: bool = False,
    verifier: str = "otbv",
) -> Round:
    """Prepare a round; every other request is greedy."""
    generator = torch.Generator().manual_seed(17 * paths + length)

    def logits_of(rows: int) -> Tensor:
        logits = 2 * torch.randn(rows, VOCAB, generator=generator)
        logits[:, 5] = logits.logsumexp(1) + math.log(2)  # so that many paths begin alike
        if broken:
            logits[0::3, 9] = math.nan
        return logits.to(DEVICE)

    ids = torch.arange(VOCAB)
    if mapped:
        ids = torch.randperm(90, generator=generator)[:VOCAB]
    plan = Plan(
        verifier=verifier,
        paths=paths,
        depth=length,
        draft_width=width,
        draft_temperature=draft_temperature,
    )
    roots = torch.zeros(batch + 2, VOCAB, device=DEVICE)
    buffers = RoundBuffers(plan, batch + 2, roots, ids.to(DEVICE))
    uniforms = torch.rand(batch, numbers_of(plan), generator=generator).double()
    uniforms[:, 0] = 0
    uniforms[:, paths * length - 1] = 1 - 2**-53  # the last path's last
    greedy = (torch.arange(batch) % 2 == 1).to(DEVICE)
    temperatures = 0.25 + torch.rand(batch, 1, generator=generator)
    buffers.load(uniforms, sampling(temperatures.to(DEVICE), greedy))
    buffers.keep_roots(slots_of(batch), logits_of(batch))
    return Round(buffers, greedy, [logits_of(batch * paths) for _ in range(length - 1)])


def slots_of(batch: int) -> Tensor:
    """The requests' slots, which are in no order."""
    return torch.arange(batch + 1, 1, -1, device=DEVICE)


def grown(own: Round) -> list[Tensor]:
    """Grow the trees of a round; return what SGLang is told, and the trees."""
    logits = iter(own.logits)
    told = own.buffers.grow(slots_of(len(own.greedy)), lambda *_: next(logits))
    return [*told, *(table.clone() for table in own.buffers.tree.tensors.values())]


@pytest.mark.parametrize(("paths", "length"), SHAPES)
@pytest.mark.parametrize("case", ["plain", "mapped", "narrow", "whole", "broken"])
def test_trees_are_those_of_the_tensor_code(paths, length, case, monkeypatch):
    own = round_of(
        paths,
        length,
        mapped=case == "mapped",
        width={"narrow": 1, "whole": VOCAB}.get(case, 7),
        draft_temperature=1.7,
        broken=case == "broken",
    )
    switch(monkeypatch, on=False)
    expected = grown(own)
    switch(monkeypatch, on=True)
    with launches(KERNELS) as names:
        got = grown(own)
    assert names.count("draw_children") == length
    for table, same in zip(got, expected, strict=True):
        torch.testing.assert_close(table, same, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize(("paths", "length"), SHAPES)
def test_a_kernel_reports_what_the_tensor_code_does(paths, length, monkeypatch):
    """Every path of a tree, accepted down to each of its depths."""
    own = round_of(paths, length)
    switch(monkeypatch, on=False)
    grown(own)
    tree = own.buffers.tree.mapped(lambda tensor: tensor[:BATCH])
    for path in range(paths):
        accepted = (torch.arange(BATCH, device=DEVICE) + path) % (length + 1)
        last = 100 + torch.arange(BATCH, device=DEVICE)
        verdict = Verdict(tree.draws[:, :, path], accepted, last)
        reports: list[Acceptance] = []
        for on in (False, True):
            switch(monkeypatch, on=on)
            reports.append(acceptance(verdict, tree))
        for built, value in zip(*reports, strict=True):
            assert built.dtype == value.dtype
            assert torch.equal(built, value)


def judge_of(verifier: str, batch: int) -> GraphJudge:
    """A judge of rounds whose buffers hold those of a batch."""
    own = round_of(PATHS[verifier], 3, batch=batch, verifier=verifier)
    grown(own)
    generator = torch.Generator().manual_seed(3)
    probs = torch.rand((batch * own.buffers.tree.nodes, VOCAB), generator=generator)
    return GraphJudge(own.buffers, probs.to(DEVICE), batch)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("verifier", PATHS)
def test_a_round_is_judged_in_few_launches(verifier, batch, monkeypatch):
    judge = judge_of(verifier, batch)
    switch(monkeypatch, on=True)
    with launches(KERNELS) as names:
        got = judge._judge(batch)
    assert [name for name in names if "." not in name] == [*JUDGE]
    assert len(names) <= MOST_TO_JUDGE, "\n".join(names)
    switch(monkeypatch, on=False)
    for judged, expected in zip(got, judge._judge(batch), strict=True):
        assert torch.equal(judged, expected)


def drafting(batch: int, patch: pytest.MonkeyPatch, *, on: bool) -> list[str]:
    """What a worker's ``draft_forward`` launches at K = 3, L = 4, but for the head's forwards."""
    own = round_of(3, 4, mapped=True, batch=batch)
    switch(patch, on=on)
    with launches(KERNELS) as names:
        grown(own)
    clones = len(own.buffers.tree.tensors)
    return names[:-clones]


@pytest.mark.parametrize("batch", [1, 8])
def test_a_round_is_drafted_in_few_launches(batch, monkeypatch):
    names = drafting(batch, monkeypatch, on=True)
    assert [name for name in names if name in DRAFT] == [*DRAFT] * 4
    assert len(names) <= MOST, "\n".join(names)


if __name__ == "__main__":  # lists what a round launches, by kernels and by tensor code
    for on in (True, False):
        with pytest.MonkeyPatch.context() as patched:
            listed = drafting(8, patched, on=on)
        code = "kernels" if on else "tensor code"
        sys.stdout.write(f"{code}: {len(listed)}\n{' '.join(listed)}\n")
