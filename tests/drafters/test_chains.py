"""Paths drawn where the head runs are those that grown trees of one path hold."""

from collections.abc import Sequence

import pytest
import torch
from support.drafting import VOCAB, Session, random_pair

from eaglegbv.config import Plan
from eaglegbv.drafters import eagle
from eaglegbv.drafters.chains import drafts_chains
from eaglegbv.drafters.eagle_head_config import Arch
from eaglegbv.drafters.head_forward import HeadForward
from eaglegbv.params import SamplingParams
from eaglegbv.tree import DraftTree, Law, check_tree

PROMPTS = ([5, 17, 3, 3, 28, 9], [2, 2])
WHOLE = Plan(paths=1, depth=4, whole_vocab=VOCAB)
LAWS = (Law.IID, Law.WOR, Law.GREEDY, Law.FIXED)
WARPED = SamplingParams(temperature=1.4)


def draft(
    session: Session, plan: Plan, law: Law, params: Sequence[SamplingParams], steps: int = 3
) -> list[DraftTree]:
    """Draft for several requests, and again after commits of none, one, ... of the drafts."""
    requests = [
        session.start(prompt, 11, plan, params=own, seed=seed)
        for seed, (prompt, own) in enumerate(zip(PROMPTS[: len(params)], params, strict=True))
    ]
    trees = []
    for step in range(steps):
        trees.append(session.draft(requests, law))
        for b, request in enumerate(requests):
            nodes = list(range(1, 1 + min(step, plan.depth)))
            tokens = [*trees[-1].token_ids[b, nodes].tolist(), 7]
            session.commit(request, tokens, nodes)
    return trees


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    ("arch", "draft_vocab"), [(Arch.EAGLE1, VOCAB), (Arch.EAGLE3, VOCAB), (Arch.EAGLE3, 15)]
)
@pytest.mark.parametrize("depth", [1, 4])
def test_paths_are_those_of_grown_trees(
    arch: Arch,
    draft_vocab: int,
    law: Law,
    requests: int,
    depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = random_pair(arch, draft_vocab=draft_vocab)
    plan = Plan(paths=1, depth=depth, whole_vocab=VOCAB)
    params = [SamplingParams(), WARPED][:requests]
    drawn = watched(monkeypatch, lambda: draft(Session(pair), plan, law, params), calls=3)
    monkeypatch.setattr(eagle, "drafts_chains", lambda *_: False)
    grown = watched(monkeypatch, lambda: draft(Session(pair), plan, law, params), calls=0)
    for own, other in zip(drawn, grown, strict=True):
        check_tree(own)
        assert own.law is law
        assert own.forks == other.forks
        # The other head drafts as many tokens, but in an order of its own.
        assert own.whole is (law is not Law.FIXED and arch is Arch.EAGLE1)
        for name, tensor in own.tensors.items():
            expected = other.tensors[name]
            if name in ("path_nodes", "path_lengths"):  # a grown fixed tree has room for more
                assert not expected[:, 1:].any()
                expected = expected[:, :1]
            if name == "draft_ids":  # a leaf has no law
                tensor, expected = tensor[:, :-1], expected[:, :-1]
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6)


def watched(monkeypatch: pytest.MonkeyPatch, run, *, calls: int) -> list[DraftTree]:
    """Return what ``run`` drafts, which draws root tokens ``calls`` times where the head runs."""
    counted: list[int] = []
    plain = HeadForward.draw

    def count(*args: object) -> object:
        counted.append(1)
        return plain(*args)

    with monkeypatch.context() as patch:
        patch.setattr(HeadForward, "draw", count)
        trees = run()
    assert len(counted) == calls
    return trees


@pytest.mark.parametrize(
    ("plan", "law", "params"),
    [
        (Plan(paths=2, depth=4, whole_vocab=VOCAB), Law.IID, SamplingParams()),
        (Plan(paths=2, depth=4, whole_vocab=VOCAB), Law.FIXED, SamplingParams(temperature=0)),
        (Plan(paths=1, depth=4, whole_vocab=VOCAB - 1, draft_width=8), Law.IID, SamplingParams()),
        (
            Plan(paths=1, depth=4, whole_vocab=VOCAB, min_confidence=0.1),
            Law.IID,
            SamplingParams(),
        ),
        (WHOLE, Law.IID, SamplingParams(top_k=5)),
        (WHOLE, Law.IID, SamplingParams(top_p=0.9)),
        (WHOLE, Law.IID, SamplingParams(min_p=0.1)),
        (Plan(paths=1, depth=4, draft_width=8), Law.FIXED, SamplingParams(temperature=0)),
        (
            Plan(paths=1, depth=2, nodes=3, beam=2, whole_vocab=VOCAB),
            Law.FIXED,
            SamplingParams(temperature=0),
        ),
        (
            Plan(paths=1, depth=1, shape=((0,), (1,)), whole_vocab=VOCAB),
            Law.FIXED,
            SamplingParams(temperature=0),
        ),
    ],
)
def test_other_drafts_grow_on_the_host(plan: Plan, law: Law, params: SamplingParams) -> None:
    session = Session(random_pair(Arch.EAGLE3))
    request = session.start(PROMPTS[0], 11, plan, params=params)
    assert not drafts_chains([request], plan, law, VOCAB)
    check_tree(session.draft([request], law))


def test_a_warped_request_takes_its_batch_to_the_host() -> None:
    session = Session(random_pair(Arch.EAGLE3))
    requests = [
        session.start(prompt, 11, WHOLE, params=SamplingParams(top_k=top_k), seed=seed)
        for seed, (prompt, top_k) in enumerate(zip(PROMPTS, (None, 3), strict=True))
    ]
    assert drafts_chains(requests[:1], WHOLE, Law.IID, VOCAB)
    assert not drafts_chains(requests, WHOLE, Law.IID, VOCAB)
    tree = session.draft(requests, Law.IID)
    assert (tree.draft_probs[1, 0] > 0).sum() == 3
