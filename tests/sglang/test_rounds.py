"""A round's trees: drawn as the package draws them, and told to SGLang as it builds them."""

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grown_trees import check_tree
from support.sglang_batch import sampling
from support.sglang_engine import cpu_environment
from torch import Tensor

from eaglegbv.backends.sglang.rounds import RoundBuffers, numbers_of
from eaglegbv.config import Plan

WIDTH = 4
LAST, VOCAB = 2, 9


def buffers_of(K: int, L: int, batch: int, vocab: int, *, width: int = 256) -> RoundBuffers:
    plan = Plan(paths=K, depth=L, draft_width=width)
    return RoundBuffers(plan, batch, torch.zeros(batch, vocab), torch.arange(vocab))


@st.composite
def drawn_paths(draw: st.DrawFn) -> Tensor:
    """``[batch, length, paths]`` tokens, often equal."""
    batch, L, K = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    count = batch * L * K
    tokens = draw(st.lists(st.integers(0, WIDTH - 1), min_size=count, max_size=count))
    return torch.tensor(tokens).view(batch, L, K)


def grown(tokens: Tensor) -> tuple[RoundBuffers, Sequence[Tensor]]:
    """Rounds whose paths have these tokens, all equally likely; and what SGLang is told."""
    batch, L, K = tokens.shape
    buffers = buffers_of(K, L, batch, WIDTH)
    uniforms = torch.zeros(batch, numbers_of(buffers.plan), dtype=torch.float64)
    uniforms[:, : K * L] = ((tokens.mT + 0.5).double() / WIDTH).flatten(1)
    buffers.load(uniforms, sampling(torch.ones(batch, 1), None))

    def head(drawn: Tensor, origins: Tensor) -> Tensor:
        assert origins.tolist() == [list(range(K))] * batch
        return torch.zeros(batch * K, WIDTH)

    return buffers, buffers.grow(torch.arange(batch), head)


def parents_in_sglang(told: Sequence[Tensor], b: int, K: int) -> list[int]:
    """Each node's parent by SGLang's rule: that of number s stands at ``parents[s // K]``."""
    parents, numbers = told[0][b].tolist(), told[1][b].tolist()
    groups = [number // K for number in numbers]
    return [0 if group == 0 else 1 + numbers.index(parents[group]) for group in groups]


@given(drawn_paths())
@settings(max_examples=60)
def test_sglang_builds_the_same_trees_with_the_rest_as_leaves_of_the_root(tokens):
    batch, L, K = tokens.shape
    buffers, told = grown(tokens)
    tree = buffers.tree
    check_tree(tree)
    assert told[0].shape == (batch, 1 + K * (L - 1))
    assert told[1].shape == told[2].shape == (batch, K * L)
    assert all(table.is_contiguous() for table in told)
    for b in range(batch):
        paths = tokens[b].T.tolist()
        prefixes = {tuple(path[:d]) for path in paths for d in range(len(path) + 1)}
        assert tree.num_nodes[b] == len(prefixes)
        assert tree.token_ids[b, tree.draws[b]].mT.tolist() == paths
        assert told[2][b].tolist() == tree.token_ids[b, 1:].tolist()
        assert parents_in_sglang(told, b, K) == tree.parents[b, 1:].tolist()


BUILD = """
import sys, torch
from sgl_kernel import QLEN_ONLY, build_tree_kernel_efficient_cpu
told, (K, L) = torch.load(sys.argv[1]), map(int, sys.argv[2:])
batch, nodes = len(told[0]), 1 + K * L
mask = torch.zeros(batch * nodes * nodes, dtype=torch.bool)
positions, lengths = torch.zeros(batch * nodes, dtype=torch.int64), torch.zeros(batch).long()
links = torch.full((3, batch, nodes), -1)
build_tree_kernel_efficient_cpu(
    told[0], told[1], lengths, mask, positions, *links, K, L + 1, nodes, QLEN_ONLY
)
torch.save((mask.view(batch, nodes, nodes), positions.view(batch, nodes)), sys.argv[1])
"""
"""In a process of its own, as the stand-in changes PyTorch when it is imported."""


def test_the_stand_in_builds_these_trees_too(tmp_path: Path):
    """Padding has numbers of the root's children, which are to be found first."""
    paths = [[[3, 3, 3], [2, 2, 2]], [[0, 1, 0], [1, 1, 2]], [[0, 1, 2], [0, 0, 0]]]
    tokens = torch.tensor(paths)
    batch, L, K = tokens.shape
    buffers, told = grown(tokens)
    tree, file = buffers.tree, tmp_path / "tree.pt"
    torch.save(told[:2], file)
    arguments = [sys.executable, "-c", BUILD, str(file), str(K), str(L)]
    subprocess.run(arguments, env=cpu_environment(), check=True)
    mask, positions = torch.load(file)
    assert tree.num_nodes.tolist() == [3, 6, 7]
    for b in range(batch):
        parents, real = tree.parents[b].tolist(), int(tree.num_nodes[b])
        for node in range(1, tree.nodes):
            above = mask[b, parents[node]].clone()
            above[node] = True
            assert mask[b, node].tolist() == above.tolist()
            assert positions[b, node] == (tree.depth[b, node] if node < real else 1)


# Greedy requests: the tree of SGLang's EAGLE, written out for one request.


def eagle_tree(table: Tensor, K: int, L: int) -> set[tuple[int, ...]]:
    """The most likely nodes, as the tokens that lead to them; ``table`` is q after each token."""

    def children(token: int) -> list[tuple[float, int]]:
        values, ids = table[token].topk(K)
        return list(zip(values.tolist(), ids.tolist(), strict=True))

    beam: list[tuple[float, tuple[int, ...]]] = [(1.0, (LAST,))]
    found: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(L):
        level = [(s * p, (*path, token)) for s, path in beam for p, token in children(path[-1])]
        beam = sorted(level, reverse=True)[:K]
        found += level
    return {path[1:] for _, path in sorted(found, reverse=True)[: K * L]}


def told_nodes(told: Sequence[Tensor], b: int, K: int) -> list[tuple[int, ...]]:
    """The tokens that lead to each node of what SGLang is told."""
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(parents_in_sglang(told, b, K), told[2][b].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize(("K", "L"), [(3, 4), (3, 1), (2, 3), (1, 3), (4, 6)])
def test_greedy_requests_have_sglangs_own_tree_in_any_company(K, L):
    """Only the most likely tokens are kept, but they are ranked by all of the head's logits."""
    generator = torch.Generator().manual_seed(K * L)
    table = (torch.randn(VOCAB, VOCAB, generator=generator) * 2).softmax(1)
    buffers = buffers_of(K, L, 4, VOCAB, width=5)
    uniforms = torch.rand(4, numbers_of(buffers.plan), generator=generator, dtype=torch.float64)

    def tree(greedy: Tensor | None) -> Sequence[Tensor]:
        buffers.load(uniforms, sampling(torch.full((4, 1), 0.7), greedy))
        slots = torch.tensor([1, 3, 0, 2])
        buffers.keep_roots(slots, table[torch.full((4,), LAST)].log())
        told = buffers.grow(slots, lambda tokens, _: table[tokens.flatten()].log())
        return [part.clone() for part in told]

    mixed, sampled = tree(torch.tensor([True, False, True, False])), tree(None)
    for b in (0, 2):
        nodes = told_nodes(mixed, b, K)
        assert len(nodes) == K * L
        assert set(nodes) == eagle_tree(table.double(), K, L)
    for b in (1, 3):
        for part, alone in zip(mixed, sampled, strict=True):
            assert torch.equal(part[b], alone[b])


@pytest.mark.parametrize("logits", [200.0, math.nan])
def test_a_node_is_never_in_a_greedy_tree_without_its_parent(logits):
    """Neither where a token is certain, and so as likely as its parent, nor without logits."""
    K, L = 3, 5
    every = torch.full((K, VOCAB), logits if math.isnan(logits) else 0.0)
    every[:, 4] = logits
    buffers = buffers_of(K, L, 1, VOCAB, width=5)
    greedy = torch.ones(1, dtype=torch.bool)
    uniforms = torch.zeros(1, numbers_of(buffers.plan), dtype=torch.float64)
    buffers.load(uniforms, sampling(torch.ones(1, 1), greedy))
    buffers.keep_roots(torch.tensor([0]), every[:1])
    told = buffers.grow(torch.tensor([0]), lambda *_: every)
    assert len(set(told_nodes(told, 0, K))) == K * L


def test_a_broken_head_drafts_one_token_for_certain():
    buffers = buffers_of(2, 3, 2, VOCAB, width=4)
    logits = torch.zeros(4, VOCAB)
    logits[:2, 1] = math.nan
    uniforms = torch.full((2, numbers_of(buffers.plan)), 0.9, dtype=torch.float64)
    buffers.load(uniforms, sampling(torch.ones(2, 1), None))
    buffers.keep_roots(torch.arange(2), logits[::2])
    buffers.grow(torch.arange(2), lambda *_: logits)
    tree = buffers.tree
    assert tree.num_nodes[0] == 4  # both paths are one
    assert tree.draft_probs[0, :3].tolist() == [[1.0, 0.0, 0.0, 0.0]] * 3
    for node in range(3):
        assert tree.draft_ids[0, node, 0] == tree.token_ids[0, node + 1]
    assert tree.draft_probs[1, 0].tolist() == [0.25] * 4
    check_tree(tree)
