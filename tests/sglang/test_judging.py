"""Rounds of drawing, tree, verdict and SGLang's numbers, on Markov tables, many at once."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from support.g_test import g_test
from torch import Tensor

from eaglegbv.backends.sglang.judging import Acceptance, acceptance, target_dist, walk_greedily
from eaglegbv.backends.sglang.short_probs import ShortProbs
from eaglegbv.backends.sglang.topology import GrowingPaths, NumberedTree, draft_tree
from eaglegbv.verifiers.base import VerifyUniforms
from eaglegbv.verifiers.registry import make_verifier

V, LAST = 5, 0


@dataclass(frozen=True)
class Round:
    """Rounds of requests that differ in their random numbers only.

    ``target`` and ``draft`` are ``[vocab, vocab]``: the distribution after each token.
    """

    target: Tensor
    tokens: Tensor
    numbered: NumberedTree
    uniforms: VerifyUniforms

    @property
    def node_tokens(self) -> Tensor:
        """``[batch, nodes]`` in SGLang's order."""
        last = torch.full_like(self.tokens[:, 0, :1], LAST)
        return torch.cat((last, self.tokens.flatten(1)), dim=1)


def tables(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target, draft = torch.rand((2, V, V), generator=generator, dtype=torch.float64) ** 2
    return target / target.sum(1, keepdim=True), draft


def draw_round(batch: int, K: int, L: int, *, width: int = 3, seed: int = 0) -> Round:
    target, draft = tables(seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def numbers(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def after(tokens: Tensor) -> ShortProbs:
        rows = draft.log().float()[tokens.flatten()]
        return ShortProbs.of_logits(rows, torch.ones(len(rows), 1), width=width, target_ids=None)

    root = after(torch.full((batch,), LAST))
    each = ShortProbs(*(t.unsqueeze(1).expand(-1, K, -1) for t in (root.ids, root.probs)))
    paths, packed = GrowingPaths(each.pick(numbers(batch, K))), []
    for _ in range(L - 1):
        dists = after(paths.tokens[-1]).of_branches(paths.standing[-1])
        packed.append(dists.pack())
        paths.grow(dists.pick(numbers(batch, K)))
    none = torch.zeros((batch, 0, K, 2, width), dtype=torch.float64)
    inner = ShortProbs.unpack(torch.stack(packed, dim=1) if packed else none)
    tokens = torch.stack(paths.tokens, dim=1)
    tree = draft_tree(torch.full((batch,), LAST), tokens, root, inner)
    uniforms = VerifyUniforms(
        numbers(batch, L, K, 2), numbers(batch, max(1, K * L)), numbers(batch)
    )
    return Round(target, tokens, tree, uniforms)


def judge(own: Round, verifier: str, greedy: Tensor | None = None) -> Acceptance:
    dist = target_dist(own.target[own.node_tokens].float(), own.numbered)
    verdict = make_verifier(verifier).verify(own.numbered.tree, dist, own.uniforms)
    if greedy is not None:
        verdict = walk_greedily(own.numbered, dist, verdict, greedy)
    return acceptance(verdict, own.numbered)


def committed(own: Round, outcome: Acceptance, tokens: int) -> list[int]:
    """Return cells: the first ``tokens`` tokens of each round, gone on by the target's distribution."""
    generator = torch.Generator().manual_seed(9)
    batch, nodes = own.node_tokens.shape
    following = outcome.tokens.view(batch, nodes)
    at = outcome.nodes - nodes * torch.arange(batch).unsqueeze(1)
    token, cell = torch.full((batch,), LAST), torch.zeros(batch, dtype=torch.int64)
    for step in range(tokens):
        fresh = torch.multinomial(own.target[token], 1, generator=generator).squeeze(1)
        if step < at.shape[1]:
            given = following.gather(1, at[:, step : step + 1].clamp(min=0)).squeeze(1)
            fresh = torch.where(outcome.nodes[:, step] >= 0, given, fresh)
        token, cell = fresh, cell * V + fresh
    return cell.tolist()


@pytest.mark.parametrize(
    ("verifier", "K", "L"),
    [
        ("block", 1, 3),
        ("block", 1, 1),
        ("token", 1, 2),
        ("gbv", 3, 3),
        ("otbv", 3, 3),
        ("otbv", 2, 1),
        ("spectr", 3, 2),
        ("specinfer", 3, 2),
        ("traversal", 3, 2),
        ("global_resolution", 3, 2),
    ],
)
def test_three_tokens_follow_the_target(verifier: str, K: int, L: int) -> None:
    own = draw_round(50_000, K, L)
    first = own.target[LAST]
    dist = torch.einsum("a,ab,bc->abc", first, own.target, own.target).flatten().numpy()
    outcome = g_test(committed(own, judge(own, verifier), 3), dist)
    assert outcome.p_value > 1e-4, outcome
    assert outcome.power > 0.99, outcome


def test_a_wrong_draft_distribution_is_seen() -> None:
    """The test above can fail: the same rounds, with distributions that nothing was drawn from."""
    own = draw_round(50_000, 2, 2)
    tree = own.numbered.tree
    flat = torch.where(tree.draft_probs > 0, 1 / 3, 0.0)
    object.__setattr__(tree, "draft_probs", flat)
    dist = torch.einsum("a,ab,bc->abc", own.target[LAST], own.target, own.target).flatten().numpy()
    assert g_test(committed(own, judge(own, "otbv"), 3), dist).p_value < 1e-6


def test_what_is_reported_is_a_path_and_its_tokens() -> None:
    own = draw_round(300, 3, 3)
    outcome = judge(own, "otbv")
    batch, nodes = own.node_tokens.shape
    assert outcome.accepted.min() == 0
    assert outcome.accepted.max() == 3
    for b in range(batch):
        accepted = int(outcome.accepted[b])
        path = outcome.nodes[b].tolist()
        assert path[accepted + 1 :] == [-1] * (3 - accepted)
        assert path[0] == b * nodes
        for before, node in pairwise(path[: accepted + 1]):
            assert outcome.tokens[before] == own.node_tokens.flatten()[node]
        levels = [(node - b * nodes + 2) // 3 for node in path[: accepted + 1]]
        assert levels == list(range(accepted + 1))


def test_greedy_rows_are_the_targets_most_likely_tokens_and_others_are_untouched() -> None:
    own = draw_round(400, 3, 3, width=V)
    greedy = torch.arange(400) % 2 == 0
    mixed, plain = judge(own, "otbv", greedy), judge(own, "otbv")
    assert torch.equal(mixed.nodes[~greedy], plain.nodes[~greedy])
    batch, nodes = own.node_tokens.shape
    likely = own.target.argmax(1)
    walked = 0
    for b in range(0, batch, 2):
        token, node = LAST, 0
        for place in mixed.nodes[b].tolist():
            if place < 0:
                break
            node = place - b * nodes
            assert own.node_tokens[b, node] == token
            token = int(likely[token])
            assert mixed.tokens[place] == token
            walked += 1
    assert walked > batch / 2
