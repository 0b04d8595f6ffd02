"""Layers along texts that the drafter thinks next to impossible: rho has an upper limit."""

import numpy as np
import pytest
import torch
from support.g_test import g_test, joint_probs
from support.tabular_target import TabularTarget

from eaglegbv.config import EngineConfig, Plan
from eaglegbv.drafters.tabular import Table, TabularDrafter
from eaglegbv.engine import Engine
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import TargetProbs
from eaglegbv.verifiers.stateful import MOST_RHO, Layers, ModifiedNode, SparseProbs, rho_after

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
