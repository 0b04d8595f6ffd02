"""The target's distribution under the settings of a request, row by row, as vLLM describes it."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eaglegbv.sampling import SamplingParams
from support.g_test import joint_probs
from support.tabular_target import TabularTarget


def ruled_probs(
    target: TabularTarget, prompt: Sequence[int], text: Sequence[int], params: SamplingParams
) -> NDArray[np.float64]:
    """The next token's distribution after a prompt and the tokens generated so far, ``[vocab]``."""
    logits = target.logits_after([*prompt, *text]).double().tolist()
    for token in range(len(logits)):
        logits[token] += dict(params.logit_bias).get(token, 0.0)
        allowed = params.allowed_token_ids
        forbidden = allowed is not None and token not in allowed
        forbidden |= len(text) < params.min_tokens and token in params.stop_token_ids
        forbidden |= any(ends_with((*text, token), word) for word in params.bad_words)
        if forbidden:
            logits[token] = -math.inf
        if token in (*prompt, *text):
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= params.frequency_penalty * list(text).count(token)
    weights = np.exp(np.array(logits) / params.temperature)
    return weights / weights.sum()


def ends_with(text: Sequence[int], word: Sequence[int]) -> bool:
    return tuple(text[-len(word) :]) == tuple(word)


def ruled_joint(
    target: TabularTarget, prompt: list[int], tokens: int, params: SamplingParams
) -> NDArray[np.float64]:
    """The joint distribution of the first tokens; one that ended repeats its last token."""

    def next_probs(prefixes: list[list[int]]) -> NDArray[np.float64]:
        rows = []
        for prefix in prefixes:
            text = prefix[len(prompt) :]
            if text and text[-1] in params.stop_token_ids:
                rows.append(np.eye(target.vocab_size)[text[-1]])
            else:
                rows.append(ruled_probs(target, prompt, text, params))
        return np.array(rows)

    return joint_probs(next_probs, prompt, tokens)
