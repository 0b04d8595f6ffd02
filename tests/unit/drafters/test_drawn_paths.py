"""A drafter's tree is made of the probs it returns and the request's numbers, to the last token.

That trees made so follow their probs is tested in test_tree_growth.py.
"""

import numpy as np
import pytest
import torch
from support.drafting import Session, random_pair
from support.grown_trees import Prefix, assert_grown, prefixes
from support.token_drafting import TokenSession, random_llama

from eaglegbv.config import Plan
from eaglegbv.drafters.draft_model import StandaloneDrafter
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.models.hf import HFTarget
from eaglegbv.rng import Purpose
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling, DraftTree

PATHS = {DraftSampling.IID: 16, DraftSampling.WOR: 3, DraftSampling.GREEDY: 3, DraftSampling.HUB: 4}
PROMPT = [5, 17, 3, 3, 28, 9]

ProbsOf = dict[Prefix, tuple[np.ndarray, np.ndarray]]
"""Ids and probabilities by what was drafted before."""


@pytest.fixture(scope="module", params=["eagle1", "eagle3", "eagle3 reduced", "lm"])
def make(request):
    """Makes a session with a drafter of its own kind."""
    match request.param:
        case "eagle3 reduced":
            pair = random_pair(Arch.EAGLE3, draft_vocab=15)
        case "lm":
            model = HFTarget(random_llama(40), max_slots=4096)
            return lambda: TokenSession(StandaloneDrafter(model, vocab_size=40))
        case arch:
            pair = random_pair(Arch(arch))
    return lambda: Session(pair, slots=4096)


def probs_by_prefix(tree: DraftTree, b: int) -> ProbsOf:
    found = prefixes(tree, b)
    return {
        found[node]: (tree.draft_ids[b, node].numpy(), tree.draft_probs[b, node].numpy())
        for node in {int(p) for p in tree.parents[b, 1 : len(found)]}
    }


@pytest.mark.parametrize("draft_sampling", list(PATHS))
def test_a_drafters_tree_is_what_its_probs_and_the_requests_numbers_make(
    make, draft_sampling
) -> None:
    session, plan = make(), Plan(paths=PATHS[draft_sampling], depth=2, draft_width=4)
    requests = [
        session.start(PROMPT[: 2 + n % 5], 11, plan, params=SamplingParams(temperature=t), seed=n)
        for n, t in enumerate((0.3, 1.0, 1.5) * 4)
    ]
    batch, shape = session.draft(requests, draft_sampling), (plan.paths, plan.depth)
    numbers = [r.rng.draw(r.step, Purpose.DRAFT, plan.paths * plan.depth) for r in requests]
    uniforms = np.stack(numbers).reshape(-1, *shape)
    probs = [probs_by_prefix(batch, b).__getitem__ for b in range(batch.batch)]
    assert_grown(batch, plan, draft_sampling, probs, uniforms)


def test_fixed_trees_use_no_numbers(make) -> None:
    trees = []
    for seed in (1, 2):
        session = make()
        trees.append(
            session.draft([session.start(PROMPT, 11, Plan(), seed=seed)], DraftSampling.FIXED)
        )
    assert torch.equal(trees[0].token_ids, trees[1].token_ids)
    assert torch.equal(trees[0].parents, trees[1].parents)
    assert trees[0].width == 0
