"""The golden texts: every rule, with each of its draft samplings, still gives these very tokens.

`golden.json` holds, by "rule/sampling", what 64 requests gave, one for each seed: a digit (base 36)
for each token, and the number of the target's decoding forwards. The target and the drafter are
tables of exact numbers, so no network's rounding can change a text. The requests of a case share an
engine; their prompts, plans and sampling parameters differ.

A change of code that should change no behaviour leaves the file as it is. If texts should change,
say why in the commit, and write the file anew:

    PYTHONPATH=tests python tests/integration/test_golden.py --write
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.table_of import table_of
from support.tabular_target import TabularTarget
from support.tiny_engine import served

from eaglegbv.config import EAGLE1_SHAPE, EngineConfig, Plan, Source
from eaglegbv.drafters.base import Drafter
from eaglegbv.drafters.draft_model import StandaloneDrafter
from eaglegbv.drafters.tabular import TabularDrafter
from eaglegbv.engine import Engine
from eaglegbv.request import Request
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling
from eaglegbv.verifiers.registry import STATEFUL_VERIFIERS, VERIFIERS

GOLDEN = Path(__file__).with_name("golden.json")
SEEDS, TOKENS, VOCAB, ORDER, SLOTS = 64, 14, 11, 2, 4096
FEW = 24  # seeds that have all pairs of plans and parameters

RULES: Mapping[str, Any] = {**VERIFIERS, **STATEFUL_VERIFIERS}

# Seed s has plan s % 3 and parameters s % 8, so that all pairs of the two occur.
PLANS: tuple[dict[str, Any], ...] = (
    {"paths": 3, "depth": 4, "draft_width": 6},
    {"paths": 2, "depth": 3, "whole_vocab": VOCAB, "draft_temperature": 1.4},
    {"paths": 4, "depth": 3, "draft_width": 8, "min_confidence": 0.05},
)
PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_k": 6},
    {"top_p": 0.85, "stop_token_ids": (3,)},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"min_p": 0.1, "repetition_penalty": 0.8},
    {"temperature": 0.0},
)

# Cases beside those of the registry: what the plans of a case have in common.
FIXED = {"verifier": "otbv", "draft_sampling": DraftSampling.FIXED}
OTHERS: Mapping[str, dict[str, Any]] = {
    "none": {"verifier": "none"},
    "otbv/fixed, static": {**FIXED, "shape": EAGLE1_SHAPE, "depth": 5},
    "otbv/fixed, beam": {**FIXED, "beam": 3, "nodes": 7},
    "otbv/fixed, lookup": {**FIXED, "source": Source.LOOKUP},
    "target_only/fixed, lookup": {**FIXED, "verifier": "target_only", "source": Source.LOOKUP},
}
CASES: Mapping[str, dict[str, Any]] = {
    **{
        f"{name}/{sampling}": {"verifier": name, "draft_sampling": sampling}
        for name, rule in RULES.items()
        for sampling in sorted(rule.draft_samplings)
    },
    **OTHERS,
}


def exact_logits(noise: int) -> torch.Tensor:
    """Return ``[states, VOCAB]`` float32 without rounding, different within a row.

    ``noise`` in 64ths says how far they are from those of ``noise`` 0.
    """
    shape = ((VOCAB + 1) ** ORDER, VOCAB)
    rng = np.random.Generator(np.random.Philox(key=39))
    steps = rng.integers(0, 256, shape) + rng.integers(-noise, noise + 1, shape)
    return torch.from_numpy((steps * 16 + np.arange(VOCAB)) / 1024).float()


class ExactTable(TabularTarget):
    """A table of given logits."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__(vocab_size=VOCAB, order=ORDER, max_slots=SLOTS)
        self._logits = logits


def plan_of(case: str, seed: int) -> Plan:
    settings = {**PLANS[seed % len(PLANS)], **CASES[case]}
    rule = RULES.get(settings["verifier"])
    if rule is not None and rule.max_paths is not None:
        settings["paths"] = min(settings["paths"], rule.max_paths)
    if settings["verifier"] in STATEFUL_VERIFIERS:
        settings.pop("min_confidence", None)
    return Plan(**settings)


def run(case: str, drafter: Drafter | None = None, *, seeds: int = SEEDS) -> list[str]:
    """Return what every seed's request gives, all served by one engine, some after others."""
    drafter = drafter or TabularDrafter(table_of(exact_logits(noise=64), order=ORDER))
    config = EngineConfig(max_batch=48, kv_slots=SLOTS, check_slots=True)
    engine = Engine(ExactTable(exact_logits(noise=0)), drafter, config)
    asked = []
    for seed in range(seeds):
        prompt = [(seed // 4 + i * i) % VOCAB for i in range(1 + seed % 5)]
        params = SamplingParams(seed=seed, max_tokens=TOKENS, **PARAMS[seed % len(PARAMS)])
        asked.append((prompt, params, plan_of(case, seed)))
    return [written(request) for request in served(engine, asked)]


def written(request: Request) -> str:
    digits = "".join(np.base_repr(token, 36) for token in request.token_ids)
    return f"{digits}:{request.metrics.target_forwards}"


def golden() -> dict[str, list[str]]:
    return {case: line.split() for case, line in json.loads(GOLDEN.read_text()).items()}


def differences(case: str, texts: list[str]) -> list[str]:
    """Name the seeds whose texts differ from the golden ones, with both."""
    expected = golden()[case]
    assert len(expected) == SEEDS
    return [
        f"seed {seed}: expected {old}, not {new}"
        for seed, (old, new) in enumerate(zip(expected, texts, strict=False))
        if old != new
    ]


def test_the_table_has_every_case_and_no_other():
    assert set(golden()) == set(CASES)


@pytest.mark.parametrize("seeds", [FEW, pytest.param(SEEDS, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("case", CASES)
def test_texts_are_the_same(case, seeds):
    texts = run(case, seeds=seeds)
    assert len(texts) == seeds
    assert differences(case, texts) == []


@pytest.mark.parametrize(
    "case",
    [
        "gbv/iid",
        "spectr_gbv/iid",
        "specinfer/wor",
        *(case for case in CASES if "otbv/fixed" in case),
    ],
)
def test_a_draft_model_with_the_same_table_gives_the_same_texts(case):
    drafter = StandaloneDrafter(ExactTable(exact_logits(noise=64)), vocab_size=VOCAB)
    assert differences(case, run(case, drafter, seeds=FEW)) == []


def test_equal_texts_mean_something():
    """They differ by seed, and so does how much is accepted."""
    for case, texts in golden().items():
        whole = [text for text in texts if text.index(":") == TOKENS]
        assert len(set(whole)) > SEEDS // 2, case
        forwards = {text[TOKENS:] for text in whole}
        assert (len(forwards) == 1) == (case == "none"), case


# What is planted in a rule: its verify with a mistake.
Verify = Callable[..., Any]


def easier_acceptance(verify: Verify) -> Verify:
    """The numbers that decide acceptance are 2% too small."""

    def wrong(self: object, tree: Any, target: Any, uniforms: Any) -> Any:
        easier = replace(uniforms, acceptance=uniforms.acceptance * 0.98)
        return verify(self, tree, target, easier)

    return wrong


def no_state(verify: Verify) -> Verify:
    """The target of later steps is not modified."""

    def wrong(self: object, tree: Any, target: Any, uniforms: Any, *layers: Any) -> Any:
        verdict = verify(self, tree, target, uniforms, *layers)
        nothing = torch.zeros_like(verdict.layers.remaining)
        return replace(verdict, layers=replace(verdict.layers, remaining=nothing))

    return wrong


@pytest.mark.parametrize(
    ("case", "mistake"),
    [("gbv/iid", easier_acceptance), ("greedy_block/iid", no_state), ("spectr_gbv/iid", no_state)],
)
def test_a_planted_mistake_is_seen(case, mistake, monkeypatch):
    rule = RULES[CASES[case]["verifier"]]
    monkeypatch.setattr(rule, "verify", mistake(rule.verify))
    assert differences(case, run(case, seeds=FEW))


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: PYTHONPATH=tests python tests/integration/test_golden.py --write")
    lines = {case: " ".join(run(case)) for case in CASES}
    GOLDEN.write_text(json.dumps(lines, indent=0) + "\n")
