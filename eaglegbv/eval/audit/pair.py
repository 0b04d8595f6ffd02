"""The audit of a whole engine on real models: its first tokens by a G-test.

In float32 they are compared with their exact joint distribution under the plain transformers model,
which shares neither attention nor cache with the engine. In half precision the two differ by more
than rounding in float32, and FlashInfer has kernels for nothing else. There, texts of plain
decoding by the same engine are compared with those of a rule: two samples, neither of them exact.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from time import perf_counter

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from eaglegbv.config import PLAIN, Plan
from eaglegbv.devices import dtype_name
from eaglegbv.errors import EagleGBVError, InvalidArgument
from eaglegbv.eval.audit import g_test
from eaglegbv.eval.audit.exact import Judged
from eaglegbv.eval.experiment import Bar
from eaglegbv.llm import LLM
from eaglegbv.models.hf import load_model
from eaglegbv.request import FinishReason
from eaglegbv.sampling import SamplingParams, WarpSettings, warp
from eaglegbv.text import Completion, Prompt

MOST_TEXTS = 20_000
AT_ONCE = 256  # texts that one call writes, after which progress is shown
MOST_CELLS = 256
"""Approximate upper limit on the cells compared: with more, small shifts are harder to see."""

FEWEST_CELLS = 8
ROWS = 64  # sequences of one forward of the plain model


class PairResult(Judged, frozen=True, kw_only=True):
    """Result of the audit of a rule on a pair; the first includes the time of what all share."""

    model: str  # the target
    drafter: str | None  # the drafter
    against: str  # `exact` or `plain`: what the texts are compared with
    dtype: str  # what the engine computed in
    samples: int  # number of generated texts; of plain decoding there are as many
    tokens: int  # tokens of a text that are compared
    cells: int  # cells compared: texts, with rare ones merged with others that begin alike
    statistic: float  # G
    p_value: float  # probability of a G at least as large if the engine is right
    rejects_below: float  # the probability with which a right engine is rejected
    # Total variation between the two distributions that is noticed with probability 0.9, if it is
    # spread in the way that is hardest to see.
    detectable_shift: float

    @property
    def passed(self) -> bool:
        """Whether the test did not reject the engine."""
        return self.p_value >= self.rejects_below


def audit_pair(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    plans: Sequence[Plan],
    *,
    samples: int,
    exact: bool = True,
    bar: Bar | None = None,
) -> Iterator[PairResult]:
    """Generate the same few tokens many times by each plan; yield how they compare.

    Every text has ``params.max_tokens`` tokens, the first of which is not speculated. With a small
    ``top_k`` there are few enough texts to list them all.

    Args:
        llm: The engine.
        prompts: The prompts, which take turns.
        params: Sampling settings, without penalties; the seed is that of the first text.
        plans: Fixed plans; no two texts have the same seed.
        samples: Number of texts to generate by each plan.
        exact: Compare with the exact distribution, in float32; otherwise with plain decoding.
        bar: Shows how many texts of a plan are written.

    Raises:
        InvalidArgument: There are too many possible texts, or a setting does not fit.
    """
    _check(llm, params, samples, exact=exact)
    params = msgspec.structs.replace(params, ignore_eos=True)
    ids = [llm.encode(prompt) for prompt in prompts]
    start = perf_counter()
    smallest = max(g_test.SMALLEST_EXPECTED, samples / MOST_CELLS)

    def drawn(plan: Plan, turn: int) -> list[Completion]:
        first = (params.seed or 0) + turn * samples
        completions: list[Completion] = []
        with nullcontext() if bar is None else bar("text", samples) as shown:
            for start in range(0, samples, AT_ONCE):
                numbers = range(samples)[start : start + AT_ONCE]
                seeded = [msgspec.structs.replace(params, seed=first + i) for i in numbers]
                completions += llm.generate([ids[i % len(ids)] for i in numbers], seeded, plan=plan)
                if shown is not None:
                    shown.update(len(numbers))
        failed = next((c.error for c in completions if c.finish_reason is FinishReason.ERROR), None)
        if failed is not None:
            raise EagleGBVError(failed)
        return completions

    def texts(completions: Sequence[Completion]) -> list[g_test.Text]:
        return [(i % len(ids), *c.token_ids) for i, c in enumerate(completions)]

    probs = _exact_probs(llm, ids, params) if exact else {}
    plain = [] if exact else texts(drawn(PLAIN, len(plans)))
    for turn, plan in enumerate(plans):
        ended = drawn(plan, turn)
        if exact:
            test = g_test.g_test_texts(texts(ended), probs, smallest=smallest)
        else:
            test = g_test.g_test_two(texts(ended), plain, smallest=smallest)
        forwards = sum(c.metrics.target_forwards for c in ended)
        yield PairResult(
            verifier=plan.verifier,
            model=llm.model_name,
            drafter=llm.drafter_name,
            against="exact" if exact else "plain",
            dtype=dtype_name(llm.dtype),
            samples=samples,
            tokens=params.max_tokens or 0,
            cells=test.cells,
            statistic=test.statistic,
            p_value=test.p_value,
            rejects_below=g_test.LEVEL,
            detectable_shift=g_test.detectable_shift(test.samples, test.cells, level=g_test.LEVEL),
            block_efficiency=sum(c.metrics.committed_tokens for c in ended) / max(1, forwards),
            seconds=perf_counter() - start,
        )
        start = perf_counter()


def _check(llm: LLM, params: SamplingParams, samples: int, *, exact: bool) -> None:
    needed = round(FEWEST_CELLS * g_test.SMALLEST_EXPECTED)
    if samples < needed:
        raise InvalidArgument("samples", samples, f"an integer of at least {needed}")
    if params.max_tokens is None:
        raise InvalidArgument("max_tokens", None, "an integer: texts of one length are compared")
    if params.penalised or params.stop or params.stop_token_ids:
        raise InvalidArgument("params", params, "no penalties and no stops")
    if exact and llm.dtype is not torch.float32:
        expected = "plain, as the exact distribution is known in float32 only"
        raise InvalidArgument("against", "exact", expected)


def _exact_probs(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> dict[g_test.Text, float]:
    """Return the exact distribution of a prompt's number and the text after it.

    Each token takes one forward of whole sequences by the plain transformers model.
    """
    model = load_model(llm.model_name, device=llm.device)
    return {
        (number, *text): mass / len(prompts)
        for number, prompt in enumerate(prompts)
        for text, mass in g_test.joint_probs(
            lambda texts: _next_probs(model, texts, params),
            prompt,
            params.max_tokens or 0,
            most=MOST_TEXTS,
        ).items()
    }


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
