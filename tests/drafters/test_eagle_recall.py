"""What an EAGLE drafter says an earlier step would have drawn, against the plain head.

The plain head reads the text up to that step's root on true features, and what was committed since
on its own features.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from support.drafting import VOCAB, Pair, Session, random_pair, text_of
from torch import Tensor

from eaglegbv.config import Plan
from eaglegbv.drafters.eagle import EagleDrafter
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.request import DraftSnapshot, Request
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling

ATOL = 1e-5
PROMPT = [5, 17, 3, 3, 28, 9]
PLAN = Plan(paths=2, depth=4, draft_width=VOCAB)
BEYOND = [31, 2]
"""Tokens a path goes on by, of no tree."""


@pytest.fixture(scope="module", params=["eagle1", "eagle3", "eagle3 reduced"])
def pair(request) -> Pair:
    if request.param == "eagle3 reduced":
        return random_pair(Arch.EAGLE3, draft_vocab=15)
    return random_pair(Arch(request.param))


def expected_probs(pair: Pair, text: Sequence[int], since: Sequence[int], params, width) -> Tensor:
    """The plain head's distribution, warped by its temperature and cut to its most likely tokens."""
    scores = torch.from_numpy(pair.log_probs(text, since))
    values, kept = scores.topk(min(width, len(scores)))
    dist = torch.zeros(VOCAB, dtype=torch.float64)
    dist[pair.head.draft_to_target[kept]] = (values / params.temperature).softmax(dim=0)
    return dist


def all_full_probs(drafter: EagleDrafter, snapshots: Sequence[DraftSnapshot]) -> Tensor:
    draft_samplings = drafter.probs_at(snapshots)
    full = torch.zeros((len(snapshots), VOCAB), dtype=torch.float64)
    return full.scatter_add_(1, draft_samplings.ids, draft_samplings.probs)


def follow(
    session: Session, request: Request, snapshot: DraftSnapshot, tokens: Sequence[int]
) -> list[Tensor]:
    """The distributions after none, one, ... all of the tokens."""
    slots = session.allocator.allocate(len(tokens))
    dists = [all_full_probs(session.drafter, [snapshot])[0]]
    for token, slot in zip(tokens, slots.split(1), strict=True):
        [snapshot] = session.drafter.advance([request], [snapshot], torch.tensor([token]), slot)
        dists.append(all_full_probs(session.drafter, [snapshot])[0])
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


def test_recalled_distributions_are_those_of_the_tree_itself(pair):
    session = Session(pair)
    request = session.start(PROMPT, 11, PLAN)
    tree = session.draft([request], DraftSampling.IID)
    nodes = tree.path_nodes[0, 0].tolist()
    tokens = tree.token_ids[0, nodes].tolist()
    dists = follow(session, request, session.drafter.snapshot(request), tokens[:-1])
    for node, draft_sampling in zip([0, *nodes[:-1]], dists, strict=True):
        drawn = torch.zeros(VOCAB, dtype=torch.float64)
        drawn.scatter_add_(0, tree.draft_ids[0, node], tree.draft_probs[0, node])
        torch.testing.assert_close(draft_sampling, drawn, atol=ATOL, rtol=0)


def test_recalled_distributions_continue_their_own_step_whatever_came_after(pair):
    session = Session(pair)
    request = session.start(PROMPT, 11, PLAN)
    kept: list[tuple[list[int], DraftSnapshot]] = []
    far = 0.0
    for accepted in (1, 0, 2, 0):
        root = text_of(request)
        kept.append((root, step(session, request, accepted)))
        for text, snapshot in kept:
            since = [*text_of(request)[len(text) :], *BEYOND]
            dists = follow(session, request, snapshot, since)
            for end, draft_sampling in enumerate(dists):
                expected = expected_probs(pair, text, since[:end], request.params, VOCAB)
                torch.testing.assert_close(draft_sampling, expected, atol=ATOL, rtol=0)
        # On true features the same text has another distribution.
        current = expected_probs(pair, [*root, *since[: accepted + 1]], [], request.params, VOCAB)
        far = max(far, 0.5 * float((dists[accepted + 1] - current).abs().sum()))
    assert far > 0.02


def test_recalling_leaves_the_next_drafts_alone(pair):
    trees = []
    for recalls in (False, True):
        session = Session(pair)
        request = session.start(PROMPT, 11, PLAN, seed=4)
        snapshot = step(session, request, 1)
        if recalls:
            follow(session, request, snapshot, [*request.token_ids[1:], *BEYOND])
        step(session, request, 0)
        trees.append(session.draft([request], DraftSampling.IID))
    assert torch.equal(trees[0].token_ids, trees[1].token_ids)
    torch.testing.assert_close(trees[0].draft_probs, trees[1].draft_probs, atol=ATOL, rtol=0)


def test_a_snapshot_keeps_its_steps_own_settings(pair):
    session = Session(pair)
    params = SamplingParams(temperature=0.8)
    request = session.start(PROMPT, 11, PLAN, params=params)
    request.plan = msgspec.structs.replace(PLAN, draft_temperature=1.5, draft_width=7)
    text = text_of(request)
    old = step(session, request, 0)
    request.plan = msgspec.structs.replace(PLAN, draft_temperature=0.5, draft_width=11)
    new_text = text_of(request)
    new = step(session, request, 1)
    dists = all_full_probs(session.drafter, [old, new])
    hot = expected_probs(pair, text, [], SamplingParams(temperature=1.2), 7)
    cold = expected_probs(pair, new_text, [], SamplingParams(temperature=0.4), 11)
    torch.testing.assert_close(dists, torch.stack((hot, cold)), atol=ATOL, rtol=0)


def test_snapshots_of_several_requests_go_on_together(pair):
    session = Session(pair)
    requests = [session.start(PROMPT[: 3 + n], 11, PLAN, seed=n) for n in range(3)]
    snapshots = []
    for request in requests:
        snapshots.append(step(session, request, request.number))
        snapshots.append(step(session, request, 0))
    owners = [request for request in requests for _ in range(2)]
    tokens = torch.tensor([4, 8, 15, 16, 23, 39])
    slots = session.allocator.allocate(12)
    once = session.drafter.advance(owners, snapshots, tokens, slots[:6])
    twice = session.drafter.advance(owners, once, tokens.flip(0), slots[6:])
    together = all_full_probs(session.drafter, twice)
    session.allocator.release(slots)
    for n, (owner, snapshot) in enumerate(zip(owners, snapshots, strict=True)):
        alone = follow(session, owner, snapshot, [int(tokens[n]), int(tokens[5 - n])])
        np.testing.assert_allclose(together[n], alone[-1], atol=ATOL, rtol=0)


def test_a_snapshot_of_another_drafter_is_refused(pair):
    session = Session(pair)
    with pytest.raises(TypeError, match="a snapshot belongs to another drafter"):
        session.drafter.probs_at([DraftSnapshot()])
