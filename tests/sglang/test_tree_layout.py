"""What is kept is what is drawn from; K paths become one tree, in our numbers and SGLang's."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tree_check import check_tree
from torch import Tensor

from eaglegbv.backends.sglang.tree_layout import (
    GrowingPaths,
    NumberedTree,
    ShortProbs,
    draft_tree,
    sglang_tree,
)

WIDTH = 4


@st.composite
def drawn_paths(draw: st.DrawFn) -> Tensor:
    """``[batch, length, paths]`` tokens, often equal."""
    batch, L, K = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    tokens = draw(
        st.lists(st.integers(0, WIDTH - 1), min_size=batch * L * K, max_size=batch * L * K)
    )
    return torch.tensor(tokens).view(batch, L, K)


def numbered(tokens: Tensor) -> NumberedTree:
    """The tree of paths with probabilities that name them: path k at depth d has 0.1 + d + k."""
    batch, L, K = tokens.shape
    ids = torch.arange(WIDTH).expand(batch, L - 1, K, WIDTH)
    marks = torch.arange(L - 1).view(-1, 1, 1) * 10 + torch.arange(K).view(-1, 1) + 1.1
    inner = ShortProbs(ids, marks.double().expand(batch, L - 1, K, WIDTH))
    roots = ShortProbs(
        torch.arange(WIDTH).expand(batch, -1), torch.full((batch, WIDTH), 0.25).double()
    )
    return draft_tree(torch.full((batch,), 9), tokens, roots, inner.pack())


@given(drawn_paths())
@settings(max_examples=60)
def test_tree_is_the_trie_of_the_paths(tokens: Tensor) -> None:
    tree = numbered(tokens).tree
    check_tree(tree)
    for b in range(tokens.shape[0]):
        prefixes = {tuple(path[:d]) for path in tokens[b].T.tolist() for d in range(len(path) + 1)}
        assert int(tree.num_nodes[b]) == len(prefixes)
        for k, path in enumerate(tokens[b].T.tolist()):
            nodes = tree.path_nodes[b, k]
            assert tree.token_ids[b, nodes].tolist() == path
    assert tree.token_ids[:, 0].tolist() == [9] * len(tokens)


@given(drawn_paths())
@settings(max_examples=60)
def test_a_node_has_the_distribution_of_the_first_path_through_it(tokens: Tensor) -> None:
    tree = numbered(tokens).tree
    _, L, K = tokens.shape
    for b in range(tokens.shape[0]):
        assert tree.draft_probs[b, 0].tolist() == [0.25] * WIDTH
        paths = tokens[b].T.tolist()
        for k, path in enumerate(paths):
            for depth in range(1, L):
                node = tree.path_nodes[b, k, depth - 1]
                first = next(j for j in range(K) if paths[j][:depth] == path[:depth])
                assert tree.draft_probs[b, node, 0].item() == pytest.approx(
                    (depth - 1) * 10 + first + 1.1
                )
            assert not tree.draft_probs[b, tree.path_nodes[b, k, -1]].any()


@given(drawn_paths())
@settings(max_examples=60)
def test_numbers_are_sglangs(tokens: Tensor) -> None:
    own = numbered(tokens)
    _, L, K = tokens.shape
    flat = torch.cat((torch.full((len(tokens), 1), 9), tokens.flatten(1)), dim=1)
    for b in range(len(tokens)):
        count = int(own.tree.num_nodes[b])
        assert sorted(own.numbers[b].tolist()) == list(range(K * L + 1))
        assert flat[b, own.numbers[b, :count]].tolist() == own.tree.token_ids[b, :count].tolist()


@given(drawn_paths())
@settings(max_examples=60)
def test_sglang_finds_the_same_parents(tokens: Tensor) -> None:
    """By SGLang's rule: the parent of number s stands where ``parents[s // K]`` is found."""
    batch, L, K = tokens.shape
    paths = GrowingPaths(tokens[:, 0])
    for depth in range(1, L):
        paths.grow(tokens[:, depth])
    theirs, own = sglang_tree(paths), numbered(tokens)
    assert theirs.parents.shape == (batch, 1 + K * (L - 1) if L > 1 else 0)
    assert theirs.tokens.tolist() == tokens.flatten(1).tolist()
    for b in range(batch):
        numbers, parents = theirs.numbers[b].tolist(), theirs.parents[b].tolist()
        assert len(set(numbers)) == K * L
        found = {}
        for node, number in enumerate(numbers, start=1):
            group = number // K
            found[node] = 0 if group == 0 else 1 + numbers.index(parents[group])
        for place in range(1, int(own.tree.num_nodes[b])):
            parent = own.numbers[b, own.tree.parents[b, place]]
            assert found[int(own.numbers[b, place])] == int(parent)


def short_probs(
    logits: list[list[float]], *, temperature: float = 1.0, width: int = 8
) -> ShortProbs:
    table = torch.tensor(logits)
    temperatures = torch.full((len(logits), 1), temperature)
    return ShortProbs.of_logits(table, temperatures, width=width, target_ids=None)


def test_keeps_the_most_likely_and_normalises_them() -> None:
    own = short_probs([[0.0, math.log(3), math.log(2), -5.0]], width=3)
    assert own.ids.tolist() == [[1, 2, 0]]
    torch.testing.assert_close(own.probs, torch.tensor([[3, 2, 1]]).double() / 6)
    assert own.probs.dtype == torch.float64


def test_tempers() -> None:
    own = short_probs([[0.0, math.log(4)]], temperature=2.0)
    torch.testing.assert_close(own.probs, torch.tensor([[2, 1]]).double() / 3)


def test_names_tokens_of_the_target() -> None:
    own = ShortProbs.of_logits(
        torch.tensor([[1.0, 3.0]]),
        torch.ones(1, 1),
        width=2,
        target_ids=torch.tensor([7, 40]),
    )
    assert own.ids.tolist() == [[40, 7]]


def test_a_broken_head_drafts_one_token_for_certain() -> None:
    own = short_probs([[math.nan, 0.0, 1.0], [0.0, 1.0, 2.0]])
    assert own.probs[0].tolist() == [1, 0, 0]
    assert own.probs[1].sum().item() == pytest.approx(1)
    assert 0 <= own.pick(torch.tensor([0.999, 0.0]))[0] < 3


def test_packing_keeps_every_bit() -> None:
    own = short_probs([[0.1, 0.2, 0.3]])
    again = ShortProbs.unpack(own.pack())
    assert torch.equal(again.ids, own.ids)
    assert torch.equal(again.probs, own.probs)


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.499999, 0.5, 0.75, 1 - 2**-53])
def test_picks_by_inverse_cdf(uniform: float) -> None:
    own = ShortProbs(torch.tensor([[5, 6, 7]]), torch.tensor([[0.5, 0.5, 0.0]]).double())
    token = own.pick(torch.tensor([uniform], dtype=torch.float64)).item()
    assert token == (5 if uniform < 0.5 else 6)


def test_picks_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0], dtype=torch.float64)
    draws = 20_000
    table = ShortProbs(torch.arange(5).expand(draws, -1), probs.expand(draws, -1))
    picked = table.pick((torch.arange(draws, dtype=torch.float64) + 0.5) / draws)
    shares = torch.bincount(picked, minlength=5).double() / draws
    torch.testing.assert_close(shares, probs, atol=1 / draws, rtol=0)


def test_paths_take_the_distribution_of_the_path_that_stands_for_them() -> None:
    rows = ShortProbs(torch.arange(12).view(6, 2), torch.arange(12).view(6, 2).double())
    own = rows.of_branches(torch.tensor([[0, 0, 2], [0, 1, 1]]))
    assert own.ids.tolist() == [[[0, 1], [0, 1], [4, 5]], [[6, 7], [8, 9], [8, 9]]]
