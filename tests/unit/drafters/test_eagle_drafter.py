"""The EAGLE drafter against a plain recomputation of its head over the whole text.

The plain head has neither pages nor caches and runs in float64; the drafter runs in float32, where
logits of size 10 are right to a few 1e-6, and so are probabilities: 1e-5 is asked for.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from support.drafting import VOCAB, Pair, Session, random_pair
from support.token_drafting import advance, full_probs, inner_nodes, prefix_of, text_of
from support.tree_check import check_tree
from torch import Tensor

from eaglegbv.config import Plan
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.request import DraftSnapshot, Request
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling, DraftTree

ATOL = 2e-5  # float32 through two layers, rows added up in another order
PLAN = Plan(paths=3, depth=4, draft_width=VOCAB)
PROMPT = [5, 17, 3, 3, 28, 9]
# How many drafted tokens each step's commit accepts: none, some, all.
ACCEPTED = [0, 2, 4, 1, 3]


@pytest.fixture(scope="module", params=["eagle1", "eagle3", "eagle3 reduced"])
def pair(request) -> Pair:
    if request.param == "eagle3 reduced":
        return random_pair(Arch.EAGLE3, draft_vocab=15)
    return random_pair(Arch(request.param))


def expected_probs(pair: Pair, text, drafted, *, temperature=1.0, width=VOCAB) -> np.ndarray:
    """The plain head's distribution, tempered and cut to its most likely tokens."""
    scores = pair.log_probs(text, drafted)
    kept = np.argsort(-scores)[:width]
    weights = np.exp((scores[kept] - scores[kept].max()) / temperature)
    dist = np.zeros(VOCAB)
    dist[pair.head.draft_to_target[kept].numpy()] = weights / weights.sum()
    return dist


def check_samplings(pair: Pair, tree: DraftTree, b: int, text, **settings) -> None:
    for node in inner_nodes(tree, b):
        expected = expected_probs(pair, text, prefix_of(tree, b, node), **settings)
        np.testing.assert_allclose(full_probs(tree, b, node, VOCAB), expected, atol=ATOL, rtol=0)


def best_first_prefixes(pair: Pair, text, plan: Plan) -> set[tuple[int, ...]]:
    """EAGLE-2's tree by its definition, from the plain head."""
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    expanded: list[tuple[int, ...]] = [()]
    for _ in range(plan.depth):
        children = {}
        for prefix in expanded:
            log_probs = pair.log_probs(text, prefix)
            for index in np.argsort(-log_probs)[: plan.paths]:
                token = int(pair.head.draft_to_target[index])
                children[(*prefix, token)] = scores[prefix] + log_probs[index]
        scores |= children
        expanded = sorted(children, key=children.__getitem__, reverse=True)[: plan.paths]
    del scores[()]
    best = sorted(scores, key=scores.__getitem__, reverse=True)
    return {(), *best[: plan.paths * plan.depth]}


def test_the_pair_can_tell_right_from_wrong(pair):
    # If they did not depend on the text, its order and the drafted tokens, nothing below would test
    # anything.
    text = [*PROMPT, 11]
    dist = expected_probs(pair, text, [4, 8])
    for other in (
        expected_probs(pair, text, [4]),
        expected_probs(pair, text, [8, 8]),
        expected_probs(pair, [*text, 4], [8]),  # true features instead of drafted ones
        expected_probs(pair, [PROMPT[1], PROMPT[0], *text[2:]], [4, 8]),
    ):
        assert np.abs(dist - other).sum() > 0.02
    assert 1e-3 < np.sort(dist)[-2] < 0.5


SAMPLED = [DraftSampling.IID, DraftSampling.WOR, DraftSampling.GREEDY, DraftSampling.HUB]


@pytest.mark.parametrize("draft_sampling", SAMPLED)
def test_sampled_trees_carry_the_heads_distributions_over_several_commits(pair, draft_sampling):
    session = Session(pair)
    request = session.start(PROMPT, 11, PLAN, seed=3)
    assert draft_sampling in session.drafter.draft_samplings
    for accepted in ACCEPTED:
        tree = session.draft([request], draft_sampling)
        check_tree(tree)
        assert tree.draft_sampling is draft_sampling
        assert tree.length == int(tree.path_lengths.max()) == PLAN.depth
        assert int(tree.token_ids[0, 0]) == request.token_ids[-1]
        if draft_sampling is not DraftSampling.IID:  # whose paths may share nodes
            each = 2 if draft_sampling is DraftSampling.HUB else PLAN.paths
            assert int(tree.num_nodes[0]) == 1 + PLAN.depth * each
        check_samplings(pair, tree, 0, text_of(request))
        advance(session, request, tree, 0, accepted, VOCAB)


def test_fixed_trees_are_the_best_nodes_over_several_commits(pair):
    session = Session(pair)
    request = session.start(PROMPT, 11, PLAN)
    for accepted in ACCEPTED:
        tree = session.draft([request], DraftSampling.FIXED)
        check_tree(tree)
        assert tree.draft_sampling is DraftSampling.FIXED
        assert tree.width == 0
        drafted = {tuple(prefix_of(tree, 0, n)) for n in range(int(tree.num_nodes[0]))}
        assert drafted == best_first_prefixes(pair, text_of(request), PLAN)
        advance(session, request, tree, 0, accepted, VOCAB)


def all_full_probs(tree: DraftTree) -> torch.Tensor:
    dists = [
        [full_probs(tree, b, n, VOCAB) for n in range(int(tree.num_nodes[b]))]
        for b in range(tree.batch)
    ]
    return torch.from_numpy(np.array(dists))


@pytest.mark.parametrize("draft_sampling", list(DraftSampling))
def test_two_requests_together_get_what_each_gets_alone(pair, draft_sampling):
    starts = [(PROMPT, 11, 3), ([1, 2], 30, 4), ([8] * 9, 0, 5)]
    together = Session(pair)
    alone = [Session(pair) for _ in starts]
    params = [SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(top_p=0.8)]
    batch = [
        together.start(prompt, first, PLAN, params=p, seed=seed)
        for (prompt, first, seed), p in zip(starts, params, strict=True)
    ]
    single = [
        session.start(prompt, first, PLAN, params=p, seed=seed)
        for session, (prompt, first, seed), p in zip(alone, starts, params, strict=True)
    ]
    for accepted in ACCEPTED:
        both = together.draft(batch, draft_sampling)
        check_tree(both)
        for b, (session, request) in enumerate(zip(alone, single, strict=True)):
            own = session.draft([request], draft_sampling)
            nodes = int(own.num_nodes[0])
            assert int(both.num_nodes[b]) == nodes
            for name in ("token_ids", "parents", "depth"):
                assert torch.equal(getattr(both, name)[b, :nodes], getattr(own, name)[0, :nodes])
            for node in inner_nodes(own, 0):
                np.testing.assert_allclose(
                    full_probs(both, b, node, VOCAB),
                    full_probs(own, 0, node, VOCAB),
                    atol=ATOL,
                    rtol=0,
                )
            # Requests advance by different numbers of tokens.
            take = (accepted + b) % 5
            advance(session, request, own, 0, take, VOCAB)
            advance(together, batch[b], both, b, take, VOCAB)
            assert text_of(batch[b]) == text_of(request)


def test_distributions_have_the_plans_width_and_draft_temperature(pair):
    session = Session(pair)
    plan = Plan(paths=3, depth=4, draft_width=10, draft_temperature=1.6)
    request = session.start(PROMPT, 11, plan, params=SamplingParams(temperature=0.5))
    tree = session.draft([request], DraftSampling.IID)
    assert tree.width == 10
    check_samplings(pair, tree, 0, text_of(request), temperature=0.8, width=10)


def begun_at(first: int, request: Request, pair: Pair) -> tuple[Session, Request]:
    """A session whose request has the text of ``request`` from position ``first`` on alone."""
    session, text = Session(pair), text_of(request)
    short = session.start(text[first:-1], text[-1], request.plan, seed=3, observe=False)
    short.step = request.step
    session.drafter.observe(short, pair.features(text[:-1])[first:])
    return session, short


@pytest.mark.parametrize("paths", [1, 3])
def test_what_was_skipped_is_as_if_the_text_began_later(pair, paths):
    session = Session(pair)
    plan = Plan(paths=paths, depth=4, draft_width=VOCAB)
    request = session.start(PROMPT, 11, plan, seed=3, observe=False)
    for piece in pair.features(PROMPT).split([1, 3, 2]):
        session.drafter.observe(request, piece)
    session.drafter.skip(request, keep=4)
    for accepted in (2, 0, 4):
        tree = session.draft([request], DraftSampling.IID)
        other, short = begun_at(2, request, pair)
        expected = other.draft([short], DraftSampling.IID)
        assert torch.equal(tree.token_ids, expected.token_ids)
        torch.testing.assert_close(
            all_full_probs(tree), all_full_probs(expected), atol=ATOL, rtol=0
        )
        # The beginning does matter to the head.
        whole, same = begun_at(0, request, pair)
        others = whole.draft([same], DraftSampling.IID)
        assert not torch.allclose(
            all_full_probs(tree)[:, :1], all_full_probs(others)[:, :1], atol=1e-3
        )
        advance(session, request, tree, 0, accepted, VOCAB)


def test_a_forgotten_request_starts_anew(pair):
    session = Session(pair)
    request = session.start(PROMPT, 11, PLAN)
    session.drafter.catch_up([request])
    session.drafter.forget(request)
    assert not request.draft_states
    with pytest.raises(RuntimeError, match="request 0 drafts before any feature was observed"):
        session.draft([request], DraftSampling.IID)


# --- draft replay: what an earlier step would have drawn
#
# The plain head reads the text up to that step's root on true features, and what was committed
# since on its own features.

SHORT = Plan(paths=2, depth=4, draft_width=VOCAB)
BEYOND = [31, 2]
"""Tokens a path goes on by, of no tree."""


def replayed(session: Session, snapshots: Sequence[DraftSnapshot]) -> Tensor:
    found = session.drafter.probs_at(snapshots)
    full = torch.zeros((len(snapshots), VOCAB), dtype=torch.float64)
    return full.scatter_add_(1, found.ids, found.probs)


def follow(
    session: Session, request: Request, snapshot: DraftSnapshot, tokens: Sequence[int]
) -> list[Tensor]:
    """The distributions after none, one, ... all of the tokens."""
    slots = session.allocator.allocate(len(tokens))
    dists = [replayed(session, [snapshot])[0]]
    for token, slot in zip(tokens, slots.split(1), strict=True):
        [snapshot] = session.drafter.advance([request], [snapshot], torch.tensor([token]), slot)
        dists.append(replayed(session, [snapshot])[0])
    session.allocator.release(slots)
    return dists


def step(session: Session, request: Request, accepted: int) -> DraftSnapshot:
    """Draft, remember, and commit the first nodes of the first path and a token more."""
    tree = session.draft([request], DraftSampling.IID)
    snapshot = session.drafter.snapshot(request)
    nodes = tree.path_nodes[0, 0, :accepted].tolist()
    correction = (7 * request.step + 3) % VOCAB
    session.commit(request, [*tree.token_ids[0, nodes].tolist(), correction], nodes)
    return snapshot


def test_replayed_distributions_continue_their_own_step_whatever_came_after(pair):
    session = Session(pair)
    request = session.start(PROMPT, 11, SHORT)
    kept: list[tuple[list[int], DraftSnapshot]] = []
    far = 0.0
    for accepted in (1, 0, 2, 0):
        root = text_of(request)
        kept.append((root, step(session, request, accepted)))
        for text, snapshot in kept:
            since = [*text_of(request)[len(text) :], *BEYOND]
            dists = follow(session, request, snapshot, since)
            for end, found in enumerate(dists):
                expected = expected_probs(pair, text, since[:end])
                np.testing.assert_allclose(found, expected, atol=ATOL, rtol=0)
        # On true features the same text has another distribution.
        current = expected_probs(pair, [*root, *since[: accepted + 1]], [])
        far = max(far, 0.5 * float(np.abs(dists[accepted + 1].numpy() - current).sum()))
    assert far > 0.02


def test_a_snapshot_keeps_its_steps_own_settings(pair):
    session = Session(pair)
    params = SamplingParams(temperature=0.8)
    request = session.start(PROMPT, 11, SHORT, params=params)
    request.plan = msgspec.structs.replace(SHORT, draft_temperature=1.5, draft_width=7)
    text = text_of(request)
    old = step(session, request, 0)
    request.plan = msgspec.structs.replace(SHORT, draft_temperature=0.5, draft_width=11)
    new_text = text_of(request)
    new = step(session, request, 1)
    dists = replayed(session, [old, new])
    hot = expected_probs(pair, text, [], temperature=1.2, width=7)
    cold = expected_probs(pair, new_text, [], temperature=0.4, width=11)
    np.testing.assert_allclose(dists, np.stack((hot, cold)), atol=ATOL, rtol=0)


def test_snapshots_of_several_requests_go_on_together(pair):
    session = Session(pair)
    requests = [session.start(PROMPT[: 3 + n], 11, SHORT, seed=n) for n in range(3)]
    snapshots = []
    for request in requests:
        snapshots.append(step(session, request, request.number))
        snapshots.append(step(session, request, 0))
    owners = [request for request in requests for _ in range(2)]
    tokens = torch.tensor([4, 8, 15, 16, 23, 39])
    slots = session.allocator.allocate(12)
    once = session.drafter.advance(owners, snapshots, tokens, slots[:6])
    twice = session.drafter.advance(owners, once, tokens.flip(0), slots[6:])
    together = replayed(session, twice)
    session.allocator.release(slots)
    for n, (owner, snapshot) in enumerate(zip(owners, snapshots, strict=True)):
        alone = follow(session, owner, snapshot, [int(tokens[n]), int(tokens[5 - n])])
        np.testing.assert_allclose(together[n], alone[-1], atol=ATOL, rtol=0)


def test_a_text_whose_beginning_was_skipped_is_not_recalled(pair):
    session = Session(pair)
    request = session.start(PROMPT, 11, PLAN)
    session.drafter.skip(request, keep=3)
    session.draft([request], DraftSampling.IID)
    with pytest.raises(RuntimeError, match="request 0 is recalled, its beginning skipped"):
        session.drafter.snapshot(request)


def test_a_snapshot_of_another_drafter_is_refused(pair):
    session = Session(pair)
    with pytest.raises(TypeError, match="a snapshot belongs to another drafter"):
        session.drafter.probs_at([DraftSnapshot()])
