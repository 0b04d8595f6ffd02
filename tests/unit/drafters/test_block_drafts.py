"""A drafter of one forward fits the loops on the host and recorded, whatever the trees."""

from typing import Any

import numpy as np
import pytest
import torch
from support.block_drafter import DEPTH, BlockDrafter
from support.drafting import TokenSession
from support.grown_trees import Candidates, Prefix, assert_grown

from eaglegbv.config import Plan
from eaglegbv.cuda_graphs import REPLAYED, Recorder
from eaglegbv.request import Request
from eaglegbv.rng import Purpose
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling, DraftTree

VOCAB = 12
SHAPE = (0,), (1,), (3,), (0, 0), (0, 1), (3, 0), (0, 0, 0), (3, 0, 2)
TREES = {
    "iid": (DraftSampling.IID, Plan(paths=3, depth=4)),
    "iid, one path": (DraftSampling.IID, Plan(paths=1, depth=DEPTH)),
    "iid, widths": (DraftSampling.IID, Plan(widths=(3, 2, 2, 1))),
    "wor": (DraftSampling.WOR, Plan(verifier="specinfer", draft_sampling="wor", depth=3)),
    "greedy": (DraftSampling.GREEDY, Plan(draft_sampling="greedy", paths=3, depth=3)),
    "hub": (DraftSampling.HUB, Plan(verifier="spechub", paths=4, depth=3)),
    "fixed": (DraftSampling.FIXED, Plan(draft_sampling="fixed", depth=3, beam=4, nodes=9)),
    "shape": (DraftSampling.FIXED, Plan(draft_sampling="fixed", depth=3, shape=SHAPE)),
}


class Observed:
    """A drafter and requests of three texts."""

    def __init__(self, plan: Plan, **how: Any) -> None:
        self.drafter = BlockDrafter(VOCAB, **how)
        self.session = TokenSession(self.drafter)
        params = SamplingParams(temperature=0.8)
        self.requests = [
            self.session.start([1, 2], first, plan, params=params, seed=first)
            for first in (7, 0, 11)
        ]

    def draft(self, draft_sampling: DraftSampling) -> DraftTree:
        return self.session.draft(self.requests, draft_sampling)

    def candidates(self, request: Request, tree: DraftTree, drafted: Prefix) -> Candidates:
        """What follows drafted tokens, worked out plainly: of all tokens, or the best first."""
        root = request.token_ids[-1]
        before = drafted[-1] if drafted else root
        logits = self.drafter.block[root, len(drafted)] + self.drafter.after[before]
        if tree.draft_sampling is DraftSampling.FIXED:
            best = logits.log_softmax(0).double().sort(descending=True)
            return best.indices.tolist(), best.values.tolist()
        probs = (logits / request.params.temperature).softmax(0, dtype=torch.float64)
        return list(range(VOCAB)), probs.tolist()


@pytest.mark.parametrize("name", TREES)
def test_recorded_drafts_are_those_of_the_host(name):
    draft_sampling, plan = TREES[name]
    recorded, host = Observed(plan, recorder=Recorder()), Observed(plan)
    found, expected = (observed.draft(draft_sampling) for observed in (recorded, host))
    assert dict(recorded.drafter.graph_counts) == {REPLAYED: 1}
    most = expected.nodes
    assert torch.equal(found.num_nodes, expected.num_nodes)
    assert torch.equal(found.draws, expected.draws)
    for field in ("token_ids", "parents", "depth", "draft_ids", "draft_probs"):
        torch.testing.assert_close(getattr(found, field)[:, :most], getattr(expected, field))
        assert not getattr(found, field)[:, most:].any()


@pytest.mark.parametrize("name", ["iid", "iid, widths", "wor", "greedy"])
@pytest.mark.parametrize("recorder", [None, Recorder()], ids=["host", "recorded"])
def test_trees_carry_the_distributions_of_their_depth_and_parent(name, recorder):
    draft_sampling, plan = TREES[name]
    observed = Observed(plan, recorder=recorder)
    tree = observed.draft(draft_sampling)
    for b, request in enumerate(observed.requests):
        count = int(tree.num_nodes[b])
        prefixes: list[Prefix] = [()]
        for node in range(1, count):
            parent = prefixes[int(tree.parents[b, node])]
            prefixes.append((*parent, int(tree.token_ids[b, node])))
        inner = set(tree.parents[b, 1:count].tolist())
        for node in inner:
            ids, probs = observed.candidates(request, tree, prefixes[node])
            assert tree.draft_ids[b, node].tolist() == ids
            np.testing.assert_allclose(tree.draft_probs[b, node], probs, rtol=1e-6)


def test_draws_are_those_of_the_requests_own_numbers():
    """Of independent paths, by the plain growth that verifies every drafter."""
    draft_sampling, plan = TREES["iid"]
    observed = Observed(plan, recorder=Recorder())
    tree = observed.draft(draft_sampling)
    count = plan.paths * plan.depth
    numbers = [r.rng.draw(r.step, Purpose.DRAFT, count) for r in observed.requests]
    uniforms = np.stack(numbers).reshape(len(numbers), plan.paths, plan.depth)
    carried = []
    for b in range(len(observed.requests)):
        lists: dict[Prefix, Candidates] = {}
        prefixes: list[Prefix] = []
        for node in range(int(tree.num_nodes[b])):
            above = prefixes[int(tree.parents[b, node])] if node else ()
            prefixes.append((*above, int(tree.token_ids[b, node])) if node else ())
            lists[prefixes[node]] = (
                tree.draft_ids[b, node].tolist(),
                tree.draft_probs[b, node].tolist(),
            )
        carried.append(lists.__getitem__)
    assert_grown(tree, plan, draft_sampling, carried, uniforms)


@pytest.mark.parametrize("paths", [1, 3, 8])
@pytest.mark.parametrize("depth", [1, DEPTH])
@pytest.mark.parametrize("recorder", [None, Recorder()], ids=["host", "recorded"])
def test_a_draft_is_one_forward(paths, depth, recorder):
    observed = Observed(Plan(paths=paths, depth=depth), recorder=recorder)
    observed.draft(DraftSampling.IID)
    assert observed.drafter.forwards == 1


def test_drafts_are_recorded_ahead():
    observed = Observed(Plan(paths=2, depth=2), recorder=Recorder())
    recorded = observed.drafter.recorded
    assert recorded is not None
    recorded.record(3, Plan(paths=2, depth=2), DraftSampling.IID, SamplingParams(temperature=0.8))
    assert not recorded.counts
    kinds = len(recorded._recordings._recorded)
    assert kinds == 3  # for 1, 2 and 4 requests
    observed.draft(DraftSampling.IID)
    assert len(recorded._recordings._recorded) == kinds
