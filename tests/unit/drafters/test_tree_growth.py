"""Trees grown in tensors are those of the definitions, drawn as the verifiers' references draw."""

from functools import cache

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batched_trees import forks
from support.drafting import TokenSession, random_table
from support.grown_trees import Prefix, ProbsAt, assert_grown, check_tree, grown
from support.launches import launches
from support.requests import make_request
from support.table_of import table_of
from support.tape import Tape

from eaglegbv.config import EAGLE1_SHAPE, Plan
from eaglegbv.drafters import host_drafting
from eaglegbv.drafters.draft_probs import (
    DraftProbs,
    draft_params,
    draft_probs,
    log_probs,
    pick_places,
    support,
)
from eaglegbv.drafters.host_drafting import DraftCall, draft_numbers, draft_trees, given_trees
from eaglegbv.drafters.tabular import TabularDrafter
from eaglegbv.drafters.tree_growth import TreeGrowth, level_table
from eaglegbv.sampling import SamplingParams, WarpSettings, warp
from eaglegbv.sampling_params import COLDEST, HOTTEST
from eaglegbv.tree import DraftSampling, DraftTree

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


PLANS = {
    **{str(own): Plan(paths=4, depth=3, draft_sampling=own) for own in DraftSampling},
    "widths": Plan(widths=(2, 2, 1), draft_sampling=IID),
    "wor widths": Plan(verifier="specinfer", widths=(1, 2, 2), draft_sampling=WOR),
    "shape": Plan(depth=3, draft_sampling=FIXED, shape=SHAPES[2]),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("floor", [0.0, 0.01])
def test_growing_reads_nothing_on_the_host(name: str, floor: float) -> None:
    """A recording raises at a host read; and its operations alone grow other trees."""
    plan = msgspec.structs.replace(PLANS[name], min_confidence=floor)
    draft_sampling = plan.draft_sampling or IID
    generator = torch.Generator().manual_seed(0)

    def numbers() -> list[torch.Tensor]:
        probs = torch.rand((3, 2, 4, VOCAB), generator=generator, dtype=torch.float64)
        uniforms = torch.rand((2, 4, 3), generator=generator, dtype=torch.float64)
        return [torch.randint(VOCAB, (2,), generator=generator), uniforms, probs.softmax(-1)]

    def grow(roots: torch.Tensor, uniforms: torch.Tensor, probs: torch.Tensor) -> DraftTree:
        if draft_sampling is FIXED:
            width = 7 if plan.shape else 4
            probs = probs[..., :width].log()
        table = level_table(plan, draft_sampling, roots.device, width=probs.shape[3])
        growth, count = TreeGrowth(table, roots, uniforms), 1
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


def test_independent_paths_grow_in_few_operations() -> None:
    """On a device each is a launch, where no kernels draw."""
    plan = Plan(paths=3, depth=4)
    table = level_table(plan, IID, torch.device("cpu"))
    probs = torch.full((2 * 3, VOCAB), 1 / VOCAB, dtype=torch.float64)
    ids = torch.arange(VOCAB).expand_as(probs)
    uniforms = torch.rand((2, 3, 4), dtype=torch.float64)
    with launches({}) as names:
        growth = TreeGrowth(table, torch.zeros(2, dtype=torch.int64), uniforms)
        for rows in (2, 6, 6, 6):
            growth.grow(DraftProbs(ids[:rows], probs[:rows]))
        growth.finish()
    assert len(names) <= 125, names


# --- fixed trees
def test_given_trees_are_padded_to_the_largest_and_their_paths_to_the_plan() -> None:
    nodes = ([7, 1, 2], [0, 0, 1]), ([8], [0]), ([9, 3, 4, 5], [0, 0, 0, 2])
    batch = given_trees(nodes, drafts=3, length=4)
    check_tree(batch)
    assert batch.num_nodes.tolist() == [3, 1, 4]
    assert batch.token_ids.tolist() == [[7, 1, 2, 0], [8, 0, 0, 0], [9, 3, 4, 5]]
    assert batch.depth.tolist() == [[0, 1, 2, 0], [0] * 4, [0, 1, 1, 2]]
    assert batch.draws[0].tolist() == [[1, 0, 0], [2, 0, 0], [0] * 3, [0] * 3]
    assert not batch.draws[1].any()
    assert batch.draws[2].tolist() == [[1, 2, 0], [3, 0, 0], [0] * 3, [0] * 3]
    assert batch.width == 0


# --- batches of requests on the host, where rows that have ended are not run
@given(
    draft_sampling=st.sampled_from(sorted(DraftSampling)),
    floor=st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 30),
    shape=st.sampled_from(SHAPES),
)
@settings(deadline=None)
def test_a_batch_is_padded_to_its_largest_tree(draft_sampling, floor, seed, shape) -> None:
    """And each tree is what plain growth makes of its request alone."""
    fixed = draft_sampling is FIXED
    depth = max(map(len, shape)) if fixed and shape else 5
    plan = Plan(
        paths=4, depth=depth, draft_width=7, min_confidence=floor, shape=shape if fixed else ()
    )
    table = table_of(random_table(7, seed=seed, scale=3.0))
    session = TokenSession(TabularDrafter(table))
    starts = [session.start([1], first, plan, seed=first) for first in range(7)]

    @cache
    def after(token: int) -> tuple[list[int], list[float]]:
        logits, ids = table.logits([token]), torch.arange(7)
        if fixed:
            width = support(plan, draft_sampling, 7)
            found = log_probs(logits, width=width, draft_to_target=ids)
        else:
            plainly = WarpSettings.of([SamplingParams()], [1])
            found = draft_probs(logits, plainly, width=7, draft_to_target=ids)
        return found.ids[0].tolist(), found.probs[0].tolist()

    tree = session.draft(starts, draft_sampling)
    probs_at = [
        lambda prefix, root=root: after(prefix[-1] if prefix else root) for root in range(7)
    ]
    uniforms = draft_numbers(starts, plan).numpy()
    assert_grown(tree, plan, draft_sampling, probs_at, uniforms)
    assert tree.nodes == max(tree.num_nodes)
    assert tree.length == plan.depth
    if draft_sampling is IID:
        # One less, and a verifier would take a fork's first draft for its only one.
        assert tree.forks == max(forks(tree))


# --- draft probs: the most likely candidates, warped like the target, and what a number selects
WIDE = 30
IDENTITY = torch.arange(WIDE)


def random_logits(rows, seed=0):
    return 2 * torch.randn((rows, WIDE), generator=torch.Generator().manual_seed(seed))


def warping(params, rows):
    return WarpSettings.of([params], [rows])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.5, top_k=9, top_p=0.9, min_p=0.02),
    ],
)
def test_at_full_width_a_distribution_is_the_warped_distribution_of_the_whole_vocabulary(params):
    logits = random_logits(8)
    dists = draft_probs(logits, warping(params, 8), width=WIDE, draft_to_target=IDENTITY)
    whole = warp(logits, warping(params, 8)).double().softmax(1)
    got = torch.zeros_like(whole).scatter(1, dists.ids, dists.probs)
    # The same numbers summed in another order: float64.
    torch.testing.assert_close(got, whole, atol=1e-14, rtol=0)


def test_broken_logits_break_their_own_distribution_visibly():
    logits = random_logits(3)
    logits[1, 4] = torch.nan
    dists = draft_probs(logits, warping(SamplingParams(), 3), width=8, draft_to_target=IDENTITY)
    assert dists.probs.isnan().any(1).tolist() == [False, True, False]
    assert 0 <= pick_index(dists.probs[1], 0.5) < 8  # and the tree can still be built


def test_log_distributions_are_untempered_log_probabilities_best_first():
    logits = random_logits(5)
    best = log_probs(logits, width=4, draft_to_target=IDENTITY)
    expected = logits.double().log_softmax(1).sort(1, descending=True)
    assert torch.equal(best.ids, expected.indices[:, :4])
    assert best.probs.dtype == torch.float64
    torch.testing.assert_close(best.probs, expected.values[:, :4], atol=2e-6, rtol=0)  # float32


# --- what a number selects
def pick_index(probs, uniform: float) -> int:
    number = torch.tensor(uniform, dtype=torch.float64)
    return int(pick_places(torch.as_tensor(probs), number))


@given(
    weights=st.lists(
        st.sampled_from([0.0, 1e-300, 1e-20, 1e-3, 0.1, 1 / 3, 1.0]), min_size=1
    ).filter(any),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_whatever_the_rounding_a_possible_token_is_selected(weights, uniform):
    probs = np.array(weights) / np.sum(weights)
    choice = pick_index(probs, uniform)
    assert probs[choice] > 0
    # The interval of the choice holds the number, up to the rounding of a sum of at most 1.
    end = probs[: choice + 1].sum()
    slack = 1e-14
    assert end - probs[choice] - slack <= uniform * probs.sum() <= end + slack


@pytest.mark.parametrize(
    ("temperature", "multiple", "drafted"),
    [
        (0.8, 0.5, 0.4),
        (COLDEST, 0.05, COLDEST),
        (HOTTEST, 20.0, HOTTEST),
        (COLDEST, 2, 2 * COLDEST),
    ],
)
def test_a_draft_temperature_keeps_to_the_limits(temperature, multiple, drafted) -> None:
    params = SamplingParams(temperature=temperature, top_k=5)
    found = draft_params(params, Plan(paths=2, draft_temperature=multiple))
    assert (found.temperature, found.top_k) == (drafted, 5)


@pytest.mark.parametrize("floor", [0.0, 0.05])
@pytest.mark.parametrize("paths", [1, 3])
def test_the_hosts_independent_paths_are_those_of_tensors(paths, floor, monkeypatch):
    """Node for node and draw for draw, padded to the largest tree; a broken row draws its first."""
    plan = Plan(paths=paths, depth=3, draft_width=6, min_confidence=floor)
    target_ids = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:12]
    table = 3 * torch.randn((40, 12), generator=torch.Generator().manual_seed(2))
    table[target_ids[3]] = torch.nan

    def drafted() -> DraftTree:
        requests = [
            make_request(root, (7,), plan=plan, token_ids=[root], max_tokens=9)
            for root in (3, 1, 4)
        ]
        slots = [torch.arange(paths * plan.depth)] * len(requests)
        call = DraftCall(requests, plan, DraftSampling.IID, slots)
        roots = torch.tensor([3, 1, 4])
        return draft_trees(call, target_ids, table[roots], lambda rows: table[rows.token_ids])

    found = drafted()
    monkeypatch.setattr(host_drafting, "in_columns", lambda *_: False)
    expected = drafted()
    assert found.forks == expected.forks
    assert found.columns == expected.columns
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, rtol=0, atol=0, equal_nan=True)
