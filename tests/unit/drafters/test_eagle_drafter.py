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
from eaglegbv.drafters.eagle import EagleState
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.request import DraftSnapshot, DraftState, Request
from eaglegbv.rng import Purpose
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


def check_drawn(tree: DraftTree, b: int, request: Request) -> None:
    """The paths are what the request's numbers select from the very probs the tree carries."""
    plan = request.plan
    numbers = request.rng.draw(request.step, Purpose.DRAFT, plan.paths * plan.depth)
    for nodes, uniforms in zip(
        tree.path_nodes[b].tolist(), numbers.reshape(plan.paths, plan.depth), strict=True
    ):
        for parent, node, u in zip([0, *nodes], nodes, uniforms, strict=False):
            cumulative = tree.draft_probs[b, parent].cumsum(0)
            choice = int((u * cumulative[-1] >= cumulative).sum())
            assert tree.token_ids[b, node] == tree.draft_ids[b, parent, choice]


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


def test_sampled_trees_carry_the_heads_distributions_over_several_commits(pair):
    session = Session(pair)
    request = session.start(PROMPT, 11, PLAN, seed=3)
    for accepted in ACCEPTED:
        tree = session.draft([request], DraftSampling.IID)
        check_tree(tree)
        assert tree.draft_sampling is DraftSampling.IID
        assert (tree.paths, tree.length) == (PLAN.paths, PLAN.depth)
        assert tree.path_lengths.tolist() == [[PLAN.depth] * PLAN.paths]
        assert int(tree.token_ids[0, 0]) == request.token_ids[-1]
        check_samplings(pair, tree, 0, text_of(request))
        check_drawn(tree, 0, request)
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


def test_a_request_served_step_by_step_drafts_like_one_that_saw_the_text_at_once(pair):
    session = Session(pair)
    request = session.start(PROMPT, 11, PLAN, seed=3)
    for accepted in ACCEPTED:
        advance(session, request, session.draft([request], DraftSampling.IID), 0, accepted, VOCAB)
    text = text_of(request)
    assert len(text) == len(PROMPT) + 1 + sum(a + 1 for a in ACCEPTED)
    fresh = Session(pair)
    at_once = fresh.start(text[:-1], text[-1], PLAN, seed=3)
    at_once.step = request.step
    stepped, whole = (
        session.draft([request], DraftSampling.IID),
        fresh.draft([at_once], DraftSampling.IID),
    )
    assert torch.equal(stepped.token_ids, whole.token_ids)
    assert torch.equal(stepped.parents, whole.parents)
    torch.testing.assert_close(all_full_probs(stepped), all_full_probs(whole), atol=ATOL, rtol=0)


def all_full_probs(tree: DraftTree) -> torch.Tensor:
    dists = [
        [full_probs(tree, b, n, VOCAB) for n in range(int(tree.num_nodes[b]))]
        for b in range(tree.batch)
    ]
    return torch.from_numpy(np.array(dists))


def test_features_may_come_in_pieces_before_the_head_runs(pair):
    # A step that drafts nothing still shows the drafter what it commits.
    session = Session(pair)
    request = session.start(PROMPT, 11, PLAN, seed=3, observe=False)
    features = pair.features(PROMPT)
    for piece in features.split([1, 3, 2]):
        session.drafter.observe(request, piece)
    tree = session.draft([request], DraftSampling.IID)
    check_samplings(pair, tree, 0, text_of(request))


def test_catching_up_early_or_late_is_the_same(pair):
    early, late = Session(pair), Session(pair)
    first = early.start(PROMPT, 11, PLAN, seed=3)
    early.drafter.catch_up([first])
    early.drafter.catch_up([first])  # nothing is left to run
    second = late.start(PROMPT, 11, PLAN, seed=3)
    one, other = early.draft([first], DraftSampling.IID), late.draft([second], DraftSampling.IID)
    assert torch.equal(one.token_ids, other.token_ids)
    assert torch.equal(one.draft_probs, other.draft_probs)


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


@pytest.mark.parametrize(
    ("params", "plan", "temperature", "width"),
    [
        (SamplingParams(temperature=0.5), PLAN, 0.5, VOCAB),
        (SamplingParams(), Plan(paths=3, depth=4, draft_width=6), 1.0, 6),
        (
            SamplingParams(temperature=0.5),
            Plan(paths=3, depth=4, draft_width=10, draft_temperature=1.6),
            0.8,
            10,
        ),
    ],
)
def test_distributions_have_the_plans_width_and_draft_temperature(
    pair, params, plan, temperature, width
):
    session = Session(pair)
    request = session.start(PROMPT, 11, plan, params=params)
    tree = session.draft([request], DraftSampling.IID)
    assert tree.width == min(width, pair.head.config.draft_vocab_size)
    check_samplings(pair, tree, 0, text_of(request), temperature=temperature, width=width)
    check_drawn(tree, 0, request)


def test_distributions_are_cut_as_the_request_asks(pair):
    session = Session(pair)
    params = SamplingParams(top_k=4, min_p=0.05)
    request = session.start(PROMPT, 11, PLAN, params=params)
    tree = session.draft([request], DraftSampling.IID)
    for node in inner_nodes(tree, 0):
        dist = expected_probs(pair, text_of(request), prefix_of(tree, 0, node), width=4)
        dist[dist < 0.05 * dist.max()] = 0
        np.testing.assert_allclose(
            full_probs(tree, 0, node, VOCAB), dist / dist.sum(), atol=ATOL, rtol=0
        )
    check_drawn(tree, 0, request)


def test_penalties_are_the_targets_business(pair):
    plain, penalised = Session(pair), Session(pair)
    one = plain.start(PROMPT, 11, PLAN)
    other = penalised.start(PROMPT, 11, PLAN, params=SamplingParams(repetition_penalty=1.5))
    assert torch.equal(
        plain.draft([one], DraftSampling.IID).draft_probs,
        penalised.draft([other], DraftSampling.IID).draft_probs,
    )


def test_a_reduced_vocabulary_drafts_the_targets_tokens():
    pair = random_pair(Arch.EAGLE3, draft_vocab=15)
    known = set(pair.head.draft_to_target.tolist())
    assert known != set(range(15))
    session = Session(pair)
    request = session.start(PROMPT, 11, PLAN)
    for draft_sampling in (DraftSampling.IID, DraftSampling.FIXED):
        tree = session.draft([request], draft_sampling)
        count = int(tree.num_nodes[0])
        assert set(tree.token_ids[0, 1:count].tolist()) <= known
        advance(session, request, tree, 0, 1, VOCAB)


def test_more_paths_than_tokens_to_draft():
    pair = random_pair(Arch.EAGLE3, draft_vocab=2)
    plan = Plan(paths=5, depth=3)
    session = Session(pair)
    request = session.start(PROMPT, 11, plan)
    for draft_sampling in (DraftSampling.IID, DraftSampling.FIXED, DraftSampling.IID):
        tree = session.draft([request], draft_sampling)
        check_tree(tree)
        assert int(tree.num_nodes[0]) <= plan.tree_nodes
        advance(session, request, tree, 0, 2, VOCAB)
    fixed = session.draft([request], DraftSampling.FIXED)
    drafted = {tuple(prefix_of(fixed, 0, n)) for n in range(int(fixed.num_nodes[0]))}
    assert drafted == best_first_prefixes(pair, text_of(request), plan)


def test_a_path_of_one_token_needs_no_drafted_feature(pair):
    session = Session(pair)
    request = session.start(PROMPT, 11, Plan(paths=2, depth=1, draft_width=VOCAB))
    tree = session.draft([request], DraftSampling.IID)
    assert tree.depth.max() == 1
    check_samplings(pair, tree, 0, text_of(request))


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


def test_what_was_run_already_is_skipped_too(pair):
    session = Session(pair)
    request = session.start(PROMPT, 11, PLAN, seed=3)
    for accepted in (1, 0, 2):
        advance(session, request, session.draft([request], DraftSampling.IID), 0, accepted, VOCAB)
    assert session.drafter.behind(request) == 3
    session.drafter.skip(request, keep=2)
    assert session.drafter.behind(request) == 2
    tree = session.draft([request], DraftSampling.IID)
    other, short = begun_at(len(text_of(request)) - 3, request, pair)
    expected = other.draft([short], DraftSampling.IID)
    torch.testing.assert_close(all_full_probs(tree), all_full_probs(expected), atol=ATOL, rtol=0)


def test_skipping_frees_what_it_came_with(pair):
    session = Session(pair)
    request = session.start(PROMPT, 11, PLAN, observe=False)
    features = pair.features(PROMPT).clone()
    for part in features.split(2):
        session.drafter.observe(request, part)
    session.drafter.skip(request, keep=len(PROMPT))  # it is no more than that
    (part,) = request.draft_states[EagleState].pending
    assert torch.equal(part, features)
    assert part.untyped_storage().data_ptr() != features.untyped_storage().data_ptr()
    assert request.skipped == 0
    session.drafter.skip(request, keep=2)
    (part,) = request.draft_states[EagleState].pending
    assert torch.equal(part, features[-2:])
    assert part.untyped_storage().nbytes() == part.nbytes
    assert (session.drafter.behind(request), session.drafter.shareable(request)) == (2, 0)
    session.drafter.catch_up([request])
    # Others that begin like it would miss the beginning.
    assert (session.drafter.behind(request), session.drafter.shareable(request)) == (0, 0)
    session.drafter.forget(request)
    session.drafter.observe(request, features)
    session.drafter.catch_up([request])
    assert session.drafter.shareable(request) == len(PROMPT)


def test_a_text_whose_beginning_was_skipped_is_not_recalled(pair):
    session = Session(pair)
    request = session.start(PROMPT, 11, PLAN)
    session.drafter.skip(request, keep=3)
    session.draft([request], DraftSampling.IID)
    with pytest.raises(RuntimeError, match="request 0 is recalled, its beginning skipped"):
        session.drafter.snapshot(request)


def test_a_forgotten_request_starts_anew(pair):
    session = Session(pair)
    request = session.start(PROMPT, 11, PLAN)
    session.drafter.catch_up([request])
    session.drafter.forget(request)
    assert not request.draft_states
    with pytest.raises(RuntimeError, match="request 0 drafts before any feature was observed"):
        session.draft([request], DraftSampling.IID)


def test_what_another_drafter_remembers_stays(pair):
    session = Session(pair)
    request = session.start(PROMPT, 11, PLAN)
    expected = session.draft([request], DraftSampling.IID)
    request.draft_states[DraftState] = other = DraftState()
    assert torch.equal(session.draft([request], DraftSampling.IID).token_ids, expected.token_ids)
    session.drafter.forget(request)
    assert request.draft_states == {DraftState: other}


@pytest.mark.parametrize(
    "draft_sampling", [DraftSampling.WOR, DraftSampling.GREEDY, DraftSampling.HUB]
)
def test_trees_of_the_other_distributions_carry_the_heads_distributions_over_several_commits(
    pair, draft_sampling
):
    session = Session(pair)
    request = session.start(PROMPT, 11, PLAN, seed=3)
    assert draft_sampling in session.drafter.draft_samplings
    for accepted in ACCEPTED:
        tree = session.draft([request], draft_sampling)
        check_tree(tree)
        assert tree.draft_sampling is draft_sampling
        assert tree.length == int(tree.path_lengths.max()) == PLAN.depth
        assert int(tree.num_nodes[0]) == 1 + PLAN.depth * (
            2 if draft_sampling is DraftSampling.HUB else PLAN.paths
        )
        check_samplings(pair, tree, 0, text_of(request))
        advance(session, request, tree, 0, accepted, VOCAB)


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


def test_replayed_distributions_are_those_of_the_tree_itself(pair):
    session = Session(pair)
    request = session.start(PROMPT, 11, SHORT)
    tree = session.draft([request], DraftSampling.IID)
    nodes = tree.path_nodes[0, 0].tolist()
    tokens = tree.token_ids[0, nodes].tolist()
    dists = follow(session, request, session.drafter.snapshot(request), tokens[:-1])
    for node, found in zip([0, *nodes[:-1]], dists, strict=True):
        drawn = torch.zeros(VOCAB, dtype=torch.float64)
        drawn.scatter_add_(0, tree.draft_ids[0, node], tree.draft_probs[0, node])
        torch.testing.assert_close(found, drawn, atol=ATOL, rtol=0)


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


def test_replaying_leaves_the_next_drafts_alone(pair):
    trees = []
    for replays in (False, True):
        session = Session(pair)
        request = session.start(PROMPT, 11, SHORT, seed=4)
        snapshot = step(session, request, 1)
        if replays:
            follow(session, request, snapshot, [*request.token_ids[1:], *BEYOND])
        step(session, request, 0)
        trees.append(session.draft([request], DraftSampling.IID))
    assert torch.equal(trees[0].token_ids, trees[1].token_ids)
    torch.testing.assert_close(trees[0].draft_probs, trees[1].draft_probs, atol=ATOL, rtol=0)


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


def test_a_snapshot_of_another_drafter_is_refused(pair):
    session = Session(pair)
    with pytest.raises(TypeError, match="a snapshot belongs to another drafter"):
        session.drafter.probs_at([DraftSnapshot()])
