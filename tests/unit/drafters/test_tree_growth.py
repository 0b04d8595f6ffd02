"""Trees grown in tensors are those of the definitions, and follow their distributions."""

import itertools
from collections import Counter
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batched_trees import forks
from support.compilers import needs_compiler
from support.g_test import g_test
from support.grown_trees import Prefix, ProbsAt, assert_grown, grown, paths_of, prefixes
from support.tape import Tape
from support.token_drafting import TokenSession, random_table
from support.tree_check import check_tree
from torch._dynamo.config import patch

from eaglegbv.config import EAGLE1_SHAPE, Plan
from eaglegbv.drafters.tabular import Table, TabularDrafter
from eaglegbv.drafters.tree_growth import DraftProbs, TreeGrowth, compiled_draw_paths, given_trees
from eaglegbv.rng import Purpose, RequestRng
from eaglegbv.tree import DraftSampling, DraftTree
from eaglegbv.verifiers.proof.chooser import exact_probs
from eaglegbv.verifiers.proof.tree import draft_iid, draft_tree, draw_greedy, draw_hub, draw_wor

VOCAB = 9
IID, WOR, GREEDY, HUB, FIXED = DraftSampling
SAMPLED = sorted(set(DraftSampling) - {FIXED})
SHAPES = ((), EAGLE1_SHAPE, ((0,), (6,), (0, 1), (0, 0), (6, 2), (0, 0, 3)), ((1,), (0,), (0, 0)))


def peaked(seed: int, width: int, *, logs: bool = False) -> ProbsAt:
    """Distributions that are peaked, with ties and zeros, others after every prefix."""

    def at(prefix: Prefix) -> tuple[list[int], list[float]]:
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        ids = rng.permutation(VOCAB)[:width]
        weights = rng.integers(0, 4, width).astype(float) ** 2
        weights[rng.integers(width)] += 1
        probs = weights / weights.sum()
        if not logs:
            return ids.tolist(), probs.tolist()
        order = np.argsort(-probs, kind="stable")
        with np.errstate(divide="ignore"):
            return ids[order].tolist(), np.log(probs[order]).tolist()

    return at


@given(
    draft_sampling=st.sampled_from(sorted(DraftSampling)),
    paths=st.integers(1, 5),
    depth=st.integers(1, 4),
    seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
    confidence=st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0]),
    width=st.integers(1, VOCAB),
    extra=st.sampled_from([None, 3, 12]),
    shape=st.sampled_from(SHAPES),
)
@settings(max_examples=80, deadline=None)
def test_trees_are_those_of_plain_growth(
    draft_sampling, paths, depth, seeds, confidence, width, extra, shape
) -> None:
    fixed = draft_sampling is FIXED
    plan = Plan(
        paths=max(paths, draft_sampling.min_paths),
        depth=max(map(len, shape)) if fixed and shape else depth,
        draft_sampling=draft_sampling,
        min_confidence=confidence,
        nodes=extra if fixed and not shape else None,
        shape=shape if fixed else (),
    )
    width = min(width, plan.fixed_beam) if fixed and not shape else width
    case = plan, draft_sampling, [peaked(seed, width, logs=fixed) for seed in seeds]
    uniforms = np.random.default_rng(seeds).random((len(seeds), plan.paths, plan.depth))
    assert_grown(grown(*case, uniforms), *case, uniforms)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=needs_compiler)])
@torch.inference_mode()
def test_compiled_they_are_too(backend: str) -> None:
    """By the graphs that are made at the start, whatever the plan."""
    draw = compiled_draw_paths(backend, torch.device("cpu"))
    assert compiled_draw_paths(backend, torch.device("cpu")) is draw  # for all engines
    with patch(error_on_recompile=True):
        for draft_sampling, paths, batch, seed in product(SAMPLED, (1, 4), (1, 5), range(2)):
            plan = Plan(
                paths=max(paths, draft_sampling.min_paths),
                depth=1 + seed,
                draft_sampling=draft_sampling,
                min_confidence=0.05 * (seed % 2),
            )
            seeds = [100 * seed + b for b in range(batch)]
            uniforms = np.random.default_rng(seeds).random((batch, plan.paths, plan.depth))
            case = plan, draft_sampling, [peaked(own, 1 + seed) for own in seeds]
            assert_grown(grown(*case, uniforms, draw=draw), *case, uniforms)


@pytest.mark.parametrize("draft_sampling", sorted(DraftSampling))
def test_growing_reads_nothing_on_the_host(draft_sampling: DraftSampling) -> None:
    """A recording raises at a host read; and its operations alone grow other trees."""
    plan = Plan(paths=4, depth=3, draft_sampling=draft_sampling, min_confidence=0.01)
    generator = torch.Generator().manual_seed(0)

    def numbers() -> list[torch.Tensor]:
        probs = torch.rand((3, 2, 4, VOCAB), generator=generator, dtype=torch.float64)
        uniforms = torch.rand((2, 4, 3), generator=generator, dtype=torch.float64)
        return [torch.randint(VOCAB, (2,), generator=generator), uniforms, probs.softmax(-1)]

    def grow(roots: torch.Tensor, uniforms: torch.Tensor, probs: torch.Tensor) -> DraftTree:
        if draft_sampling is FIXED:
            probs = probs[..., :4].log()
        growth, count = TreeGrowth(plan, draft_sampling, roots, uniforms), 1
        for level in probs:
            rows = level[:, :count].flatten(0, 1)
            ids = torch.arange(rows.shape[1]).expand_as(rows)
            count = growth.grow(DraftProbs(ids, rows)).token_ids.shape[1]
        return growth.finish()

    static = numbers()
    with Tape() as tape:
        recorded = grow(*static)
    for _ in range(3):
        new = numbers()
        for buffer, value in zip(static, new, strict=True):
            buffer.copy_(value)
        tape.replay()
        expected = grow(*new)
        for name, theirs in expected.tensors.items():
            assert torch.equal(recorded.tensors[name], theirs)


# --- drawn trees follow their distributions
def table(seed: int, vocab: int = 5):
    """A distribution of its own at every prefix, with zeros."""
    known = {}

    def q(prefix: Prefix) -> tuple[float, ...]:
        if prefix not in known:
            rng = np.random.default_rng([seed, len(prefix), *prefix])
            weights = rng.dirichlet(np.ones(vocab))
            weights[rng.permutation(vocab)[:2]] = 0
            known[prefix] = tuple((weights / weights.sum()).tolist())
        return known[prefix]

    return q


def listed(q, order) -> ProbsAt:
    """The distributions ``q``, their tokens in some order."""
    return cache(lambda prefix: (order, [q(prefix)[token] for token in order]))


FORKED = {WOR: draw_wor, GREEDY: draw_greedy}


def reference(draft_sampling, q, paths, length, chooser):
    """Draw the paths of one tree, by the definition of its sampling."""
    if draft_sampling is IID:
        return draft_iid(q, paths, length, chooser)
    if draft_sampling is HUB:
        return pairs_below_the_best(q, paths // 2, length, chooser)
    return draft_tree(FORKED[draft_sampling], q, (paths, *[1] * (length - 1)), chooser)


def pairs_below_the_best(q, beam, length, chooser):
    paths, level, indices = [()], {(): 1.0}, itertools.count()
    for _ in range(length):
        best = sorted(level, key=level.__getitem__, reverse=True)[:beam]
        # Numbers are used from left to right.
        pairs = {p: draw_hub(q(p), 2, chooser, indices) for p in paths if p in best}
        paths = [(*p, *x) for p in paths for x in ([(t,) for t in pairs.get(p, ())] or [()])]
        level = {(*p, x): level[p] * q(p)[x] for p in pairs for x in pairs[p]}
    return tuple(paths)


# One draws more than a distribution's support holds.
CASES = [(IID, 2, 2), (WOR, 2, 2), (WOR, 4, 1), (GREEDY, 3, 2), (HUB, 2, 3), (HUB, 4, 2)]


def sharper(q, power: float):
    """A draft temperature of 1 / power in place of 1."""

    def at(prefix: Prefix) -> tuple[float, ...]:
        weights = np.array(q(prefix)) ** power
        return tuple((weights / weights.sum()).tolist())

    return at


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize(("draft_sampling", "paths", "length"), CASES)
def test_trees_follow_their_distribution(draft_sampling, paths, length, planted) -> None:
    # Seeds are fixed; a right tree fails once in ten thousand choices of them. Power at level 1e-4
    # against a distribution at total variation 0.04: 0.9 or more, asserted with some room.
    q, trees = table(3), 12_000
    exact = exact_probs(lambda chooser: reference(draft_sampling, q, paths, length, chooser))
    cells = {drawn: cell for cell, drawn in enumerate(exact)}
    uniforms = RequestRng(5).draw(0, Purpose.DRAFT, trees * paths * length)
    order = np.random.default_rng(0).permutation(5).tolist()
    at = listed(sharper(q, 1.3) if planted else q, order)
    plan = Plan(paths=paths, depth=length, draft_sampling=draft_sampling)
    tree = grown(plan, draft_sampling, [at] * trees, uniforms.reshape(trees, paths, length))
    observed = [cells[tuple(paths_of(tree, b))] for b in range(trees)]
    result = g_test(observed, np.array(list(exact.values()), dtype=float))
    assert result.power > 0.85, result
    assert (result.p_value < 1e-4) == planted, result


def test_tied_tokens_are_ranked_by_their_id_and_siblings_stand_in_the_order_drawn() -> None:
    # The verifiers find the tokens that were not drawn by this very order.
    pairs: Counter[tuple[Prefix, ...]] = Counter()
    for seed in range(30):
        rng = np.random.default_rng(seed)
        at = [listed(lambda prefix: (0.1, 0.3, 0.0, 0.3, 0.3), rng.permutation(5).tolist())]
        plan = Plan(paths=3, depth=1)
        first, second, third = paths_of(grown(plan, GREEDY, at, rng.random((1, 3, 1))), 0)
        assert (first, second) == ((1,), (3,))
        assert third in {(0,), (4,)}
        pair = paths_of(grown(plan, HUB, at, rng.random((1, 3, 1))), 0)
        assert (1,) in pair
        pairs[tuple(pair)] += 1
    # Drawn first or second, the hub keeps its place: the two orders mean different things.
    assert {pair.index((1,)) for pair in pairs} == {0, 1}


# --- fixed trees
def test_given_trees_are_padded_to_the_largest_and_their_paths_to_the_plan() -> None:
    batch = given_trees([([7, 1, 2], [0, 0, 1]), ([8], [0]), ([9, 3, 4, 5], [0, 0, 0, 2])],
                        paths=3, length=4)  # fmt: skip
    check_tree(batch)
    assert batch.num_nodes.tolist() == [3, 1, 4]
    assert batch.token_ids.tolist() == [[7, 1, 2, 0], [8, 0, 0, 0], [9, 3, 4, 5]]
    assert batch.depth.tolist() == [[0, 1, 2, 0], [0] * 4, [0, 1, 1, 2]]
    assert batch.path_nodes[0].tolist() == [[1, 2, 2, 2], [0] * 4, [0] * 4]
    assert batch.path_nodes[2].tolist() == [[1] * 4, [2, 3, 3, 3], [0] * 4]
    assert batch.path_lengths.tolist() == [[2, 0, 0], [0, 0, 0], [1, 2, 0]]
    assert batch.width == 0


# --- batches of requests on the host, where rows that have ended are not run
def in_session(seed: int = 0, scale: float = 1.5) -> tuple[TokenSession, Table]:
    table = Table.of_logits(random_table(7, seed=seed, scale=scale))
    return TokenSession(TabularDrafter(table)), table


@given(
    draft_sampling=st.sampled_from(sorted(DraftSampling)),
    floor=st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 30),
    shape=st.sampled_from(SHAPES),
)
@settings(deadline=None)
def test_a_batch_is_padded_to_its_largest_tree(draft_sampling, floor, seed, shape) -> None:
    fixed = draft_sampling is FIXED
    depth = max(map(len, shape)) if fixed and shape else 5
    plan = Plan(
        paths=4, depth=depth, draft_width=7, min_confidence=floor, shape=shape if fixed else ()
    )
    session, table = in_session(seed, scale=3.0)
    starts = [session.start([1], first, plan, seed=first) for first in range(7)]
    together = session.draft(starts, draft_sampling)
    check_tree(together)
    assert together.nodes == max(together.num_nodes)
    assert together.length == plan.depth
    for b, request in enumerate(starts):
        alone = session.draft([request], draft_sampling)
        count = int(alone.num_nodes[0])
        for name, own in alone.tensors.items():
            kept = slice(count) if own.dim() > 1 and "path" not in name else ...
            assert torch.equal(together.tensors[name][b][kept], own[0]), name
        for prefix in inner_prefixes(alone):
            assert confidence(table, prefix, b) >= floor * (1 - 1e-9)
        if draft_sampling in SAMPLED[:1] + SAMPLED[2:]:  # of hub trees, only some go on
            for prefix in prefixes(alone, 0):
                sure = confidence(table, prefix, b) >= floor * (1 + 1e-9)
                assert not sure or len(prefix) == depth or prefix in inner_prefixes(alone)
    if draft_sampling is IID:
        # One less, and a verifier would take a fork's first draft for its only one.
        assert together.forks == max(forks(together))


def inner_prefixes(tree: DraftTree) -> set[Prefix]:
    return {prefix[:-1] for prefix in prefixes(tree, 0) if prefix}


def confidence(table: Table, prefix: Prefix, root: int) -> float:
    product, last = 1.0, root
    for token in prefix:
        product *= float(table.logits([last])[0].double().softmax(0)[token])
        last = token
    return product
