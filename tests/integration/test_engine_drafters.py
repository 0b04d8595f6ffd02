"""Every drafter and every form of tree gives the target's texts and distributions.

Seeds are fixed; a right engine fails a G-test here once in ten thousand choices of them.
"""

import dataclasses

import msgspec
import numpy as np
import pytest
import torch
from support.block_drafter import BlockDrafter
from support.drafting import random_table
from support.g_test import g_test, joint_probs
from support.table_of import table_of
from support.tabular_target import TabularTarget
from support.tiny_engine import cells_of, served

from eaglegbv.config import EAGLE1_SHAPE, EngineConfig, Plan, Source
from eaglegbv.cuda_graphs import Recorder
from eaglegbv.drafters.base import Drafter
from eaglegbv.drafters.draft_model import StandaloneDrafter
from eaglegbv.drafters.ngram import NgramDrafter
from eaglegbv.drafters.tabular import TabularDrafter
from eaglegbv.engine import Engine
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling, DraftTree

VOCAB = 4
TOKENS = 3
PROMPT = [1, 0, 2, 1, 0]
LEVEL = 1e-4
SLOTS = 8192


def tabular_target() -> TabularTarget:
    return TabularTarget(vocab_size=VOCAB, order=2, max_slots=SLOTS)


TABLE = table_of(random_table(VOCAB, seed=5))
MODEL = TabularTarget(vocab_size=VOCAB, order=2, seed=7, max_slots=SLOTS)


def engine_of(target: TabularTarget, drafter: Drafter) -> Engine:
    return Engine(target, drafter, EngineConfig(max_batch=256, kv_slots=SLOTS))


def p_value(drafter: Drafter, plan: Plan) -> float:
    target = tabular_target()
    params = [SamplingParams(max_tokens=TOKENS, seed=seed) for seed in range(1_500)]
    requests = served(engine_of(target, drafter), [(PROMPT, own, plan) for own in params])

    def next_probs(prefixes: list[list[int]]) -> np.ndarray:
        logits = torch.stack([target.logits_after(prefix) for prefix in prefixes])
        return logits.double().softmax(dim=1).numpy()

    return g_test(cells_of(requests, VOCAB), joint_probs(next_probs, PROMPT, TOKENS)).p_value


DRAFTED = {
    # Paths that stop by their own confidence lose nothing.
    "table otbv, stopping": (TabularDrafter(TABLE), Plan(paths=3, depth=3, min_confidence=0.3)),
    "table specinfer wor, stopping": (
        TabularDrafter(TABLE),
        Plan(verifier="specinfer", draft_sampling="wor", paths=3, depth=3, min_confidence=0.3),
    ),
    "table otbv, widths": (TabularDrafter(TABLE), Plan(widths=(2, 2, 1))),
    "standalone otbv, delayed branching, stopping": (
        StandaloneDrafter(MODEL, vocab_size=VOCAB),
        Plan(widths=(1, 3), min_confidence=0.3),
    ),
    "table specinfer wor, widths": (
        TabularDrafter(TABLE),
        Plan(verifier="specinfer", draft_sampling="wor", widths=(2, 2)),
    ),
    "table greedy_draft": (
        TabularDrafter(TABLE),
        Plan(verifier="greedy_draft", paths=3, depth=2, draft_temperature=1.5),
    ),
    "table spechub": (TabularDrafter(TABLE), Plan(verifier="spechub", paths=4, depth=2)),
    "standalone spectr_gbv": (
        StandaloneDrafter(MODEL, vocab_size=VOCAB),
        Plan(verifier="spectr_gbv", paths=2),
    ),
    "ngram otbv": (NgramDrafter(), Plan(verifier="otbv", paths=2, depth=3)),
    "all levels from one forward, recorded": (
        BlockDrafter(VOCAB, recorder=Recorder()),
        Plan(verifier="gbv", paths=3, depth=3),
    ),
    "table otbv, EAGLE-1's tree": (
        TabularDrafter(TABLE),
        Plan(draft_sampling=DraftSampling.FIXED, depth=5, shape=EAGLE1_SHAPE),
    ),
}


@pytest.mark.parametrize("name", DRAFTED)
def test_the_joint_distribution_is_the_targets(name):
    assert p_value(*DRAFTED[name]) > LEVEL


class Cutting(TabularDrafter):
    """Takes back a draw that was unlikely: what a rule must not look at."""

    def draft(self, *args: object) -> DraftTree:
        tree = super().draft(*args)
        draws = tree.draws.clone()
        for b, [[node]] in enumerate(tree.draws.tolist()):
            kept = tree.draft_ids[b, 0] == tree.token_ids[b, node]
            if tree.draft_probs[b, 0, kept].sum() < 0.3:
                draws[b] = 0
        return dataclasses.replace(tree, draws=draws)


def test_paths_cut_before_an_unlikely_token_would_be_noticed():
    plan = Plan(verifier="block", paths=1, depth=1)
    assert p_value(Cutting(TABLE), plan) < LEVEL


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_lookup_beside_a_drafter_is_the_lookup_drafters(temperature):
    plan = Plan(paths=2, depth=4)
    looked = msgspec.structs.replace(plan, source=Source.LOOKUP)
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=3, ignore_eos=True)
    texts = []
    for drafter, own in ((NgramDrafter(), plan), (TabularDrafter(TABLE), looked), (None, looked)):
        [request] = served(engine_of(tabular_target(), drafter), [([1, 2, 1, 2], params, own)])
        texts.append((request.token_ids, request.metrics.accepted_tokens))
        assert not request.draft_states
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][1] > 0


class Misreporting(TabularDrafter):
    """Hands on other probabilities than those drawn from, in the same order of likelihood."""

    def draft(self, *args: object) -> DraftTree:
        tree = super().draft(*args)
        flat = tree.draft_probs.sqrt()
        return dataclasses.replace(tree, draft_probs=flat / flat.sum(dim=2, keepdim=True))


@pytest.mark.parametrize(
    "name", ["table otbv, stopping", "table specinfer wor, stopping", "table spechub"]
)
def test_misreported_draft_probs_are_noticed(name):
    plan = msgspec.structs.replace(DRAFTED[name][1], min_confidence=0.0)
    assert p_value(Misreporting(TABLE), plan) < LEVEL
