"""The audit of a whole engine on real models: its first tokens by a G-test."""

from collections.abc import Callable, Sequence
from time import perf_counter

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from eaglegbv.errors import EagleGBVError, InvalidArgument
from eaglegbv.eval.g_test import (
    LEVEL,
    SMALLEST_EXPECTED,
    detectable_shift,
    g_test_texts,
    joint_probs,
)
from eaglegbv.llm import LLM
from eaglegbv.models.hf import load_model
from eaglegbv.request import FinishReason
from eaglegbv.sampling import SamplingParams, WarpSettings, warp
from eaglegbv.text import Prompt

MOST_TEXTS = 20_000
MOST_CELLS = 256
"""Approximate upper limit on the cells compared: with more, small shifts are harder to see."""

FEWEST_CELLS = 8
ROWS = 64
"""Sequences of one forward of the plain model."""


class PairResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the audit of a pair.

    Attributes:
        verifier: Name of the verifier.
        model: The target.
        drafter: The drafter.
        samples: Number of generated texts.
        tokens: Tokens of a text that are compared.
        cells: Cells compared: texts, with rare ones merged with others that begin alike.
        statistic: G.
        p_value: Probability of a G at least as large if the engine is right.
        level: Probability with which a right engine is rejected.
        detectable_shift: Total variation from the target that is noticed with probability 0.9, if
            it is spread in the way that is hardest to see.
        block_efficiency: Tokens per target forward.
        seconds: Wall time, including the computation of the exact distribution.
    """

    verifier: str
    model: str
    drafter: str | None
    samples: int
    tokens: int
    cells: int
    statistic: float
    p_value: float
    level: float
    detectable_shift: float
    block_efficiency: float
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether the test did not reject the engine."""
        return self.p_value >= self.level

    def figures(self) -> dict[str, str]:
        """Return the measured figures as text, by name."""
        return {
            "verifier": self.verifier,
            "texts": str(self.samples),
            "cells": str(self.cells),
            "G": f"{self.statistic:.1f}",
            "p-value": f"{self.p_value:.2e}",
            "rejects below": f"{self.level:.0e}",
            "detects": f"{self.detectable_shift:.3f}",
            "block efficiency": f"{self.block_efficiency:.3f}",
            "seconds": f"{self.seconds:.1f}",
        }


def audit_pair(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams,
    *,
    samples: int,
    level: float = LEVEL,
    progress: bool = False,
    tell: Callable[[str], None] | None = None,
) -> PairResult:
    """Generate the same few tokens many times and compare them with their exact joint distribution.

    The plain transformers model gives the exact distribution, warped as ``params`` says, with one
    forward of whole sequences for each token: it shares neither attention nor cache with the
    engine. Every text has ``params.max_tokens`` tokens, the first of which is not speculated. With
    a small ``top_k`` there are few enough texts to list them all.

    Args:
        llm: The engine with its plan, in float32, so that the two differ only by rounding.
        prompt: The prompt of all texts.
        params: Sampling settings, without penalties; the seed is that of the first text.
        samples: Number of texts to generate.
        level: Probability of rejecting a right engine.
        progress: Whether to show a progress bar.
        tell: Called with a message about what comes next, and then with how long it may take.

    Raises:
        InvalidArgument: There are too many possible texts, or a setting does not fit.
    """
    if samples < FEWEST_CELLS * SMALLEST_EXPECTED:
        needed = round(FEWEST_CELLS * SMALLEST_EXPECTED)
        raise InvalidArgument("samples", samples, f"an integer of at least {needed}")
    tokens = params.max_tokens
    if tokens is None:
        raise InvalidArgument("max_tokens", None, "an integer: texts of one length are compared")
    if params.penalised or params.stop or params.stop_token_ids:
        raise InvalidArgument("params", params, "no penalties and no stops")
    start = perf_counter()
    if tell is not None:
        tell(f"{samples:,} texts of {tokens} tokens, against their exact distribution")
    params = msgspec.structs.replace(params, ignore_eos=True)
    first = params.seed or 0
    one = llm.generate(prompt, msgspec.structs.replace(params, seed=first))
    model = load_model(llm.model_name, device=llm.device)
    probs = joint_probs(
        lambda texts: _next_probs(model, texts, params),
        one.prompt_token_ids,
        tokens,
        most=MOST_TEXTS,
    )
    seeded = [msgspec.structs.replace(params, seed=first + i) for i in range(samples)]
    if tell is not None:
        tell(f"about {_foretold(llm, one.prompt_token_ids, seeded):.0f} s, by the first {ROWS}")
    completions = llm.generate([one.prompt_token_ids] * samples, seeded, progress=progress)
    failed = next((c.error for c in completions if c.finish_reason is FinishReason.ERROR), None)
    if failed is not None:
        raise EagleGBVError(failed)
    smallest = max(SMALLEST_EXPECTED, samples / MOST_CELLS)
    test = g_test_texts([c.token_ids for c in completions], probs, level=level, smallest=smallest)
    forwards = sum(c.metrics.target_forwards for c in completions)
    committed = sum(c.metrics.committed_tokens for c in completions)
    return PairResult(
        verifier=llm.plan.verifier,
        model=llm.model_name,
        drafter=llm.drafter_name,
        samples=samples,
        tokens=tokens,
        cells=test.cells,
        statistic=test.statistic,
        p_value=test.p_value,
        level=level,
        detectable_shift=detectable_shift(samples, test.cells, level=level),
        block_efficiency=committed / forwards if forwards else 0.0,
        seconds=perf_counter() - start,
    )


def _foretold(llm: LLM, prompt: Sequence[int], seeded: Sequence[SamplingParams]) -> float:
    """Return roughly how many seconds all texts will take, judging by the first of them."""
    few = seeded[:ROWS]
    start = perf_counter()
    llm.generate([list(prompt)] * len(few), few)
    return (perf_counter() - start) * len(seeded) / len(few)


@torch.inference_mode()
def _next_probs(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], params: SamplingParams
) -> NDArray[np.float64]:
    rows = []
    for begin in range(0, len(texts), ROWS):
        ids = torch.tensor(texts[begin : begin + ROWS], device=model.device)
        logits = model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        warped = warp(logits, WarpSettings.of([params], [len(ids)], device=model.device))
        rows.append(warped.double().softmax(dim=1).cpu().numpy())
    probs: NDArray[np.float64] = np.concatenate(rows)
    return probs
