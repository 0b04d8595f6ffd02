"""Verifiers with state decide as their references, step after step, and leave the same layers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.batched_trees import random_batch
from support.g_test import g_test, joint_probs
from support.stateful_runs import UNTIED, Running, start, stateful_uniforms, step
from support.tables import KINDS, Shape
from support.tabular_target import TabularTarget
from support.tape import Tape

from eaglegbv.config import EngineConfig, Plan
from eaglegbv.drafters.tabular import Table, TabularDrafter
from eaglegbv.engine import Engine
from eaglegbv.errors import SamplingMismatch
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling, TargetProbs
from eaglegbv.verifiers.registry import REFERENCES, STATEFUL_VERIFIERS
from eaglegbv.verifiers.stateful import MOST_RHO, Layers, ModifiedNode, SparseProbs, rho_after

NAMES = sorted(STATEFUL_VERIFIERS)


def agree(request: Running) -> bool:
    """Whether both keep the same layers."""
    mine, its = request.layers, request.state.layers
    return len(mine) == len(its) and all(
        (a.drafts, a.remaining) == (b.drafts, b.remaining) and abs(a.rho - b.rho) <= 1e-9 * b.rho
        for a, b in zip(mine, its, strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
def test_decides_and_leaves_as_the_reference(name: str) -> None:
    """Steps of all lengths, 0 among them, on trees of changing draft distributions."""
    rng = np.random.default_rng(len(name))
    verifier = STATEFUL_VERIFIERS[name]()
    kinds = KINDS if verifier.max_paths == 1 else UNTIED
    left = 0
    for _ in range(12):
        vocab = int(rng.integers(2, 6))
        requests = start(rng, 12, vocab, kinds)
        for _ in range(4):
            paths = verifier.max_paths or int(rng.integers(1, 5))
            shape = Shape(vocab, int(rng.integers(6)), paths)
            got, expected = step(verifier, REFERENCES[name], requests, shape, rng, kinds=kinds)
            assert got == expected
            assert all(agree(request) for request in requests)
            left += sum(len(request.layers) for request in requests)
    assert left > 100


@pytest.mark.parametrize("name", NAMES)
def test_current_draft_distribution_in_place_of_a_layers_own_is_noticed(name: str) -> None:
    rng = np.random.default_rng(3)
    verifier = STATEFUL_VERIFIERS[name]()
    wrong = 0
    for _ in range(12):
        requests = start(rng, 8, 4)
        shape = Shape(4, 4, verifier.max_paths or 2)
        step(verifier, REFERENCES[name], requests, shape, rng)
        got, expected = step(verifier, REFERENCES[name], requests, shape, rng, planted=True)
        pairs = zip(requests, got, expected, strict=True)
        wrong += sum(mine != its or not agree(request) for request, mine, its in pairs)
    assert wrong > 4


@pytest.mark.parametrize("name", NAMES)
def test_reads_nothing_on_the_host_and_refuses_other_samplings(name: str) -> None:
    rng = np.random.default_rng(4)
    verifier = STATEFUL_VERIFIERS[name]()
    paths = verifier.max_paths or 3
    batch = random_batch(DraftSampling.IID, rng, 4, paths=paths, length=3, vocab=5)
    layers = Layers(
        rho=torch.tensor([[0.5], [2.0], [1.0], [0.0]], dtype=torch.float64),
        drafts=torch.tensor([[3], [1], [2], [1]]),
        remaining=torch.tensor([[2], [1], [1], [0]]),
        most_drafts=3,
    )
    uniforms = stateful_uniforms(batch, 1, rng)
    with Tape():  # raises at a host read
        verifier.verify(batch.tree, batch.target, uniforms, layers, Always())
    other = replace(batch.tree, draft_sampling=DraftSampling.WOR)
    with pytest.raises(SamplingMismatch, match=name):
        verifier.verify(other, batch.target, uniforms, layers, Always())


class Always:
    """The same draft distribution after all tokens."""

    def after(self, tokens: torch.Tensor) -> SparseProbs:
        probs = torch.full((len(tokens), 1, 5), 0.2, dtype=torch.float64)
        return SparseProbs(torch.arange(5).expand_as(probs), probs)


# --- layers along texts that the drafter thinks next to impossible: rho has an upper limit

VOCAB, TOKENS, SAMPLES = 4, 6, 800
PROMPT = [1, 2]


def test_rho_grows_to_its_limit_and_no_further() -> None:
    rho = torch.tensor([1.0, 1e90, MOST_RHO, 0.0], dtype=torch.float64)
    b = torch.tensor([0.5, 1e-130, 5e-324, 5e-324], dtype=torch.float64)
    grown = rho_after(rho, torch.full((4,), 0.25, dtype=torch.float64), b)
    assert grown.tolist() == [0.5, MOST_RHO, MOST_RHO, 0.0]


def test_a_layer_at_the_limit_leaves_the_target_as_it_is() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -40.0]])
    target = TargetProbs.of_logits(logits, torch.zeros((1, 1), dtype=torch.int64))
    ids = torch.arange(VOCAB).unsqueeze(0)
    one = torch.ones((1, 1), dtype=torch.int64)
    layers = Layers(torch.full((1, 1), MOST_RHO, dtype=torch.float64), one, 2 * one, 1)
    draft = torch.tensor([[[0.3, 0.7]]], dtype=torch.float64)
    dists = SparseProbs(torch.tensor([[[3, 0]]]), draft)
    modified = ModifiedNode.at(target, torch.tensor([0]), layers, dists, ids)
    dist = target.probs_of(torch.tensor([0]))
    assert torch.allclose(modified.probs, dist, rtol=1e-12, atol=0)
    assert torch.allclose(modified.whole(target, torch.tensor([0])), dist, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("verifier", "paths"), [("greedy_block", 1), ("spectr_gbv", 2)])
def test_texts_that_the_drafter_never_drafts_follow_the_target(verifier: str, paths: int) -> None:
    """At a draft temperature of 0.05, b is 1e-78 at each token: rho was infinite after four."""
    target = TabularTarget(
        vocab_size=VOCAB, order=1, seed=3, scale=0.3, max_slots=4096, max_context=256
    )
    target._logits[:, 2] += 3  # mostly says 2
    logits = torch.tensor([-1000.0, 0.0, -9.0, -1000.0]).expand(VOCAB + 1, -1)  # sure of 1
    drafter = TabularDrafter(Table.of_logits(logits.clone(), order=1))
    engine = Engine(target, drafter, EngineConfig(max_batch=64))
    plan = Plan(verifier=verifier, paths=paths, depth=8, draft_temperature=0.05, draft_width=2)
    requests = [
        engine.add(PROMPT, SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=seed), plan)
        for seed in range(SAMPLES)
    ]
    while engine.has_work:
        engine.step()

    def next_probs(prefixes: list[list[int]]) -> np.ndarray:
        rows = torch.stack([target.logits_after(prefix) for prefix in prefixes])
        return rows.double().softmax(dim=1).numpy()

    cells = [int(np.ravel_multi_index(r.token_ids, [VOCAB] * TOKENS)) for r in requests]
    outcome = g_test(cells, joint_probs(next_probs, PROMPT, TOKENS))
    assert outcome.p_value > 1e-4, outcome
