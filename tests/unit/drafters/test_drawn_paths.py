"""Paths drawn by kernels, interpreted on a CPU, against the tensor code that they stand for."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.launches import launches
from support.tiny_engine import tiny_engine

from eaglegbv.config import Plan
from eaglegbv.cuda_graphs import GraphMode
from eaglegbv.drafters import drawn_paths
from eaglegbv.drafters.draft_probs import draft_probs
from eaglegbv.drafters.drawn_paths import DrawnPaths
from eaglegbv.drafters.tree_growth import TreeGrowth, level_table
from eaglegbv.sampling import SamplingParams, WarpSettings
from eaglegbv.tree import DraftSampling, DraftTree

pytest.importorskip("triton", reason="Triton, which runs the kernels, is not installed")
from eaglegbv import draft_kernels, kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # else interpreted
BATCH, PATHS, VOCAB = 3, 4, 12
KERNELS = ("draw_children", "number_children")
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.5, top_k=3),
    SamplingParams(temperature=2.0, top_p=0.8),
]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let kernels run on the CPU too, in small pieces."""
    monkeypatch.setattr("eaglegbv.sampling.runs_kernels", lambda _: True)
    monkeypatch.setattr("eaglegbv.sampling.PIECE", 16)
    with np.errstate(all="ignore"):  # what programs compute in masked lanes means nothing
        yield


def most_likely_first(logits: torch.Tensor, count: int) -> torch.Tensor:
    """As on a device; on a CPU a list is in the order of token ids."""
    return logits.topk(count, dim=1).indices


def settings_of(rows: int) -> WarpSettings:
    return WarpSettings.of(PARAMS, [rows] * BATCH, device=DEVICE)


def both_trees(plan: Plan, seed: int) -> tuple[DraftTree, DraftTree]:
    """Trees of one batch, by the kernels and by tensor code, of the same logits and numbers."""
    generator = torch.Generator().manual_seed(seed)
    roots = torch.arange(90, 90 + BATCH, device=DEVICE)
    shape = (BATCH, plan.paths, plan.depth)
    uniforms = torch.rand(shape, generator=generator, dtype=torch.float64).to(DEVICE)
    draft_to_target = torch.randperm(40, generator=generator)[:VOCAB].to(DEVICE)
    how = {"width": plan.list_width(VOCAB), "draft_to_target": draft_to_target}
    drawn = DrawnPaths(plan, roots, uniforms, **how)
    growth = TreeGrowth(level_table(plan, DraftSampling.IID, DEVICE), roots, uniforms)
    for level in range(plan.depth):
        rows = plan.paths if level else 1
        logits = 3 * torch.randn(BATCH * rows, VOCAB, generator=generator)
        logits = logits.to(DEVICE)
        frontier = growth.grow(draft_probs(logits, settings_of(rows), **how))
        tokens = drawn.grow(logits, settings_of(rows))
        assert torch.equal(tokens[frontier.alive], frontier.token_ids[frontier.alive])
    return drawn.finish(), growth.finish()


@pytest.mark.parametrize("width", [1, 5, VOCAB])
@pytest.mark.parametrize(("floor", "seed"), [(0.0, 0), (0.05, 1)])
def test_trees_are_those_of_the_tensor_code(width, floor, seed, monkeypatch):
    """Node for node and draw for draw; and the lists, whose sums are taken in another order."""
    monkeypatch.setattr("eaglegbv.drafters.draft_probs._most_likely", most_likely_first)
    monkeypatch.setattr("eaglegbv.drafters.draft_probs.takes_rows", lambda *_: False)
    plan = Plan(paths=PATHS, depth=3, draft_width=width, min_confidence=floor)
    found, expected = both_trees(plan, seed)
    assert (found.draft_sampling, found.columns) == (expected.draft_sampling, True)
    for name, tensor in expected.tensors.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(found.tensors[name], tensor, rtol=0, atol=1e-14)
        else:
            assert torch.equal(found.tensors[name], tensor), name


def test_a_draft_is_drawn_in_few_launches():
    plan = Plan(paths=PATHS, depth=4, draft_width=5)
    with launches({draft_kernels: KERNELS, kernels: ("warp_rows",)}) as names:
        roots = torch.arange(BATCH, device=DEVICE)
        uniforms = torch.full((BATCH, PATHS, 4), 0.5, dtype=torch.float64, device=DEVICE)
        ids = torch.arange(VOCAB, device=DEVICE)
        before = len(names)
        drawn = DrawnPaths(plan, roots, uniforms, width=5, draft_to_target=ids)
        for level in range(4):
            rows = PATHS if level else 1
            logits = torch.empty(BATCH * rows, VOCAB, device=DEVICE)
            drawn.grow(logits, settings_of(rows))
        drawn.finish()
    taken = [name for name in names[before:] if "_to_copy" not in name]
    # Three memories are cleared; then a level takes its list, warps it, draws, and numbers nodes.
    assert len(taken) == 3 + 4 * 4, taken


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests marked gpu compare texts there")
def test_texts_are_those_of_plain_steps(monkeypatch):
    plan = Plan(paths=3, depth=2, draft_width=5)
    params = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
    prompts = [[3, 1, 4, 1, 5, 9], [2, 7, 1]]
    monkeypatch.setattr("eaglegbv.drafters.draft_probs._most_likely", most_likely_first)
    monkeypatch.setattr("eaglegbv.drafters.draft_probs.takes_rows", lambda *_: False)
    expected = tiny_engine().tokens(prompts, params, plan)
    monkeypatch.setattr(drawn_paths, "runs_kernels", lambda _: True)
    padded = tiny_engine(graphs=GraphMode.EAGER, check_slots=True)
    assert padded.tokens(prompts, params, plan) == expected
