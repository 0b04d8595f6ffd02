"""Every drafter against a plain recomputation of its distributions over the whole text.

The plain head has neither pages nor caches and runs in float64; the drafter runs in float32, where
logits of size 10 are right to a few 1e-6.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support import drafting
from support.drafting import VOCAB, Session, TokenSession, advance, random_llama, starts, text_of
from support.grown_trees import Prefix, ProbsAt, assert_grown, check_tree, plain, prefixes
from support.table_of import table_of
from torch import Tensor

from eaglegbv.config import Plan
from eaglegbv.drafters.draft_model import StandaloneDrafter
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.drafters.tabular import TabularDrafter
from eaglegbv.models.hf import HFTarget
from eaglegbv.request import DraftSnapshot, Request
from eaglegbv.rng import Purpose
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling, DraftTree

PLAN = Plan(paths=3, depth=4, draft_width=VOCAB)
NARROW = Plan(paths=4, depth=4, draft_width=10, draft_temperature=1.6)
PROMPT = [5, 17, 3, 3, 28, 9]
# How many drafted tokens each step's commit accepts: none, some, all.
ACCEPTED = [0, 2, 4, 1, 3]
Scores = Callable[[Sequence[int], Sequence[int]], NDArray[np.float64]]


@dataclass(frozen=True)
class Subject:
    """A kind of drafter, and its plain distributions."""

    session: Callable[[], TokenSession]
    scores: Scores  # log-probabilities [draft_vocab] of what follows a text and drafted tokens
    ids: Tensor  # [draft_vocab], the target's ids
    atol: float
    recurrent: bool = False  # whether drafted tokens count otherwise than committed ones

    def probs(self, text, drafted, *, temperature=1.0, width=VOCAB) -> NDArray[np.float64]:
        """The plain distribution, tempered and cut to its most likely tokens."""
        scores = self.scores(text, drafted)
        kept = np.argsort(-scores)[:width]
        weights = np.exp((scores[kept] - scores[kept].max()) / temperature)
        dist = np.zeros(VOCAB)
        dist[self.ids[kept].numpy()] = weights / weights.sum()
        return dist

    def assert_close(self, found: object, expected: object) -> None:
        np.testing.assert_allclose(found, expected, atol=self.atol, rtol=0)


def eagle(name: str) -> Subject:
    pair = drafting.random_pair(Arch(name[:6]), draft_vocab=15 if "reduced" in name else VOCAB)
    session = partial(Session, pair)
    return Subject(session, pair.log_probs, pair.head.draft_to_target, atol=2e-5, recurrent=True)


def language_model() -> Subject:
    model, wrapped = random_llama(VOCAB), HFTarget(random_llama(VOCAB), max_slots=4096)
    # Slots nobody wrote to show when they are read.
    wrapped.pool.keys.fill_(torch.nan)
    wrapped.pool.values.fill_(torch.nan)

    @torch.inference_mode()
    def scores(text: Sequence[int], drafted: Sequence[int]) -> NDArray[np.float64]:
        logits = model(torch.tensor([[*text, *drafted]])).logits[0, -1]
        return logits.double().log_softmax(0).numpy()

    drafter = StandaloneDrafter(wrapped, vocab_size=VOCAB)
    return Subject(lambda: TokenSession(drafter), scores, torch.arange(VOCAB), atol=1e-5)


def table(order: int) -> Subject:
    logits = drafting.random_table(VOCAB, order=order)

    def scores(text: Sequence[int], drafted: Sequence[int]) -> NDArray[np.float64]:
        state = 0
        for token in [*[VOCAB] * order, *text, *drafted][-order:]:
            state = state * (VOCAB + 1) + token
        return logits[state].double().log_softmax(0).numpy()

    drafter = TabularDrafter(table_of(logits, order=order))
    return Subject(lambda: TokenSession(drafter), scores, torch.arange(VOCAB), atol=1e-6)


EAGLES = ["eagle1", "eagle3", "eagle3 reduced"]
SUBJECTS = {name: partial(eagle, name) for name in EAGLES} | {
    "language model": language_model,
    "bigrams": lambda: table(1),
    "trigrams": lambda: table(2),
}


@pytest.fixture(scope="module", params=list(SUBJECTS))
def subject(request) -> Subject:
    return SUBJECTS[request.param]()


@pytest.fixture(scope="module", params=EAGLES)
def head(request) -> Subject:
    return eagle(request.param)


def pair_of(head: Subject) -> drafting.Pair:
    session = head.session()
    assert isinstance(session, Session)
    return session.pair


def carried(tree: DraftTree, b: int) -> ProbsAt:
    """The distributions that a tree carries, by what was drafted before."""
    found = prefixes(tree, b)
    lists = {
        found[node]: (tree.draft_ids[b, node].numpy(), tree.draft_probs[b, node].numpy())
        for node in drafting.inner_nodes(tree, b)
    }
    return lists.__getitem__


SAMPLED = [
    (DraftSampling.IID, PLAN),
    (DraftSampling.IID, NARROW),
    (DraftSampling.WOR, PLAN),
    (DraftSampling.GREEDY, PLAN),
    (DraftSampling.HUB, NARROW),
]


@pytest.mark.parametrize(("draft_sampling", "plan"), SAMPLED)
def test_drawn_trees_carry_the_plain_distributions(subject, draft_sampling, plan) -> None:
    """And are what these and each request's own numbers make, whatever else is in the batch.

    That trees made so follow their distributions is tested in test_tree_growth.py.
    """
    session = subject.session()
    requests = starts(session, PROMPT, plan)
    assert draft_sampling in session.drafter.draft_samplings
    for accepted in ACCEPTED:
        tree = session.draft(requests, draft_sampling)
        assert tree.token_ids[:, 0].tolist() == [r.token_ids[-1] for r in requests]
        assert tree.width == min(plan.draft_width, len(subject.ids))
        count = plan.paths * plan.depth
        numbers = np.stack([r.rng.draw(r.step, Purpose.DRAFT, count) for r in requests])
        uniforms = numbers.reshape(-1, plan.paths, plan.depth)
        assert_grown(tree, plan, draft_sampling, [carried(tree, b) for b in range(3)], uniforms)
        assert_plain_distributions(subject, tree, requests)
        for b, request in enumerate(requests):
            # Requests advance by different numbers of tokens.
            advance(session, request, tree, b, (accepted + b) % 5, VOCAB)


def assert_plain_distributions(subject: Subject, tree: DraftTree, requests: list[Request]) -> None:
    """Check what was drawn from at every node."""
    for b, request in enumerate(requests):
        plan = request.plan
        temperature = request.params.temperature * plan.draft_temperature
        known, text = prefixes(tree, b), text_of(request)
        for node in drafting.inner_nodes(tree, b):
            how = {"temperature": temperature, "width": plan.draft_width}
            expected = subject.probs(text, known[node], **how)
            subject.assert_close(drafting.full_probs(tree, b, node, VOCAB), expected)


@pytest.mark.parametrize(
    ("draft_sampling", "plan"),
    [
        (DraftSampling.IID, Plan(widths=(2, 1, 2, 1), draft_width=VOCAB)),
        (DraftSampling.WOR, Plan(verifier="specinfer", widths=(1, 3, 2), draft_width=10)),
    ],
)
def test_trees_of_widths_carry_the_plain_distributions(subject, draft_sampling, plan) -> None:
    """Each node that of its own path, whatever row of the level before it continues."""
    session = subject.session()
    requests = starts(session, PROMPT, plan)
    for accepted in ACCEPTED:
        tree = session.draft(requests, draft_sampling)
        forks = (tree.draft_counts() > 1) & (tree.depth > 0)
        assert forks.any(dim=1).all()
        assert_plain_distributions(subject, tree, requests)
        for b, request in enumerate(requests):
            advance(session, request, tree, b, (accepted + b) % plan.depth, VOCAB)


def best_first_prefixes(subject: Subject, text: Sequence[int], plan: Plan) -> set[Prefix]:
    """EAGLE-2's tree by its definition, from the plain distributions."""

    def at(prefix: Prefix) -> tuple[list[int], list[float]]:
        scores = subject.scores(text, prefix)
        best = np.argsort(-scores)[: plan.fixed_beam]
        return subject.ids[best].tolist(), scores[best].tolist()

    return {*plain(plan, DraftSampling.FIXED, at, np.zeros((plan.paths, plan.depth))).nodes}


def test_fixed_trees_are_the_best_nodes_over_several_commits(subject) -> None:
    session = subject.session()
    requests = starts(session, PROMPT, PLAN)
    for accepted in ACCEPTED:
        tree = session.draft(requests, DraftSampling.FIXED)
        check_tree(tree)
        assert tree.draft_sampling is DraftSampling.FIXED
        assert tree.width == 0
        for b, request in enumerate(requests):
            expected = best_first_prefixes(subject, text_of(request), PLAN)
            assert set(prefixes(tree, b)) == expected
            advance(session, request, tree, b, (accepted + b) % 5, VOCAB)


# --- what only heads do
def test_the_pair_can_tell_right_from_wrong(head) -> None:
    # If they did not depend on the text, its order and the drafted tokens, nothing here would test
    # anything.
    text = [*PROMPT, 11]
    dist = head.probs(text, [4, 8])
    for other in (
        head.probs(text, [4]),
        head.probs(text, [8, 8]),
        head.probs([*text, 4], [8]),  # true features instead of drafted ones
        head.probs([PROMPT[1], PROMPT[0], *text[2:]], [4, 8]),
    ):
        assert np.abs(dist - other).sum() > 0.02
    assert 1e-3 < np.sort(dist)[-2] < 0.5


def all_full_probs(tree: DraftTree) -> NDArray[np.float64]:
    return np.array([drafting.full_probs(tree, 0, n, VOCAB) for n in range(int(tree.num_nodes[0]))])


def begun_at(first: int, request: Request, head: Subject) -> DraftTree:
    """The tree after the text of ``request`` from position ``first`` on alone."""
    pair, text = pair_of(head), text_of(request)
    session = Session(pair)
    short = session.start(text[first:-1], text[-1], request.plan, seed=3, observe=False)
    short.step = request.step
    session.drafter.observe(short, pair.features(text[:-1])[first:])
    return session.draft([short], DraftSampling.IID)


@pytest.mark.parametrize("paths", [1, 3])
def test_what_was_skipped_is_as_if_the_text_began_later(head, paths) -> None:
    session = head.session()
    plan = Plan(paths=paths, depth=4, draft_width=VOCAB)
    request = session.start(PROMPT, 11, plan, seed=3, observe=False)
    for piece in session.pair.features(PROMPT).split([1, 3, 2]):
        session.drafter.observe(request, piece)
    session.drafter.skip(request, keep=4)
    for accepted in (2, 0, 4):
        tree, expected = session.draft([request], DraftSampling.IID), begun_at(2, request, head)
        assert torch.equal(tree.token_ids, expected.token_ids)
        head.assert_close(all_full_probs(tree), all_full_probs(expected))
        # The beginning does matter to the head.
        whole = begun_at(0, request, head)
        assert not np.allclose(all_full_probs(tree)[:1], all_full_probs(whole)[:1], atol=1e-3)
        advance(session, request, tree, 0, accepted, VOCAB)
    with pytest.raises(RuntimeError, match="request 3 is recalled, its beginning skipped"):
        session.drafter.snapshot(request)


def test_a_forgotten_request_starts_anew(subject) -> None:
    session = subject.session()
    request = session.start(PROMPT, 11, PLAN)
    for _ in range(2):
        session.drafter.catch_up([request])
        assert session.drafter.shareable(request) == len(PROMPT)
        session.drafter.forget(request)
        assert not request.draft_states
        if subject.recurrent:
            with pytest.raises(RuntimeError, match="drafts before any feature was observed"):
                session.draft([request], DraftSampling.IID)
            session.drafter.observe(request, session.pair.features(PROMPT))


def test_vocabularies_padded_differently_meet_in_what_both_have() -> None:
    wrapped = HFTarget(random_llama(VOCAB), max_slots=4096)
    session = TokenSession(StandaloneDrafter(wrapped, vocab_size=VOCAB - 8))
    request = session.start(PROMPT, 11, Plan(paths=4, depth=3, draft_width=VOCAB))
    with pytest.raises(RuntimeError, match="request 0 has drafted no tree"):
        session.drafter.snapshot(request)
    tree = session.draft([request], DraftSampling.IID)
    assert tree.width == VOCAB - 8
    assert int(tree.draft_ids.max()) < VOCAB - 8
    session = TokenSession(StandaloneDrafter(wrapped, vocab_size=VOCAB + 8))
    request = session.start([*PROMPT, VOCAB + 3], VOCAB + 7, Plan(paths=2, depth=2))
    check_tree(session.draft([request], DraftSampling.IID))


# --- draft replay: what an earlier step would have drawn
#
# The plain head reads the text up to that step's root on true features, and what was committed
# since on its own features.

SHORT = Plan(paths=2, depth=4, draft_width=VOCAB)
BEYOND = [31, 2]
"""Tokens a path goes on by, of no tree."""


def replayed(session: TokenSession, snapshots: Sequence[DraftSnapshot]) -> NDArray[np.float64]:
    found = session.drafter.probs_at(snapshots)
    full = torch.zeros((len(snapshots), VOCAB), dtype=torch.float64)
    return full.scatter_add_(1, found.ids, found.probs).numpy()


def follow(session, request, snapshot, tokens: Sequence[int]) -> list[NDArray[np.float64]]:
    """The distributions after none, one, ... all of the tokens."""
    slots = session.allocator.allocate(len(tokens))
    dists = [replayed(session, [snapshot])[0]]
    for token, slot in zip(tokens, slots.split(1), strict=True):
        [snapshot] = session.drafter.advance([request], [snapshot], torch.tensor([token]), slot)
        dists.append(replayed(session, [snapshot])[0])
    session.allocator.release(slots)
    return dists


def step(session: TokenSession, request: Request, accepted: int) -> DraftSnapshot:
    """Draft, remember, and commit the first nodes of the first path and a token more."""
    tree = session.draft([request], DraftSampling.IID)
    snapshot = session.drafter.snapshot(request)
    advance(session, request, tree, 0, accepted, VOCAB)
    session.drafter.catch_up([request])
    return snapshot


def test_replayed_distributions_continue_their_own_step_whatever_came_after(subject) -> None:
    session = subject.session()
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
                subject.assert_close(found, subject.probs(text, since[:end]))
        # On true features the same text has another distribution.
        current = subject.probs([*root, *since[: accepted + 1]], [])
        far = max(far, 0.5 * float(np.abs(dists[accepted + 1] - current).sum()))
    assert (far > 0.02) == subject.recurrent


def test_a_snapshot_keeps_its_steps_own_settings(subject) -> None:
    session = subject.session()
    request = session.start(PROMPT, 11, SHORT, params=SamplingParams(temperature=0.8))
    snapshots, expected = [], []
    for temperature, width, accepted in ((1.5, 7, 0), (0.5, 11, 1)):
        request.plan = msgspec.structs.replace(
            SHORT, draft_temperature=temperature, draft_width=width
        )
        text = text_of(request)
        snapshots.append(step(session, request, accepted))
        expected.append(subject.probs(text, [], temperature=0.8 * temperature, width=width))
    subject.assert_close(replayed(session, snapshots), np.stack(expected))


def test_snapshots_of_several_requests_go_on_together(subject) -> None:
    session = subject.session()
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
        subject.assert_close(together[n], alone[-1])


def test_a_snapshot_of_another_drafter_is_refused(subject) -> None:
    with pytest.raises(TypeError, match="a snapshot belongs to another drafter"):
        subject.session().drafter.probs_at([DraftSnapshot()])
