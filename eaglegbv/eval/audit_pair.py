"""The audit of a whole engine on real models: the joint law of the first tokens, by a G-test."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from eaglegbv.errors import EagleGBVError, InvalidArgument
from eaglegbv.eval.g_test import (
    LEVEL,
    SMALLEST_EXPECTED,
    detectable_shift,
    g_test_texts,
    joint_law,
)
from eaglegbv.llm import LLM
from eaglegbv.params import SamplingParams
from eaglegbv.prompts import Prompt
from eaglegbv.request import FinishReason
from eaglegbv.warp import WarpSettings, warp

MOST_TEXTS = 20_000
MOST_CELLS = 256
"""About as many cells are compared at most: more see a small shift less well."""

FEWEST_CELLS = 8
ROWS = 64
"""Sequences of one forward of the plain model."""


class PairResult(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit of a pair found.

    Attributes:
        verifier: Name of the verifier.
        model: The target.
        drafter: The drafter.
        samples: Texts generated.
        tokens: Tokens of a text that are compared.
        cells: Cells compared: texts, rare ones merged with others that begin alike.
        statistic: G.
        p_value: Probability of a G at least as large if the engine is right.
        level: A right engine is rejected with this probability.
        detectable_shift: Total variation from the target that is noticed with probability 0.9,
            spread as it is hardest to see.
        block_efficiency: Tokens per target forward.
        seconds: Wall time, the exact law included.
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
        """Whether nothing speaks against the engine."""
        return self.p_value >= self.level

    def figures(self) -> dict[str, str]:
        """Return what was measured, for a reader: name of the figure -> its value."""
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
    """Generate the same few tokens many times and compare them with their exact joint law.

    The exact law comes from the plain transformers model, warped as ``params`` says, one forward
    of whole sequences a token: it shares neither attention nor cache with the engine. Every text
    has ``params.max_tokens`` tokens, the first of which is not speculated. With a small ``top_k``
    there are few enough texts to list.

    Args:
        llm: The engine, with its plan, in float32: in less the two differ by rounding alone.
        prompt: What all texts continue.
        params: Sampling settings, without penalties; the seed is that of the first text.
        samples: Texts to generate.
        level: Probability to reject a right engine.
        progress: Show a progress bar.
        tell: Called with what is about to be done, and then with how long it may take.

    Raises:
        InvalidArgument: There are too many possible texts, or a setting does not fit.
    """
    if samples < FEWEST_CELLS * SMALLEST_EXPECTED:
        needed = round(FEWEST_CELLS * SMALLEST_EXPECTED)
        raise InvalidArgument("samples", samples, f"an integer of at least {needed}")
    if params.penalised or params.stop or params.stop_token_ids:
        raise InvalidArgument("params", params, "no penalties and no stops")
    start = perf_counter()
    if tell is not None:
        tell(f"{samples:,} texts of {params.max_tokens} tokens, against their exact law")
    params = msgspec.structs.replace(params, ignore_eos=True)
    first = params.seed or 0
    one = llm.generate(prompt, msgspec.structs.replace(params, seed=first))
    model = _plain_model(llm)
    law = joint_law(
        lambda texts: _next_laws(model, texts, params),
        one.prompt_token_ids,
        params.max_tokens,
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
    test = g_test_texts([c.token_ids for c in completions], law, level=level, smallest=smallest)
    forwards = sum(c.metrics.target_forwards for c in completions)
    committed = sum(c.metrics.committed_tokens for c in completions)
    return PairResult(
        verifier=llm.plan.verifier,
        model=llm.model_name,
        drafter=llm.drafter_name,
        samples=samples,
        tokens=params.max_tokens,
        cells=test.cells,
        statistic=test.statistic,
        p_value=test.p_value,
        level=level,
        detectable_shift=detectable_shift(samples, test.cells, level=level),
        block_efficiency=committed / forwards if forwards else 0.0,
        seconds=perf_counter() - start,
    )


def _foretold(llm: LLM, prompt: Sequence[int], seeded: Sequence[SamplingParams]) -> float:
    """Return about how many seconds all texts take, by the first of them."""
    few = seeded[:ROWS]
    start = perf_counter()
    llm.generate([list(prompt)] * len(few), few)
    return (perf_counter() - start) * len(seeded) / len(few)


def _plain_model(llm: LLM) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(llm.model_name, dtype=torch.float32)
    torch.nn.Module.to(model, llm.device).eval()
    return cast("PreTrainedModel", model)


@torch.inference_mode()
def _next_laws(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], params: SamplingParams
) -> NDArray[np.float64]:
    rows = []
    for begin in range(0, len(texts), ROWS):
        ids = torch.tensor(texts[begin : begin + ROWS], device=model.device)
        logits = model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        warped = warp(logits, WarpSettings.of([params], [len(ids)], device=model.device))
        rows.append(warped.double().softmax(dim=1).cpu().numpy())
    laws: NDArray[np.float64] = np.concatenate(rows)
    return laws
