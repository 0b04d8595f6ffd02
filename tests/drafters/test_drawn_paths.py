"""What is drawn follows the distribution that is returned: every distribution, every head, three temperatures.

A drafter's tree is a function of the distributions it returns and of the request's numbers (checked to the
last token, for many requests in a batch), and over 50,000 draws and more that function draws from
those very distributions (G-tests; seeds are fixed, and a right drafter fails one of them once in ten
thousand choices).
"""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from support.drafting import Session, prefix_of, random_pair
from support.token_drafting import TokenSession, random_llama

from eaglegbv.config import Plan
from eaglegbv.drafters.draft_model import StandaloneDrafter
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.drafters.tree_growth import GreedyTree, HubTree, IidTree, WorTree
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
CLASSES = {
    DraftSampling.IID: IidTree,
    DraftSampling.WOR: WorTree,
    DraftSampling.GREEDY: GreedyTree,
    DraftSampling.HUB: HubTree,
}
FORKS = {
    DraftSampling.WOR: draw_wor,
    DraftSampling.GREEDY: draw_greedy,
    DraftSampling.HUB: draw_hub,
}
PATHS = {DraftSampling.IID: 16, DraftSampling.WOR: 3, DraftSampling.GREEDY: 3, DraftSampling.HUB: 4}
TEMPERATURES = (0.3, 1.0, 1.5)
PROMPT = [5, 17, 3, 3, 28, 9]

ProbsOf = dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]]
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
    inner = {int(p) for p in tree.parents[b, 1 : int(tree.num_nodes[b])]}
    return {
        tuple(prefix_of(tree, b, node)): (
            tree.draft_ids[b, node].numpy(),
            tree.draft_probs[b, node].numpy(),
        )
        for node in inner
    }


def returned_probs(make, temperature: float) -> ProbsOf:
    """The distributions at the root and below each of its possible children."""
    session = make()
    plan = plan_of(DraftSampling.WOR, paths=WIDTH)  # without replacement: every possible child
    request = session.start(PROMPT, 11, plan, params=SamplingParams(temperature=temperature))
    draft_samplings = probs_by_prefix(session.draft([request], DraftSampling.WOR), 0)
    assert len(draft_samplings) == 1 + WIDTH
    return draft_samplings


def grow(draft_sampling: DraftSampling, uniforms: np.ndarray, dists: ProbsOf, root: int = 11):
    """The tree that these distributions and numbers make."""
    tree = CLASSES[draft_sampling](root, uniforms, WIDTH)
    frontier = [0]
    for _ in range(uniforms.shape[1]):
        found = [dists[tuple(tree.tokens_to(node))] for node in frontier]
        frontier = tree.grow(
            frontier, np.stack([ids for ids, _ in found]), np.stack([probs for _, probs in found])
        )
    return tree.finish()


def tokens_of_paths(grown) -> list[tuple[int, ...]]:
    return [tuple(grown.token_ids[node] for node in path) for path in grown.paths]


@pytest.mark.parametrize("draft_sampling", list(CLASSES))
def test_a_drafters_tree_is_what_its_distributions_and_the_requests_numbers_make(make, dist):
    session, plan = make(), plan_of(dist)
    requests = [
        session.start(PROMPT[: 2 + n % 5], 11, plan, params=SamplingParams(temperature=t), seed=n)
        for n, t in enumerate(TEMPERATURES * 8)
    ]
    batch = session.draft(requests, dist)
    for b, request in enumerate(requests):
        numbers = request.stream.draw(request.step, Purpose.DRAFT, plan.paths * plan.depth)
        grown = grow(dist, numbers.reshape(plan.paths, plan.depth), probs_by_prefix(batch, b))
        drafted = [
            tuple(batch.token_ids[b, nodes[:length]].tolist())
            for nodes, length in zip(batch.path_nodes[b], batch.path_lengths[b], strict=True)
            if length
        ]
        assert drafted == tokens_of_paths(grown)


def children_of(paths: list[tuple[int, ...]], prefix: tuple[int, ...]) -> tuple[int, ...]:
    """The different tokens after ``prefix``, in the order drawn."""
    at = len(prefix)
    return tuple(dict.fromkeys(p[at] for p in paths if p[:at] == prefix and len(p) > at))


def tables(
    draft_sampling: DraftSampling, dists: ProbsOf, drawn: ProbsOf
) -> list[tuple[Counter, dict]]:
    """Draw 50,000 times from ``drawn``; return each place's counts and its draft_sampling by ``dists``.

    For ``iid`` a draw is a path, for the others the ordered children of a node.
    """
    paths, counts, total, seed = PATHS[draft_sampling], {}, 0, 0
    while total < DRAWS:
        block = RequestRng(seed).draw(0, Purpose.DRAFT, 500 * paths * DEPTH)
        for uniforms in block.reshape(500, paths, DEPTH):
            found = tokens_of_paths(grow(draft_sampling, uniforms, drawn))
            if draft_sampling is DraftSampling.IID:
                counts.setdefault((), Counter()).update(found)
                total += len(found)
                continue
            for prefix in {(), *(path[:1] for path in found)}:
                children = children_of(found, prefix)
                if children:
                    counts.setdefault(prefix, Counter())[children] += 1
                    total += len(children)
        seed += 1
    return [(own, expected_probs(draft_sampling, dists, prefix)) for prefix, own in counts.items()]


def expected_probs(
    draft_sampling: DraftSampling, dists: ProbsOf, prefix: tuple[int, ...]
) -> dict[tuple[int, ...], float]:
    ids, probs = dists[prefix]
    if draft_sampling is DraftSampling.IID:
        return {
            (int(x), int(y)): float(p * q)
            for x, p in zip(ids, probs, strict=True)
            for y, q in zip(*dists[(int(x),)], strict=True)
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
    for counts, dist in found:
        assert set(counts) <= {cell for cell, mass in dist.items() if mass > 0}
        total = counts.total()
        cells = [(counts[cell], total * mass) for cell, mass in dist.items() if mass > 0]
        kept = [(o, e) for o, e in cells if e >= 5]
        rest = [(o, e) for o, e in cells if e < 5]
        if sum(e for _, e in rest) >= 5:
            kept.append((sum(o for o, _ in rest), sum(e for _, e in rest)))
        statistic += 2 * sum(o * np.log(o / e) for o, e in kept if o)
        statistic -= 2 * sum(o - e for o, e in kept)
        freedom += len(kept) - 1
    return float(stats.chi2.sf(statistic, max(1, freedom)))


@pytest.mark.parametrize("draft_sampling", list(CLASSES))
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_drawn_paths_follow_the_distribution_returned(make, dist, temperature):
    dists = returned_probs(make, temperature)
    assert p_value(tables(dist, dists, dists)) > LEVEL


@pytest.mark.parametrize("draft_sampling", list(CLASSES))
def test_paths_drawn_from_another_distribution_are_noticed(dist):
    rng = np.random.default_rng(1)
    ids = np.arange(WIDTH)
    q = {prefix: rng.dirichlet(np.ones(WIDTH)) for prefix in [(), *((int(x),) for x in ids)]}
    dists = {prefix: (ids, probs) for prefix, probs in q.items()}
    # A draft temperature of 0.93, say, in place of 1.
    sharper = {prefix: (ids, probs**1.07 / (probs**1.07).sum()) for prefix, probs in q.items()}
    assert max(abs(dists[p][1] - sharper[p][1]).sum() / 2 for p in dists) < 0.03
    assert p_value(tables(dist, dists, sharper)) < LEVEL


def test_fixed_trees_use_no_numbers(make):
    trees = []
    for seed in (1, 2):
        session = make()
        trees.append(
            session.draft([session.start(PROMPT, 11, Plan(), seed=seed)], DraftSampling.FIXED)
        )
    assert torch.equal(trees[0].token_ids, trees[1].token_ids)
    assert torch.equal(trees[0].parents, trees[1].parents)
    assert trees[0].width == 0
