"""What is drawn follows the probs returned: every sampling, every drafter, three temperatures.

A drafter's tree is a function of the probs it returns and of the request's numbers (checked to the
last token, for many requests in a batch), and over 50,000 draws that function draws from those very
probs (G-tests; seeds are fixed, and a right drafter fails one of them once in ten thousand
choices).
"""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from support.drafting import Session, random_pair
from support.grown_trees import Prefix, assert_grown, grown, paths_of, prefixes
from support.token_drafting import TokenSession, random_llama

from eaglegbv.config import Plan
from eaglegbv.drafters.draft_model import StandaloneDrafter
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.models.hf import HFTarget
from eaglegbv.rng import Purpose, RequestRng
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling, DraftTree
from eaglegbv.verifiers.proof.chooser import exact_probs
from eaglegbv.verifiers.proof.tree import draw_greedy, draw_hub, draw_wor

WIDTH = 4
DEPTH = 2
DRAWS = 50_000
LEVEL = 1e-4
FORKS = {
    DraftSampling.WOR: draw_wor,
    DraftSampling.GREEDY: draw_greedy,
    DraftSampling.HUB: draw_hub,
}
PATHS = {DraftSampling.IID: 16, DraftSampling.WOR: 3, DraftSampling.GREEDY: 3, DraftSampling.HUB: 4}
TEMPERATURES = (0.3, 1.0, 1.5)
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


def plan_of(draft_sampling: DraftSampling, *, paths: int | None = None) -> Plan:
    return Plan(paths=paths or PATHS[draft_sampling], depth=DEPTH, draft_width=WIDTH)


def probs_by_prefix(tree: DraftTree, b: int) -> ProbsOf:
    found = prefixes(tree, b)
    return {
        found[node]: (tree.draft_ids[b, node].numpy(), tree.draft_probs[b, node].numpy())
        for node in {int(p) for p in tree.parents[b, 1 : len(found)]}
    }


def returned_probs(make, temperature: float) -> ProbsOf:
    """The distributions at the root and below each of its possible children."""
    session = make()
    plan = plan_of(DraftSampling.WOR, paths=WIDTH)  # without replacement: every possible child
    request = session.start(PROMPT, 11, plan, params=SamplingParams(temperature=temperature))
    probs = probs_by_prefix(session.draft([request], DraftSampling.WOR), 0)
    assert len(probs) == 1 + WIDTH
    return probs


@pytest.mark.parametrize("draft_sampling", list(PATHS))
def test_a_drafters_tree_is_what_its_probs_and_the_requests_numbers_make(
    make, draft_sampling
) -> None:
    session, plan = make(), plan_of(draft_sampling)
    requests = [
        session.start(PROMPT[: 2 + n % 5], 11, plan, params=SamplingParams(temperature=t), seed=n)
        for n, t in enumerate(TEMPERATURES * 8)
    ]
    batch, shape = session.draft(requests, draft_sampling), (plan.paths, plan.depth)
    numbers = [r.rng.draw(r.step, Purpose.DRAFT, plan.paths * plan.depth) for r in requests]
    uniforms = np.stack(numbers).reshape(-1, *shape)
    probs = [probs_by_prefix(batch, b).__getitem__ for b in range(batch.batch)]
    assert_grown(batch, plan, draft_sampling, probs, uniforms)


def children_of(paths: list[tuple[int, ...]], prefix: tuple[int, ...]) -> tuple[int, ...]:
    """The different tokens after ``prefix``, in the order drawn."""
    at = len(prefix)
    return tuple(dict.fromkeys(p[at] for p in paths if p[:at] == prefix and len(p) > at))


def tables(
    draft_sampling: DraftSampling, probs: ProbsOf, drawn: ProbsOf
) -> list[tuple[Counter, dict]]:
    """Draw 50,000 times from ``drawn``; return each place's counts, and what ``probs`` expects.

    For ``iid`` a draw is a path, for the others the ordered children of a node.
    """
    paths, counts = PATHS[draft_sampling], {}
    trees = DRAWS // paths
    uniforms = RequestRng(0).draw(0, Purpose.DRAFT, trees * paths * DEPTH)
    uniforms = uniforms.reshape(trees, paths, DEPTH)
    tree = grown(plan_of(draft_sampling), draft_sampling, [drawn.__getitem__] * trees, uniforms)
    for b in range(trees):
        found = paths_of(tree, b)
        if draft_sampling is DraftSampling.IID:
            counts.setdefault((), Counter()).update(found)
            continue
        for prefix in {(), *(path[:1] for path in found)}:
            children = children_of(found, prefix)
            if children:
                counts.setdefault(prefix, Counter())[children] += 1
    return [(own, expected_probs(draft_sampling, probs, prefix)) for prefix, own in counts.items()]


def expected_probs(
    draft_sampling: DraftSampling, known: ProbsOf, prefix: Prefix
) -> dict[Prefix, float]:
    ids, probs = known[prefix]
    if draft_sampling is DraftSampling.IID:
        return {
            (int(x), int(y)): float(p * q)
            for x, p in zip(ids, probs, strict=True)
            for y, q in zip(*known[(int(x),)], strict=True)
        }
    dense = np.zeros(40)
    dense[ids] = probs
    count = 2 if draft_sampling is DraftSampling.HUB else 1 if prefix else PATHS[draft_sampling]
    return exact_probs(
        lambda chooser: tuple(
            FORKS[draft_sampling](tuple(dense.tolist()), count, chooser, iter(range(9)))
        )
    )


def p_value(found: list[tuple[Counter, dict]]) -> float:
    """The G-test of all places together; cells expected less than 5 times are one a place."""
    statistic, freedom = 0.0, 0
    for counts, probs in found:
        assert set(counts) <= {cell for cell, mass in probs.items() if mass > 0}
        total = counts.total()
        cells = [(counts[cell], total * mass) for cell, mass in probs.items() if mass > 0]
        kept = [(o, e) for o, e in cells if e >= 5]
        rest = [(o, e) for o, e in cells if e < 5]
        if sum(e for _, e in rest) >= 5:
            kept.append((sum(o for o, _ in rest), sum(e for _, e in rest)))
        statistic += 2 * sum(o * np.log(o / e) for o, e in kept if o)
        statistic -= 2 * sum(o - e for o, e in kept)
        freedom += len(kept) - 1
    return float(stats.chi2.sf(statistic, max(1, freedom)))


@pytest.mark.parametrize("draft_sampling", list(PATHS))
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_drawn_paths_follow_the_probs_returned(make, draft_sampling, temperature) -> None:
    probs = returned_probs(make, temperature)
    assert p_value(tables(draft_sampling, probs, probs)) > LEVEL


@pytest.mark.parametrize("draft_sampling", list(PATHS))
def test_paths_drawn_from_other_probs_are_noticed(draft_sampling) -> None:
    rng = np.random.default_rng(1)
    ids = np.arange(WIDTH)
    q = {prefix: rng.dirichlet(np.ones(WIDTH)) for prefix in [(), *((int(x),) for x in ids)]}
    # A draft temperature of 0.93, say, in place of 1. Below the last level nothing is read.
    probs = {prefix: (ids, own) for prefix, own in q.items()}
    sharper = {prefix: (ids, own**1.07 / (own**1.07).sum()) for prefix, own in q.items()}
    assert max(abs(probs[p][1] - sharper[p][1]).sum() / 2 for p in probs) < 0.03
    assert p_value(tables(draft_sampling, probs, sharper)) < LEVEL


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
