"""Trees of a round grown by kernels, interpreted on a CPU, against the tensor code.

Trees are the same, and the distributions but for the rounding of sums.
"""

import math
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.launches import launches
from support.sglang_batch import sampling
from torch import Tensor

from eaglegbv.backends.sglang import tree_layout
from eaglegbv.backends.sglang.numbering import draft_tree
from eaglegbv.backends.sglang.tree_layout import Branches, RoundBuffers

pytest.importorskip("triton", reason="Triton, which runs the kernels, is not installed")
from eaglegbv.backends.sglang import kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # else interpreted
KERNELS = ("draw_branches", "join_branches", "choose_nodes")
BATCH, SLOTS, VOCAB = 4, 6, 40
ROUNDING = 1e-14
MOST = 19  # operations of a round recorded at L = 4, beside the head's own
SHAPES = ((3, 4), (1, 3), (3, 1), (1, 1), (2, 2), (5, 3))  # paths, length


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tree_layout, "PIECE", 16)
    with np.errstate(all="ignore"):  # what programs compute in masked lanes means nothing
        yield


def switch(patch: pytest.MonkeyPatch, *, on: bool) -> None:
    """Let kernels run here, whatever the device is, or tensor code."""
    patch.setattr(tree_layout, "runs_kernels", lambda _: on)


class Round(NamedTuple):
    """What a round starts from, and its head's logits, which depend on the row alone."""

    buffers: RoundBuffers
    greedy: Tensor  # [batch] bool
    logits: list[Tensor]  # of each depth, [batch * paths, draft_vocab]


class Trees(NamedTuple):
    """The trees of a round."""

    tables: tuple[Tensor, Tensor, Tensor]  # parents, numbers and tokens
    packed: Tensor  # the distributions
    branches: list[tuple[Tensor, Tensor]]  # of each depth but the last, tokens and origins


Logits = Callable[[int, torch.Generator], Tensor]


def usual(rows: int, generator: torch.Generator) -> Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=generator)


def round_of(
    paths: int,
    length: int,
    logits_of: Logits = usual,
    *,
    width: int = 7,
    greedy: Tensor | None = None,
    draft_temperature: float = 1.0,
    mapped: bool = False,
    batch: int = BATCH,
) -> Round:
    """Prepare a round; by default every other request is greedy."""
    generator = torch.Generator().manual_seed(17 * paths + length)
    if greedy is None:
        greedy = torch.arange(batch) % 2 == 1
    target_ids = torch.randperm(90, generator=generator)[:VOCAB].to(DEVICE) if mapped else None
    buffers = RoundBuffers(
        batch + 2,
        batch + 2,
        paths,
        length,
        width,
        draft_temperature=draft_temperature,
        target_ids=target_ids,
        device=DEVICE,
    )
    uniforms = torch.rand(buffers.uniforms[:batch].shape, generator=generator).double()
    uniforms[:, 0] = 0
    uniforms[:, paths * length - 1] = 1 - 2**-53  # the last path's last
    temperatures = 0.25 + torch.rand(batch, 1, generator=generator)
    settings = sampling(temperatures.to(DEVICE), greedy.to(DEVICE))
    buffers.load(uniforms, settings)
    buffers.keep_roots(slots_of(batch), logits_of(batch, generator).to(DEVICE))
    rows = batch * paths
    logits = [logits_of(rows, generator).to(DEVICE) for _ in range(length - 1)]
    return Round(buffers, greedy.to(DEVICE), logits)


def slots_of(batch: int) -> Tensor:
    """The requests' slots, which are in no order."""
    return torch.arange(batch + 1, 1, -1, device=DEVICE)


def grown(own: Round) -> Trees:
    """Grow the trees of a round."""
    branches: list[tuple[Tensor, Tensor]] = []

    def head(growth: Branches) -> Tensor:
        branches.append((growth.tokens.clone(), growth.origins.clone()))
        return own.logits[len(branches) - 1]

    batch = len(own.greedy)
    own.buffers.packed.fill_(math.nan)
    tables = own.buffers.grow(slots_of(batch), head)
    assert len(branches) == own.buffers.length - 1
    assert own.buffers.packed[batch:].isnan().all()
    return Trees(tables, own.buffers.packed[:batch].clone(), branches)


def check(own: Round, patch: pytest.MonkeyPatch) -> Trees:
    """Compare the kernels' trees with those of the tensor code; return the latter."""
    switch(patch, on=False)
    expected = grown(own)
    switch(patch, on=True)
    with launches({kernels: KERNELS}) as names:
        got = grown(own)
    assert [name for name in names if name in KERNELS]
    for found, right in zip(got.branches, expected.branches, strict=True):
        for table, same in zip(found, right, strict=True):
            assert torch.equal(table, same)
    for table, same in zip(got.tables, expected.tables, strict=True):
        assert table.dtype == same.dtype
        assert torch.equal(table, same)
    greedy = own.greedy
    torch.testing.assert_close(
        got.packed[greedy], expected.packed[greedy], rtol=0, atol=ROUNDING, equal_nan=False
    )
    # Of paths at one node, verifiers see the distribution of the first.
    tokens = torch.nn.functional.pad(expected.tables[2], (1, 0))
    seen, right = (
        draft_tree(tokens, trees.packed, own.buffers.paths).tree for trees in (got, expected)
    )
    for name, same in right.tensors.items():
        table = seen.tensors[name]
        if table.is_floating_point():
            table, same = table[~greedy], same[~greedy]
            torch.testing.assert_close(table, same, rtol=0, atol=ROUNDING)
        else:
            assert torch.equal(table[~greedy], same[~greedy]), name
    return expected


@pytest.mark.parametrize(("paths", "length"), SHAPES)
@pytest.mark.parametrize("mapped", [False, True])
def test_trees_are_those_of_the_tensor_code(paths, length, mapped, monkeypatch):
    own = round_of(paths, length, mapped=mapped, draft_temperature=1.7)
    expected = check(own, monkeypatch)
    assert expected.tables[0].shape == (BATCH, 1 + paths * (length - 1) if length > 1 else 0)


@pytest.mark.parametrize("width", [3, VOCAB])
@pytest.mark.parametrize("everyone", [False, True])
def test_lists_of_any_width_and_batches_of_one_kind(width, everyone, monkeypatch):
    greedy = torch.full((BATCH,), everyone)
    check(round_of(3, 3, width=width, greedy=greedy), monkeypatch)


def test_lists_of_one_token(monkeypatch):
    check(round_of(1, 3, width=1), monkeypatch)


def test_more_candidates_than_are_ranked_at_once(monkeypatch):
    own = round_of(12, 2, width=13, batch=2)
    assert own.buffers.paths**2 > kernels._RANKED.value
    check(own, monkeypatch)


def alike(rows: int, generator: torch.Generator) -> Tensor:
    """A token that takes two thirds, so that many paths begin alike."""
    logits = usual(rows, generator)
    logits[:, 5] = logits.logsumexp(1) + math.log(2)
    return logits


def equal(rows: int, _: torch.Generator) -> Tensor:
    """All tokens tie, everywhere."""
    return torch.zeros(rows, VOCAB)


def excluded(rows: int, _: torch.Generator) -> Tensor:
    """Two tokens that tie; the others cannot be drawn, some by rounding."""
    logits = torch.full((rows, VOCAB), -math.inf)
    logits[:, 8:12] = -2000.0
    logits[:, 3:5] = 1.0
    return logits


def rounded(rows: int, generator: torch.Generator) -> Tensor:
    """Ties within rows."""
    return usual(rows, generator).round()


def broken(rows: int, generator: torch.Generator) -> Tensor:
    """Rows without logits, one with a NaN, one of infinity; others are whole."""
    logits = usual(rows, generator)
    logits[0::5] = math.nan
    logits[1::5, 9] = math.nan
    logits[2::5, 9] = math.inf
    logits[3::5] = -math.inf
    return logits


@pytest.mark.parametrize("logits_of", [alike, equal, excluded, broken])
@pytest.mark.parametrize("draft_temperature", [1.0, 0.05])
def test_unusual_logits(logits_of, draft_temperature, monkeypatch):
    own = round_of(4, 3, logits_of, draft_temperature=draft_temperature)
    expected = check(own, monkeypatch)
    tokens = expected.tables[2].unflatten(1, (3, 4))[~own.greedy]
    if logits_of is excluded:
        assert ((tokens == 3) | (tokens == 4)).all()
    if logits_of is alike:
        assert (tokens[:, 0] == tokens[:, 0, :1]).sum(dim=1).max() > 1


def test_ties_of_sampled_requests(monkeypatch):
    """Of greedy ones, equal products of different factors are ordered by rounding."""
    check(round_of(4, 3, rounded, greedy=torch.zeros(BATCH, dtype=torch.bool)), monkeypatch)


def test_half_precision(monkeypatch):
    own = round_of(3, 3)
    halves = [logits.bfloat16() for logits in own.logits]
    sampled = own._replace(logits=halves, greedy=torch.zeros_like(own.greedy))
    sampled.buffers.greedy.fill_(False)
    check(sampled, monkeypatch)


def test_what_kernels_do_not_take_is_tensor_code(monkeypatch):
    monkeypatch.setattr(tree_layout, "WIDEST", 30)
    switch(monkeypatch, on=True)
    for width in (30, 31):
        with launches({kernels: KERNELS}) as names:
            grown(round_of(2, 2, width=width))
        assert any(name in KERNELS for name in names) is (width == 30)


def operations(batch: int, patch: pytest.MonkeyPatch, *, on: bool) -> list[str]:
    """What a worker's ``draft_forward`` launches at K = 3, L = 4, but for the head's forwards."""
    own = round_of(3, 4, mapped=True, batch=batch)
    switch(patch, on=on)
    positions = torch.zeros(3 * batch, dtype=torch.int64, device=DEVICE)
    hidden = torch.zeros((batch, 8), device=DEVICE)
    logits = iter(own.logits)
    slots = slots_of(batch)
    with launches({kernels: KERNELS}) as names:
        cache = torch.empty(12 * batch, device=DEVICE).view(batch, 3, 4)
        cache.permute(2, 0, 1).reshape(4, -1).contiguous()
        rows = hidden.unsqueeze(1).expand(-1, 3, -1)

        def head(branches: Branches) -> Tensor:
            branches.tokens.flatten()
            origins = branches.origins.unsqueeze(2).expand(-1, -1, 8)
            rows.gather(1, origins).flatten(0, 1)
            positions.add_(1)
            return next(logits)

        own.buffers.grow(slots, head)
    return names


@pytest.mark.parametrize("batch", [1, 8])
def test_a_round_is_drafted_in_few_launches(batch, monkeypatch):
    names = operations(batch, monkeypatch, on=True)
    level = ["aten.topk.default", "draw_branches", "join_branches"]
    taken = [name for name in names if name in level or name in KERNELS]
    assert taken == [*level[1:], *level * 3, "choose_nodes"]
    assert len(names) <= MOST, "\n".join(names)


if __name__ == "__main__":  # lists what a round launches to draft, by kernels and by tensor code
    for on in (True, False):
        with pytest.MonkeyPatch.context() as patched:
            listed = operations(8, patched, on=on)
        code = "kernels" if on else "tensor code"
        sys.stdout.write(f"{code}: {len(listed)}\n{' '.join(listed)}\n")
