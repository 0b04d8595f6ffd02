"""The language-model drafter against the plain model on the whole text, over several commits."""

import numpy as np
import pytest
import torch
from support.token_drafting import (
    TokenSession,
    advance,
    full_probs,
    inner_nodes,
    prefix_of,
    random_llama,
    text_of,
)
from support.tree_check import check_tree

from eaglegbv.config import Plan
from eaglegbv.drafters.draft_model import StandaloneDrafter
from eaglegbv.models.hf import HFTarget
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling

VOCAB = 40
PLAN = Plan(paths=3, depth=4, draft_width=VOCAB)
PROMPT = [5, 17, 3, 3, 28, 9]
ACCEPTED = [0, 2, 4, 1, 3]
ATOL = 1e-5  # float32 logits of size 10


@pytest.fixture(scope="module")
def model():
    return random_llama(VOCAB)


@pytest.fixture(scope="module")
def wrapped(model):
    copy = random_llama(VOCAB)
    assert torch.equal(copy.lm_head.weight, model.lm_head.weight)
    target = HFTarget(copy, max_slots=4096)
    # Slots nobody wrote to show when they are read.
    target.pool.keys.fill_(torch.nan)
    target.pool.values.fill_(torch.nan)
    return target


@pytest.fixture
def session(wrapped):
    return TokenSession(StandaloneDrafter(wrapped, vocab_size=VOCAB))


@torch.inference_mode()
def plain_dist(model, tokens, temperature=1.0, width=VOCAB):
    logits = model(torch.tensor([tokens])).logits[0, -1].double() / temperature
    kept = logits.argsort(descending=True)[:width]
    dist = torch.zeros(VOCAB, dtype=torch.float64)
    dist[kept] = logits[kept].softmax(0)
    return dist.numpy()


def check_samplings(model, tree, b, request, **settings):
    for node in inner_nodes(tree, b):
        expected = plain_dist(model, text_of(request) + prefix_of(tree, b, node), **settings)
        np.testing.assert_allclose(full_probs(tree, b, node, VOCAB), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    "draft_sampling",
    [DraftSampling.IID, DraftSampling.WOR, DraftSampling.GREEDY, DraftSampling.HUB],
)
def test_trees_carry_the_models_distributions_over_several_commits(model, session, draft_sampling):
    first = session.start(PROMPT, 11, PLAN, seed=3)
    second = session.start([1, 2], 30, PLAN, seed=4, params=SamplingParams(temperature=0.7))
    session.drafter.catch_up([first, second])
    for accepted in ACCEPTED:
        tree = session.draft([first, second], draft_sampling)
        check_tree(tree)
        assert tree.draft_sampling is draft_sampling
        check_samplings(model, tree, 0, first)
        check_samplings(model, tree, 1, second, temperature=0.7)
        advance(session, first, tree, 0, accepted, VOCAB)
        advance(session, second, tree, 1, (accepted + 1) % 5, VOCAB)


def test_recalled_distributions_are_the_models_at_other_tokens(model, session):
    plan = Plan(paths=2, depth=3, draft_width=12)
    request = session.start(PROMPT, 11, plan, seed=3, params=SamplingParams(temperature=0.8))
    session.draft([request], DraftSampling.IID)
    snapshot = session.drafter.snapshot(request)
    root_text = text_of(request)
    session.commit(request, [21], [])
    session.draft([request], DraftSampling.IID)
    slots = session.allocator.allocate(2)
    places, tokens = [snapshot], []
    for slot, token in zip(slots.split(1), (21, 7), strict=True):
        tokens.append(token)
        step = session.drafter.advance([request], places[-1:], torch.tensor([token]), slot)
        places += step
    draft_samplings = session.drafter.probs_at(places)
    for i in range(3):
        expected = plain_dist(model, root_text + tokens[:i], temperature=0.8, width=12)
        found = np.zeros(VOCAB)
        np.add.at(found, draft_samplings.ids[i].numpy(), draft_samplings.probs[i].numpy())
        np.testing.assert_allclose(found, expected, atol=ATOL, rtol=0)


def test_vocabularies_padded_differently_meet_in_what_both_have(wrapped):
    session = TokenSession(StandaloneDrafter(wrapped, vocab_size=VOCAB - 8))
    request = session.start(PROMPT, 11, Plan(paths=4, depth=3, draft_width=VOCAB))
    tree = session.draft([request], DraftSampling.IID)
    assert tree.width == VOCAB - 8
    assert int(tree.draft_ids.max()) < VOCAB - 8
    session = TokenSession(StandaloneDrafter(wrapped, vocab_size=VOCAB + 8))
    request = session.start([*PROMPT, VOCAB + 3], VOCAB + 7, Plan(paths=2, depth=2))
    check_tree(session.draft([request], DraftSampling.IID))


def test_a_forgotten_request_starts_anew(session):
    request = session.start(PROMPT, 11, PLAN)
    with pytest.raises(RuntimeError, match="request 0 has drafted no tree"):
        session.drafter.snapshot(request)
    session.drafter.catch_up([request])
    assert session.drafter.shareable(request) == len(PROMPT)
    session.drafter.forget(request)
    assert session.drafter.shareable(request) == 0
    session.drafter.catch_up([request])
    assert session.drafter.shareable(request) == len(PROMPT)
