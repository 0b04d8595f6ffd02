"""Trees grown on the device are those that grow on the host, node for node."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compilers import needs_compiler
from support.tape import Tape
from torch._dynamo.config import patch

from eaglegbv.config import Plan
from eaglegbv.drafters.tree_growth import (
    SAMPLINGS,
    BestFirstTree,
    DeviceTrees,
    DraftProbs,
    GreedyTree,
    Grow,
    GrowingTree,
    IidTree,
    WorTree,
    grow_paths,
    growth,
    pick_indices,
    pick_places,
    stack_trees,
    start_device_trees,
)
from eaglegbv.tree import DraftSampling, DraftTree, check_tree

VOCAB = 9


def probs_after(seed: int, tokens: list[int], width: int, *, logs: bool) -> tuple[list[int], list]:
    """The distribution after some tokens: peaked, with ties and zeros, another for every text."""
    rng = np.random.default_rng([seed, len(tokens), *tokens])
    ids = rng.permutation(VOCAB)[:width]
    weights = rng.integers(0, 4, width).astype(float) ** 2
    weights[rng.integers(width)] += 1
    probs = weights / weights.sum()
    if not logs:
        return ids.tolist(), probs.tolist()
    order = np.argsort(-probs, kind="stable")
    with np.errstate(divide="ignore"):
        return ids[order].tolist(), np.log(probs[order]).tolist()


def on_host(
    plan: Plan, draft_sampling: DraftSampling, seeds: list[int], uniforms: np.ndarray, width: int
) -> DraftTree:
    kinds = {
        DraftSampling.IID: IidTree,
        DraftSampling.WOR: WorTree,
        DraftSampling.GREEDY: GreedyTree,
    }
    trees: list[GrowingTree] = []
    for seed, numbers in zip(seeds, uniforms, strict=True):
        tree: GrowingTree
        if draft_sampling is DraftSampling.FIXED:
            tree = BestFirstTree(
                seed % VOCAB,
                beam=plan.fixed_beam,
                budget=plan.fixed_nodes,
                min_confidence=plan.min_confidence,
            )
        else:
            tree = kinds[draft_sampling](
                seed % VOCAB, numbers, width, min_confidence=plan.min_confidence
            )
        frontier = [0]
        for _ in range(plan.depth):
            draft_samplings = [
                probs_after(
                    seed, tree.tokens_to(node), width, logs=draft_sampling is DraftSampling.FIXED
                )
                for node in frontier
            ]
            ids, values = (np.array(part) for part in zip(*draft_samplings, strict=True))
            frontier = tree.grow(frontier, ids, values)
            if not frontier:
                break
        trees.append(tree)
    return stack_trees(
        [tree.finish() for tree in trees],
        draft_sampling,
        paths=trees[0].max_paths,
        length=plan.depth,
    )


def on_device(
    plan: Plan,
    draft_sampling: DraftSampling,
    seeds: list[int],
    uniforms: np.ndarray,
    width: int,
    *,
    grow: Grow = grow_paths,
) -> DraftTree:
    roots = torch.tensor([seed % VOCAB for seed in seeds])
    numbers = torch.from_numpy(uniforms)
    trees: DeviceTrees = start_device_trees(plan, draft_sampling, roots, numbers, grow=grow)

    def dists(texts: list[list[list[int]]]) -> DraftProbs:
        found = [
            probs_after(seed, text, width, logs=draft_sampling is DraftSampling.FIXED)
            for seed, own in zip(seeds, texts, strict=True)
            for text in own
        ]
        ids, values = zip(*found, strict=True)
        return DraftProbs(torch.tensor(ids), torch.tensor(values, dtype=torch.float64))

    texts: list[list[list[int]]] = [[[]] for _ in seeds]
    frontier = trees.begin(dists(texts))
    texts = [[[token] for token in own] for own in frontier.token_ids.tolist()]
    for _ in range(plan.depth - 1):
        frontier = trees.grow(dists(texts))
        tokens = frontier.token_ids
        parents = frontier.parents
        if parents is None:
            parents = torch.arange(trees.rows).expand_as(tokens)
        texts = [
            [[*own[parent], token] for parent, token in zip(above, drawn, strict=True)]
            for own, above, drawn in zip(texts, parents.tolist(), tokens.tolist(), strict=True)
        ]
    return trees.finish()


def assert_same(found: DraftTree, expected: DraftTree) -> None:
    check_tree(found)
    assert found.num_nodes.tolist() == expected.num_nodes.tolist()
    assert found.path_lengths.tolist() == expected.path_lengths.tolist()
    assert found.path_nodes.tolist() == expected.path_nodes.tolist()
    for b, count in enumerate(expected.num_nodes.tolist()):
        for name in ("token_ids", "parents", "depth", "draft_ids", "draft_probs"):
            ours, theirs = (getattr(tree, name)[b, :count] for tree in (found, expected))
            assert torch.equal(ours, theirs), name
        assert not found.token_ids[b, count:].any()
        assert not found.parents[b, count:].any()
        assert not found.depth[b, count:].any()


@given(
    draft_sampling=st.sampled_from(sorted(SAMPLINGS)),
    paths=st.integers(1, 5),
    depth=st.integers(1, 4),
    seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
    confidence=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    width=st.integers(1, VOCAB),
    extra=st.sampled_from([None, 3, 12]),
)
@settings(max_examples=150, deadline=None)
def test_device_trees_are_host_trees(
    draft_sampling: DraftSampling,
    paths: int,
    depth: int,
    seeds: list[int],
    confidence: float,
    width: int,
    extra: int | None,
) -> None:
    nodes = extra if draft_sampling is DraftSampling.FIXED else None
    plan = Plan(
        paths=paths,
        depth=depth,
        draft_sampling=draft_sampling,
        min_confidence=confidence,
        nodes=nodes,
    )
    width = min(width, plan.fixed_beam) if draft_sampling is DraftSampling.FIXED else width
    uniforms = np.random.default_rng(seeds).random((len(seeds), paths, depth))
    case = (plan, draft_sampling, seeds, uniforms, width)
    assert_same(on_device(*case), on_host(*case))


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=needs_compiler)])
@torch.inference_mode()
def test_compiled_they_are_too(backend: str) -> None:
    """By the graphs that are made at the start, whatever the plan."""
    grow = growth(backend, torch.device("cpu"))
    assert growth(backend, torch.device("cpu")) is grow  # for all engines
    with patch(error_on_recompile=True):
        for draft_sampling, paths, batch, seed in product(
            sorted(SAMPLINGS - {DraftSampling.FIXED}), (1, 2, 4), (1, 2, 5), range(4)
        ):
            depth = 1 + seed
            plan = Plan(
                paths=paths,
                depth=depth,
                draft_sampling=draft_sampling,
                min_confidence=0.05 * (seed % 2),
            )
            seeds = [100 * seed + b for b in range(batch)]
            uniforms = np.random.default_rng(seeds).random((batch, paths, depth))
            case = (plan, draft_sampling, seeds, uniforms, 1 + seed)
            assert_same(on_device(*case, grow=grow), on_host(*case))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.floats(0, 1, exclude_max=True))
def test_picks_are_those_of_the_host(weights: list[int], uniform: float) -> None:
    probs = np.array(weights, dtype=float)
    if not probs.any():
        probs[-1] = 1
    [expected] = pick_indices(probs, np.array([uniform]))
    assert (
        int(pick_places(torch.from_numpy(probs), torch.tensor(uniform, dtype=torch.float64)))
        == expected
    )


@pytest.mark.parametrize("draft_sampling", sorted(SAMPLINGS))
def test_growing_reads_nothing_on_the_host(draft_sampling: DraftSampling) -> None:
    """A recording raises at a host read; and its operations alone grow other trees."""
    plan = Plan(paths=3, depth=3, draft_sampling=draft_sampling, min_confidence=0.01)
    generator = torch.Generator().manual_seed(0)

    def numbers() -> list[torch.Tensor]:
        probs = torch.rand((4, 2, 3, VOCAB), generator=generator, dtype=torch.float64)
        uniforms = torch.rand((2, 3, 3), generator=generator, dtype=torch.float64)
        return [torch.randint(VOCAB, (2,), generator=generator), uniforms, probs.softmax(-1)]

    def grow(roots: torch.Tensor, uniforms: torch.Tensor, probs: torch.Tensor) -> DraftTree:
        ids = (
            torch.arange(VOCAB)[:3]
            if draft_sampling is DraftSampling.FIXED
            else torch.arange(VOCAB)
        )
        values = probs[..., :3].log() if draft_sampling is DraftSampling.FIXED else probs
        trees = start_device_trees(plan, draft_sampling, roots, uniforms)
        first = values[0, :, 0]
        trees.begin(DraftProbs(ids.expand(first.shape), first))
        for level in range(1, 3):
            rows = values[level].flatten(0, 1)
            trees.grow(DraftProbs(ids.expand(rows.shape), rows))
        return trees.finish()

    static = numbers()
    with Tape() as tape:
        recorded = grow(*static)
    for _ in range(3):
        new = numbers()
        for buffer, value in zip(static, new, strict=True):
            buffer.copy_(value)
        tape.replay()
        expected = grow(*new)
        assert recorded.draft_sampling is expected.draft_sampling
        for name, theirs in expected.tensors.items():
            assert torch.equal(recorded.tensors[name], theirs)
