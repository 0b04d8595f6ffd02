"""Rounds of drawing, tree, verdict and SGLang's numbers, on Markov tables, many at once."""

import gc
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.g_test import g_test
from support.sglang_batch import Req, sampling
from torch import Tensor

from eaglegbv.backends.sglang import book as books
from eaglegbv.backends.sglang import verify
from eaglegbv.backends.sglang.book import RequestBook, seed_copies
from eaglegbv.backends.sglang.penalties import TokenCounts
from eaglegbv.backends.sglang.rounds import Acceptance, RoundBuffers, numbers_of
from eaglegbv.backends.sglang.verify import GraphJudge, TreeSampling, keep
from eaglegbv.config import Plan
from eaglegbv.cuda_graphs import NotRecordable, Recorder
from eaglegbv.rng import Purpose, RequestRng, request_seed
from eaglegbv.sampling import SamplingParams, WarpSettings, warp
from eaglegbv.verifiers.paths import Residual, draw_residual

V, LAST = 5, 0


@dataclass(frozen=True)
class Drafts:
    """Trees of requests that differ in their random numbers only.

    ``target`` and ``draft`` are ``[vocab, vocab]``: the distribution after each token.
    """

    target: Tensor
    node_tokens: Tensor  # [batch, nodes] in SGLang's order
    buffers: RoundBuffers

    @property
    def probs(self) -> Tensor:
        """``[batch, nodes, vocab]``, as SGLang would compute them."""
        return self.target[self.node_tokens].float()

    @property
    def joint(self) -> NDArray[np.float64]:
        """``[vocab ** 3]``, of the next three tokens."""
        p = self.target
        return np.asarray(torch.einsum("a,ab,bc->abc", p[LAST], p, p).flatten())


def tables(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target, draft = torch.rand((2, V, V), generator=generator, dtype=torch.float64) ** 2
    return target / target.sum(1, keepdim=True), draft


def draw_trees(
    batch: int, K: int, L: int, *, width: int = 3, seed: int = 0, verifier: str = "otbv"
) -> Drafts:
    target, draft = tables(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    plan = Plan(verifier=verifier, paths=K, depth=L, draft_width=width)
    buffers = RoundBuffers(plan, batch, torch.zeros(batch, V), torch.arange(V))
    uniforms = torch.rand(batch, numbers_of(plan), generator=generator, dtype=torch.float64)
    buffers.load(uniforms, sampling(torch.ones(batch, 1), None))
    last, slots = torch.full((batch, 1), LAST), torch.arange(batch)
    buffers.keep_roots(slots, draft.log()[last.flatten()])
    *_, tokens = buffers.grow(slots, lambda tokens, _: draft.log()[tokens.flatten()])
    return Drafts(target, torch.cat((last, tokens), dim=1), buffers)


def graph_judge(own: Drafts, recorder: Recorder | None = None) -> GraphJudge:
    batch = len(own.node_tokens)
    judge = GraphJudge(own.buffers, torch.zeros(own.node_tokens.numel(), V), batch)
    judge.record(recorder or Recorder())
    return judge


def judge(own: Drafts) -> Acceptance:
    judging = graph_judge(own)
    batch = len(own.node_tokens)
    judging.space(batch).copy_(own.probs)
    return judging.accept(batch)


def committed(own: Drafts, outcome: Acceptance, tokens: int) -> list[int]:
    """Return cells: the first ``tokens`` tokens of each round, gone on by the target."""
    generator = torch.Generator().manual_seed(9)
    batch, nodes = own.node_tokens.shape
    following = outcome.tokens
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
def test_three_tokens_follow_the_target(verifier, K, L):
    own = draw_trees(50_000, K, L, verifier=verifier)
    outcome = g_test(committed(own, judge(own), 3), own.joint)
    assert outcome.p_value > 1e-4, outcome
    assert outcome.power > 0.99, outcome


def test_a_wrong_draft_distribution_is_seen():
    """The test above can fail: the same rounds, with distributions that nothing was drawn from."""
    own = draw_trees(50_000, 2, 2)
    own.buffers.tree.draft_probs[:] = 1 / 3
    assert g_test(committed(own, judge(own), 3), own.joint).p_value < 1e-6


def test_what_is_reported_is_a_path_and_its_tokens():
    own = draw_trees(300, 3, 3)
    outcome = judge(own)
    batch, nodes = own.node_tokens.shape
    assert outcome.lengths.min() == 1
    assert outcome.lengths.max() == 4
    for b in range(batch):
        accepted = int(outcome.lengths[b]) - 1
        path = outcome.nodes[b].tolist()
        assert path[accepted + 1 :] == [-1] * (3 - accepted)
        assert path[0] == b * nodes
        for before, node in pairwise(path[: accepted + 1]):
            assert outcome.tokens.flatten()[before] == own.node_tokens.flatten()[node]
        levels = own.buffers.tree.depth.flatten()[path[: accepted + 1]].tolist()
        assert levels == list(range(accepted + 1))


@pytest.mark.parametrize("verifier", ["otbv", "gbv", "spectr"])
def test_a_request_is_judged_alike_in_every_bucket(verifier):
    """In rows after the batch there is what an earlier round left."""
    own = draw_trees(11, 3, 3, verifier=verifier)
    judge = graph_judge(own)
    judge.space(11).copy_(own.probs)
    whole = Acceptance(*(table.clone() for table in judge.accept(11)))
    for batch in (1, 2, 3, 5, 8, 10):
        judge.space(batch).copy_(own.probs[:batch])
        fewer = judge.accept(batch)
        assert torch.equal(fewer.nodes, whole.nodes[:batch])
        assert torch.equal(fewer.tokens, whole.tokens[:batch])
        assert torch.equal(fewer.lengths, whole.lengths[:batch])


def test_what_cannot_be_recorded_runs_as_it_is():
    own, nothing = draw_trees(6, 2, 2), Mock(**{"record.side_effect": NotRecordable("a test")})
    unrecorded = graph_judge(own, nothing)
    unrecorded.space(6).copy_(own.probs)
    assert torch.equal(unrecorded.accept(6).nodes, judge(own).nodes)


@pytest.mark.parametrize("vocab", [50, 9000])
def test_tokens_of_float32_probabilities_are_those_of_float64(vocab):
    """No copy of the vocabulary in float64: the residual is drawn from where it is."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(400, vocab, generator=generator).softmax(1)
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:8] for _ in range(400)])
    weight, uniforms = torch.rand((2, 400), generator=generator, dtype=torch.float64)
    drafts = probs.gather(1, ids).double() * torch.rand(400, 8, generator=generator) * 2
    residual = Residual(torch.zeros(400, dtype=torch.int64), weight, ids, drafts)
    single = draw_residual(probs.clone(), residual, uniforms)
    double = draw_residual(probs.double(), residual, uniforms)
    # They part only where a number falls between two tokens.
    assert (single == double).float().mean() > 0.99


def round_of(own: Drafts, greedy: Tensor | None) -> tuple[SimpleNamespace, ...]:
    """What SGLang's ``eagle_sample`` is given, at temperature 2."""
    batch, nodes = own.node_tokens.shape
    settings = sampling(torch.full((batch, 1), 2.0), greedy)
    names = ("index", "next_token", "next_sibling")
    drafted = SimpleNamespace(
        draft_token=own.node_tokens.flatten(),
        draft_token_num=nodes,
        max_tree_depth=own.buffers.plan.depth + 1,
        **{f"retrieve_{name}": own.node_tokens for name in names},
    )
    mode = SimpleNamespace(is_idle=lambda: False)
    output = SimpleNamespace(next_token_logits=own.probs.flatten(0, 1).log() * 2)
    return drafted, SimpleNamespace(sampling_info=settings, forward_mode=mode), output


def walked(predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, **_: Tensor) -> None:
    """SGLang's greedy kernel, which says the same of every tree."""
    predicts.fill_(77)
    accept_index.fill_(5)
    accept_token_num.fill_(2)


@pytest.mark.parametrize("greedy", [None, torch.arange(40) % 2 == 0])
def test_greedy_trees_are_judged_by_sglangs_kernel_and_others_by_ours(greedy, monkeypatch):
    monkeypatch.setattr(verify, "_share", lambda *_: None)
    own = draw_trees(40, 3, 3)
    plain = judge(own)
    drafted, batch, output = round_of(own, greedy)
    sample = TreeSampling(Mock(return_value="SGLang's own"), walked, TokenCounts(V, "cpu"))
    assert sample(drafted, batch, output)[0] == "S"
    sample.judge = graph_judge(own)
    predicts, lengths, path = sample(drafted, batch, output)
    rows = torch.zeros(40, dtype=torch.bool) if greedy is None else greedy
    assert torch.equal(path[~rows], plain.nodes[~rows])
    assert torch.equal(lengths[~rows], plain.lengths[~rows])
    assert torch.equal(predicts.view(40, 10)[~rows], plain.tokens[~rows])
    assert (path[rows] == 5).all()
    assert (lengths[rows] == 3).all()
    assert (predicts.view(40, 10)[rows] == 77).all()


# Top-k, top-p and min-p on probabilities, against the same on logits.

ROWS = torch.randn(50, 30, generator=torch.Generator().manual_seed(0)) * 2


@pytest.mark.parametrize(
    ("name", "limits"),
    [("top_k", [1, 2, 7, 30]), ("top_p", [0.01, 0.5, 0.9, 1.0]), ("min_p", [0.0, 0.1, 1.0])],
)
def test_limits_on_probabilities_are_those_on_logits(name, limits):
    for limit in limits:
        kept = keep(ROWS.softmax(1), **{name: torch.full((len(ROWS),), limit)})
        settings = WarpSettings.of([SamplingParams(**{name: limit})], [len(ROWS)])
        torch.testing.assert_close(kept, warp(ROWS, settings).softmax(dim=1))


def test_top_k_beyond_the_vocabulary_keeps_all():
    kept = keep(ROWS.softmax(1), top_k=torch.full((len(ROWS),), 2**30, dtype=torch.int32))
    torch.testing.assert_close(kept, ROWS.softmax(1))


# Random numbers belong to requests: seeded, in step, and forgotten with them.

PLAN = Plan(paths=2, depth=3)


def test_a_seed_fixes_the_numbers_in_any_company():
    alone, crowd = RequestBook(PLAN, 0), RequestBook(PLAN, 5)
    one, other = Req(9), Req(9)
    numbers = alone.uniforms([one], 25)
    assert numbers.shape == (1, 25)
    assert torch.equal(crowd.uniforms([Req(), Req(3), other], 25)[2], numbers[0])
    pairs = ((alone, one), (crowd, other))
    one_each = (book.uniforms([request], 1, Purpose.CORRECTION) for book, request in pairs)
    assert torch.equal(*one_each)


def test_requests_without_a_seed_are_numbered_in_the_order_seen():
    book = RequestBook(PLAN, 17)
    first, second = Req(), Req()
    seeds = [own.rng.seed for own in book.of([first, Req(-5), second])]
    # A signed seed is the same 64 bits.
    assert seeds == [request_seed(17, 0), 2**64 - 5, request_seed(17, 1)]
    assert [own.rng.seed for own in book.of([second, first])] == [seeds[2], seeds[0]]


def test_replicas_draw_other_numbers_unless_a_seed_is_given():
    alone, *replicas = (RequestBook(PLAN, 17, replica=r) for r in (None, 0, 1))
    books = [alone, *replicas]
    drawn = [tuple(book.uniforms([Req()], 25).flatten().tolist()) for book in books]
    assert len(set(drawn)) == 3
    seeded = [tuple(book.uniforms([Req(4)], 25).flatten().tolist()) for book in books]
    assert len(set(seeded)) == 1


def test_copies_of_a_request_get_seeds_of_their_own(monkeypatch):
    monkeypatch.setattr(books, "ours", lambda: True)

    def seeds(n: int, seed: int | None = 9) -> list[int | None]:
        shared = SimpleNamespace(n=n, sampling_seed=seed)
        copies = [SimpleNamespace(sampling_params=shared) for _ in range(n)]
        for one in copies:
            seed_copies(lambda manager, tokenized: None, None, one)
        return [one.sampling_params.sampling_seed for one in copies]

    assert len({*seeds(4)}) == 4
    assert seeds(4)[-2:] == seeds(2)
    assert seeds(1) == [9]
    assert seeds(3, None) == [None] * 3
    assert all(-(2**63) <= seed < 2**63 for seed in seeds(4, -5))


def test_no_number_is_used_twice():
    book, request = RequestBook(PLAN, 0), Req(4)
    before = book.uniforms([request], 25)
    assert torch.equal(book.uniforms([request], 25), before)
    book.advance([request])
    after = book.uniforms([request], 25).flatten()
    assert not set(after.tolist()) & set(before.flatten().tolist())
    expected = RequestRng(4).draw(1, Purpose.DRAFT, 25)
    assert after.tolist() == expected.tolist()


def test_requests_are_forgotten_with_sglangs_own_and_share_no_number():
    book, gone, kept = RequestBook(PLAN, 0), Req(), Req()
    book.of([gone, kept])
    del gone
    gc.collect()
    assert len(book._records) == 1
    assert len({own.number for own in book.of([kept, Req(), Req(5)])}) == 3
