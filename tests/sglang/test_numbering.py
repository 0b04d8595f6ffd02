"""SGLang's numbers of nodes, to a draft tree and back: the kernels against the tensor code.

They compute whole numbers and copy probabilities, so every bit must agree.
"""

import sys

import pytest
import torch
from support.launches import launches
from torch import Tensor

from eaglegbv.backends.sglang import numbering
from eaglegbv.backends.sglang.numbering import acceptance, draft_tree
from eaglegbv.backends.sglang.tree_layout import RoundBuffers
from eaglegbv.backends.sglang.verify import GraphJudge
from eaglegbv.config import Plan
from eaglegbv.verifiers import fused
from eaglegbv.verifiers.base import Verdict

pytest.importorskip("triton", reason="Triton, which runs the kernels, is not installed")
import eaglegbv.kernels
from eaglegbv.backends.sglang import kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # else interpreted
JUDGES = ("judge_nodes", "judge_paths", "draw_corrections")
KERNELS = {kernels: ("number_nodes", "report_paths"), eaglegbv.kernels: JUDGES}
PATHS = {"token": 1, "block": 1, "gbv": 3, "otbv": 3}  # of the rules that kernels judge by
SHAPES = ((2, 3, 3), (1, 1, 1), (2, 1, 3), (1, 4, 1), (5, 2, 2))  # batch, paths, length
WIDTH = 5


def switch(patch: pytest.MonkeyPatch, *, on: bool) -> None:
    """Let kernels run here, whatever the device is, or tensor code."""
    for module in (numbering, fused):
        patch.setattr(module, "runs_kernels", lambda _: on)


def tokens_of(batch: int, paths: int, length: int) -> Tensor:
    """``[batch, nodes]``, of paths that often have equal prefixes."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 2, (batch, 1 + paths * length), generator=generator).to(DEVICE)


def packed_of(batch: int, paths: int, length: int) -> Tensor:
    """Distributions whose numbers are all different, packed."""
    shape = (batch, 1 + (length - 1) * paths, 2, WIDTH)
    count = torch.Size(shape).numel()
    packed = torch.arange(1, count + 1, dtype=torch.float64).view(shape)
    packed[:, :, 1] /= count
    return packed.to(DEVICE)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_kernel_builds_the_tree_of_the_tensor_code(shape, monkeypatch):
    tokens, packed = tokens_of(*shape), packed_of(*shape)
    switch(monkeypatch, on=False)
    expected = draft_tree(tokens, packed, shape[1])
    switch(monkeypatch, on=True)
    got = draft_tree(tokens, packed, shape[1])
    assert torch.equal(got.rows, expected.rows)
    for name, value in expected.tree.tensors.items():
        built = got.tree.tensors[name]
        assert built.dtype == value.dtype, name
        assert torch.equal(built, value), name
    assert got.tree.columns
    assert got.tree.draft_sampling is expected.tree.draft_sampling


@pytest.mark.parametrize("shape", SHAPES)
def test_a_kernel_reports_what_the_tensor_code_does(shape, monkeypatch):
    """Every path of a tree, accepted down to each of its depths."""
    batch, paths, length = shape
    switch(monkeypatch, on=False)
    numbered = draft_tree(tokens_of(*shape), packed_of(*shape), paths)
    for path in range(paths):
        accepted = (torch.arange(batch, device=DEVICE) + path) % (length + 1)
        last = 100 + torch.arange(batch, device=DEVICE)
        verdict = Verdict(numbered.tree.draws[:, :, path], accepted, last)
        switch(monkeypatch, on=False)
        expected = acceptance(verdict, numbered)
        switch(monkeypatch, on=True)
        got = acceptance(verdict, numbered)
        for built, value in zip(got, expected, strict=True):
            assert built.dtype == value.dtype
            assert torch.equal(built, value)


def judge_of(verifier: str, *, batch: int = 2, length: int = 3, vocab: int = 12) -> GraphJudge:
    """A judge of rounds whose buffers hold those of a batch."""
    paths = PATHS[verifier]
    plan = Plan(verifier=verifier, paths=paths, depth=length)
    nodes = 1 + paths * length
    generator = torch.Generator().manual_seed(3)
    buffers = RoundBuffers(batch, batch, paths, length, WIDTH, device=DEVICE)
    buffers.uniforms.copy_(torch.rand(buffers.uniforms.shape, generator=generator))
    probs = torch.rand((batch * nodes, vocab), generator=generator)
    judge = GraphJudge(plan, buffers, probs.to(DEVICE))
    ids = torch.arange(WIDTH).expand(buffers.packed[:, :, 0].shape)
    q = torch.rand(ids.shape, generator=generator, dtype=torch.float64) + 0.1
    buffers.packed[:, :, 0] = ids.to(DEVICE)
    buffers.packed[:, :, 1] = (q / q.sum(dim=2, keepdim=True)).to(DEVICE)
    tokens = torch.randint(0, WIDTH, judge._tokens.shape, generator=generator)
    judge._tokens.copy_(tokens)
    return judge


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("verifier", PATHS)
def test_a_round_is_judged_in_few_launches(verifier, batch, monkeypatch):
    judge = judge_of(verifier, batch=batch)
    switch(monkeypatch, on=True)
    with launches(KERNELS) as names:
        got = judge._judge(batch)
    assert [name for name in names if "." not in name] == ["number_nodes", *JUDGES, "report_paths"]
    assert len(names) <= 12, "\n".join(names)  # and 11 outside: see test_round_operations.py
    switch(monkeypatch, on=False)
    for judged, expected in zip(got, judge._judge(batch), strict=True):
        assert torch.equal(judged, expected)


if __name__ == "__main__":  # lists what a round launches to judge, by kernels and by tensor code
    for rule in PATHS:
        for kernels_run in (True, False):
            judge = judge_of(rule)
            with pytest.MonkeyPatch.context() as patched, launches(KERNELS) as listed:
                switch(patched, on=kernels_run)
                judge._judge(2)
            code = "kernels" if kernels_run else "tensor code"
            sys.stdout.write(f"{rule} by {code}: {len(listed)}\n{' '.join(listed)}\n")
