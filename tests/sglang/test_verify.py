"""Rounds of drawing, tree, verdict and SGLang's numbers, on Markov tables, many at once."""

import gc
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from support.g_test import g_test
from torch import Tensor

from eaglegbv.backends.sglang import verify
from eaglegbv.backends.sglang.tree_layout import GrowingPaths, NumberedTree, ShortProbs, draft_tree
from eaglegbv.backends.sglang.verify import (
    Acceptance,
    RequestBook,
    acceptance,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    target_probs,
    walk_greedily,
)
from eaglegbv.config import Plan
from eaglegbv.rng import Purpose, RequestRng, request_seed
from eaglegbv.sampling import SamplingParams, WarpSettings, warp
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
        probs = after(paths.tokens[-1]).of_branches(paths.standing[-1])
        packed.append(probs.pack())
        paths.grow(probs.pick(numbers(batch, K)))
    none = torch.zeros((batch, 0, K, 2, width), dtype=torch.float64)
    inner = torch.stack(packed, dim=1) if packed else none
    tokens = torch.stack(paths.tokens, dim=1)
    tree = draft_tree(torch.full((batch,), LAST), tokens, root, inner)
    uniforms = VerifyUniforms(
        numbers(batch, L, K, 2), numbers(batch, max(1, K * L)), numbers(batch)
    )
    return Round(target, tokens, tree, uniforms)


def judge(own: Round, verifier: str, greedy: Tensor | None = None) -> Acceptance:
    target = target_probs(own.target[own.node_tokens].float(), own.numbered)
    verdict = make_verifier(verifier).verify(own.numbered.tree, target, own.uniforms)
    if greedy is not None:
        verdict = walk_greedily(own.numbered, target, verdict, greedy)
    return acceptance(verdict, own.numbered)


def committed(own: Round, outcome: Acceptance, tokens: int) -> list[int]:
    """Return cells: the first ``tokens`` tokens of each round, gone on by the target."""
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
        ("target_only", 3, 2),
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


# Top-k, top-p and min-p on probabilities, against the same on logits.

ROWS = torch.randn(50, 30, generator=torch.Generator().manual_seed(0)) * 2


def warped(**params: float) -> torch.Tensor:
    own = [SamplingParams(**params)]  # type: ignore[arg-type]
    return warp(ROWS, WarpSettings.of(own, [len(ROWS)])).softmax(dim=1)


@pytest.mark.parametrize("top_k", [1, 2, 7, 30])
def test_top_k(top_k: int) -> None:
    kept = keep_top_k(ROWS.softmax(1), torch.full((len(ROWS),), top_k, dtype=torch.int32))
    torch.testing.assert_close(kept, warped(top_k=top_k))


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    kept = keep_top_k(ROWS.softmax(1), torch.full((len(ROWS),), 2**30, dtype=torch.int32))
    torch.testing.assert_close(kept, ROWS.softmax(1))


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 1.0])
def test_top_p(top_p: float) -> None:
    kept = keep_top_p(ROWS.softmax(1), torch.full((len(ROWS),), top_p))
    torch.testing.assert_close(kept, warped(top_p=top_p))


@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_min_p(min_p: float) -> None:
    kept = keep_min_p(ROWS.softmax(1), torch.full((len(ROWS),), min_p))
    torch.testing.assert_close(kept, warped(min_p=min_p))


# Random numbers belong to requests: seeded, in step, and forgotten with them.

PLAN = Plan(paths=2, depth=3)


class Req:
    """What is read of SGLang's requests."""

    def __init__(self, seed: int | None = None) -> None:
        self.sampling_params = SimpleNamespace(sampling_seed=seed)
        self.origin_input_ids = [1, 2, 3]


def test_a_seed_fixes_the_numbers_in_any_company() -> None:
    alone, crowd = RequestBook(PLAN, 0), RequestBook(PLAN, 5)
    one, other = Req(9), Req(9)
    numbers = alone.draft_uniforms([one])
    assert numbers.shape == (1, 2, 3)
    assert torch.equal(crowd.draft_uniforms([Req(), Req(3), other])[2], numbers[0])
    assert torch.equal(alone.token_uniforms([one]), crowd.token_uniforms([other]))


def test_signed_seeds_are_the_same_64_bits() -> None:
    [own] = RequestBook(PLAN, 0).of([Req(-5)])
    assert own.rng == RequestRng(2**64 - 5)


def test_requests_without_a_seed_are_numbered_in_the_order_seen() -> None:
    book = RequestBook(PLAN, 17)
    first, second = Req(), Req()
    seeds = [own.rng.seed for own in book.of([first, Req(1), second])]
    assert seeds == [request_seed(17, 0), 1, request_seed(17, 1)]
    assert [own.rng.seed for own in book.of([second, first])] == [seeds[2], seeds[0]]


def test_replicas_draw_other_numbers_unless_a_seed_is_given() -> None:
    alone, *replicas = (RequestBook(PLAN, 17, replica=r) for r in (None, 0, 1))
    books = [alone, *replicas]
    drawn = [tuple(book.draft_uniforms([Req()]).flatten().tolist()) for book in books]
    assert len(set(drawn)) == 3
    seeded = [tuple(book.draft_uniforms([Req(4)]).flatten().tolist()) for book in books]
    assert len(set(seeded)) == 1


def test_copies_of_a_request_get_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "ours", lambda: True)

    def seeds(n: int, seed: int | None = 9) -> list[int | None]:
        shared = SimpleNamespace(n=n, sampling_seed=seed)
        copies = [SimpleNamespace(sampling_params=shared) for _ in range(n)]
        for one in copies:
            verify.seed_copies(lambda manager, tokenized: None, None, one)
        return [one.sampling_params.sampling_seed for one in copies]

    assert len({*seeds(4)}) == 4
    assert seeds(4)[-2:] == seeds(2)
    assert seeds(1) == [9]
    assert seeds(3, None) == [None] * 3
    assert all(-(2**63) <= seed < 2**63 for seed in seeds(4, -5))


def test_no_number_is_used_twice() -> None:
    book, request = RequestBook(PLAN, 0), Req(4)
    before = book.draft_uniforms([request])
    assert torch.equal(book.draft_uniforms([request]), before)
    book.advance([request])
    after = book.draft_uniforms([request]).flatten()
    assert not set(after.tolist()) & set(before.flatten().tolist())
    expected = RequestRng(4).draw(1, Purpose.DRAFT, 6)
    assert after.tolist() == expected.tolist()


def test_requests_are_forgotten_with_sglangs_own() -> None:
    book, kept = RequestBook(PLAN, 0), Req(1)
    book.of([kept, Req(2)])
    gc.collect()
    assert len(book._records) == 1


def test_no_two_requests_share_a_number() -> None:
    book, gone, kept = RequestBook(PLAN, 0), Req(), Req()
    book.of([gone, kept])
    del gone
    gc.collect()
    numbers = [own.number for own in book.of([kept, Req(), Req(5)])]
    assert len(set(numbers)) == 3
