"""What is kept is what is drawn from; trees grow, in our numbers and SGLang's."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grown_trees import check_tree
from support.sglang_batch import sampling
from torch import Tensor

from eaglegbv.backends.sglang.numbering import NumberedTree, draft_tree
from eaglegbv.backends.sglang.tree_layout import (
    RoundBuffers,
    RoundGrowth,
    RoundTables,
    ShortProbs,
)

WIDTH = 4
CPU = torch.device("cpu")


@st.composite
def drawn_paths(draw: st.DrawFn) -> Tensor:
    """``[batch, length, paths]`` tokens, often equal."""
    batch, L, K = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    tokens = draw(
        st.lists(st.integers(0, WIDTH - 1), min_size=batch * L * K, max_size=batch * L * K)
    )
    return torch.tensor(tokens).view(batch, L, K)


def flat(tokens: Tensor) -> Tensor:
    """``[batch, nodes]`` in SGLang's order; the root's token is 9."""
    return torch.cat((torch.full((len(tokens), 1), 9), tokens.flatten(1)), dim=1)


def numbered(tokens: Tensor) -> NumberedTree:
    """The tree of paths with probabilities that name them: path k at depth d has 0.1 + d + k."""
    batch, L, K = tokens.shape
    ids = torch.arange(WIDTH).expand(batch, 1 + (L - 1) * K, WIDTH)
    marks = torch.arange(L - 1).view(-1, 1) * 10 + torch.arange(K) + 1.1
    marks = torch.cat((torch.tensor([0.25]), marks.flatten())).double()
    probs = ShortProbs(ids, marks.unsqueeze(1).expand(batch, -1, WIDTH))
    return draft_tree(flat(tokens), probs.pack(), K)


@given(drawn_paths())
@settings(max_examples=60)
def test_tree_is_the_trie_of_the_paths_in_sglangs_numbers(tokens):
    """A node has the distribution of the first path through it."""
    own = numbered(tokens)
    tree, nodes = own.tree, 1 + tokens[0].numel()
    check_tree(tree)
    for b, count in enumerate(tree.num_nodes.tolist()):
        assert tree.token_ids[b, 0] == 9
        assert tree.draft_probs[b, 0].tolist() == [0.25] * WIDTH
        paths = tokens[b].T.tolist()
        assert count == len({tuple(path[:d]) for path in paths for d in range(len(path) + 1)})
        for path, at in zip(paths, tree.draws[b].T, strict=True):
            assert tree.token_ids[b, at].tolist() == path
            for depth, node in enumerate(at[:-1], start=1):
                first = next(k for k, other in enumerate(paths) if other[:depth] == path[:depth])
                mark = (depth - 1) * 10 + first + 1.1
                assert tree.draft_probs[b, node, 0].item() == pytest.approx(mark)
            assert not tree.draft_probs[b, at[-1]].any()
        numbers = own.rows[b] - b * nodes
        assert flat(tokens)[b, numbers[:count]].tolist() == tree.token_ids[b, :count].tolist()
        assert not numbers[count:].any()


def grown(tokens: Tensor) -> Sequence[Tensor]:
    """The sampled trees that have these ``[batch, length, paths]`` tokens, all equally likely."""
    batch, L, K = tokens.shape

    def alike(rows: int) -> ShortProbs:
        return ShortProbs(
            torch.arange(WIDTH).expand(rows, -1), torch.full((rows, WIDTH), 1 / WIDTH).double()
        )

    sampled = torch.zeros((batch, 1), dtype=torch.bool)
    uniforms = (tokens.mT + 0.5).double() / WIDTH
    growth = RoundGrowth(RoundTables.of(K, L, CPU), alike(batch), uniforms, sampled)
    for _ in range(L - 1):
        growth.grow(alike(batch * K), torch.zeros(batch * K, 1).double())
        assert growth.origins.tolist() == [list(range(K))] * batch
    return growth.tree()


def parents_in_sglang(tree: Sequence[Tensor], b: int, K: int) -> dict[int, int]:
    """Each node's parent by SGLang's rule: that of number s stands at ``parents[s // K]``."""
    parents, numbers = tree[0][b].tolist(), tree[1][b].tolist()
    assert len(set(numbers)) == len(numbers)
    groups = {node: number // K for node, number in enumerate(numbers, start=1)}
    return {n: 0 if g == 0 else 1 + numbers.index(parents[g]) for n, g in groups.items()}


@given(drawn_paths())
@settings(max_examples=60)
def test_sglang_finds_the_same_parents(tokens):
    batch, L, K = tokens.shape
    theirs, own = grown(tokens), numbered(tokens)
    numbers = own.rows - own.rows[:, :1]
    assert theirs[0].shape == (batch, 1 + K * (L - 1) if L > 1 else 0)
    assert theirs[2].tolist() == tokens.flatten(1).tolist()
    for b in range(len(tokens)):
        found = parents_in_sglang(theirs, b, K)
        for place in range(1, int(own.tree.num_nodes[b])):
            parent = numbers[b, own.tree.parents[b, place]]
            assert found[int(numbers[b, place])] == int(parent)


# Greedy requests: the tree of SGLang's EAGLE, written out for one request.


def eagle_tree(table: Tensor, K: int, L: int) -> tuple[list[int], list[int], list[int]]:
    """Parents, numbers and tokens of the most likely nodes; ``table`` ``[vocab, vocab]`` is q."""

    def children(token: int) -> list[tuple[float, int]]:
        values, ids = table[token].topk(K)
        return list(zip(values.tolist(), ids.tolist(), strict=True))

    found = [(score, k, token) for k, (score, token) in enumerate(children(LAST))]
    branches, parents = list(found), list(range(-1, K))
    for depth in range(1, L):
        level = [
            (score * p, K + K * K * (depth - 1) + K * r + k, token)
            for r, (score, _, above) in enumerate(branches)
            for k, (p, token) in enumerate(children(above))
        ]
        best = sorted(level, reverse=True)[:K]
        branches = sorted(best, key=lambda node: node[1])
        found += level
        parents += [number for _, number, _ in branches] if depth < L - 1 else []
    kept = sorted(number for _, number, _ in sorted(found, reverse=True)[: K * L])
    tokens = {number: token for _, number, token in found}
    return (parents if L > 1 else []), kept, [tokens[number] for number in kept]


LAST, VOCAB = 2, 9


@pytest.mark.parametrize(("K", "L"), [(3, 4), (3, 1), (2, 3), (1, 3), (4, 6)])
def test_greedy_requests_have_sglangs_own_tree_in_any_company(K, L):
    """Only the most likely tokens are kept, but they are ranked by all of the head's logits."""
    generator = torch.Generator().manual_seed(K * L)
    table = (torch.randn(VOCAB, VOCAB, generator=generator) * 2).softmax(1)
    buffers = RoundBuffers(4, 4, K, L, 5)
    uniforms = torch.rand(4, 4 * K * L + 1, generator=generator, dtype=torch.float64)

    def tree(greedy: Tensor | None) -> Sequence[Tensor]:
        buffers.load(uniforms, sampling(torch.full((4, 1), 0.7), greedy))
        slots = torch.tensor([1, 3, 0, 2])
        buffers.keep_roots(slots, table[torch.full((4,), LAST)].log())
        return buffers.grow(slots, lambda own: table[own.tokens.flatten()].log())

    mixed, sampled = tree(torch.tensor([True, False, True, False])), tree(None)
    parents, numbers, tokens = eagle_tree(table.double(), K, L)
    for b in (0, 2):
        assert [part[b].tolist() for part in mixed] == [parents, numbers, tokens]
        assert parents_in_sglang(mixed, b, K)
    for b in (1, 3):
        for own, alone in zip(mixed, sampled, strict=True):
            assert torch.equal(own[b], alone[b])


def test_a_node_is_never_in_a_greedy_tree_without_its_parent():
    """Neither where a token is certain, and so as likely as its parent, nor without logits."""
    K, L = 3, 5
    certain = torch.zeros(1, VOCAB)
    certain[0, 4] = 200.0
    for logits in (certain, torch.full((1, VOCAB), math.nan)):
        values, ids = logits.topk(5, dim=1)
        probs = ShortProbs(ids, values.double()).tempered(torch.ones(1, 1))
        every = ShortProbs(probs.ids.expand(K, -1), probs.probs.expand(K, -1))
        uniforms = torch.zeros(1, K, L, dtype=torch.float64)
        greedy = torch.ones(1, 1, dtype=torch.bool)
        growth = RoundGrowth(RoundTables.of(K, L, CPU), probs, uniforms, greedy)
        for _ in range(L - 1):
            growth.grow(every, (values[:, :1] - values.logsumexp(1, keepdim=True)).expand(K, -1))
        assert len(parents_in_sglang(growth.tree(), 0, K)) == K * L


def short_probs(
    logits: list[list[float]], *, temperature: float = 1.0, width: int = 8
) -> ShortProbs:
    values, ids = torch.tensor(logits).topk(min(width, len(logits[0])), dim=1)
    return ShortProbs(ids, values.double()).tempered(torch.full((len(logits), 1), temperature))


def test_keeps_the_most_likely_tempers_and_normalises_them():
    own = short_probs([[0.0, math.log(9), math.log(4), -5.0]], width=3, temperature=2.0)
    assert own.ids.tolist() == [[1, 2, 0]]
    torch.testing.assert_close(own.probs, torch.tensor([[3, 2, 1]]).double() / 6)
    again = ShortProbs.unpack(own.pack())  # with every bit
    assert torch.equal(again.ids, own.ids)
    assert torch.equal(again.probs, own.probs)


def test_a_broken_head_drafts_one_token_for_certain():
    own = short_probs([[math.nan, 0.0, 1.0], [0.0, 1.0, 2.0]])
    assert own.probs[0].tolist() == [1, 0, 0]
    assert own.probs[1].sum().item() == pytest.approx(1)
