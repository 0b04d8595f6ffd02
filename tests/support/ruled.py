"""The target's distribution under the settings of a request, row by row, as vLLM describes it."""

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from eaglegbv.sampling import SamplingParams
from support.exact_engine import PIECES
from support.g_test import joint_probs
from support.tabular_target import TabularTarget

LANGUAGE = "(ab|a1|b2b?)(ab|a1|b2b?)(1|2)?"
"""An expression with few matches: the reference for it is the list of all of them."""

MATCHES = {"".join(parts) for parts in product(("ab", "a1", "b2", "b2b"), repeat=2)}
MATCHES |= {text + end for text in MATCHES for end in "12"}


def spelled(text: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in text)


def in_language(text: Sequence[int], token: int) -> bool:
    """Whether a match goes on like that; the end of a text comes after a match, and repeats."""
    if 0 in text:
        return token == 0
    if token == 0:
        return spelled(text) in MATCHES
    return any(match.startswith(spelled((*text, token))) for match in MATCHES)


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
        if params.structured is not None:
            assert params.structured[1] == LANGUAGE
            forbidden |= not in_language(text, token)
        if forbidden:
            logits[token] = -math.inf
        if token in (*prompt, *text):
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= params.frequency_penalty * list(text).count(token)
    if max(logits) == -math.inf:  # no text gets there
        return np.full(len(logits), math.nan)
    weights = np.exp(np.array(logits) / params.temperature)
    return weights / weights.sum()


def ends_with(text: Sequence[int], word: Sequence[int]) -> bool:
    return tuple(text[-len(word) :]) == tuple(word)


def ruled_joint(
    target: TabularTarget, prompt: list[int], tokens: int, params: SamplingParams
) -> NDArray[np.float64]:
    """The joint distribution of the first tokens; one that ended repeats its last token."""
    ends = (*params.stop_token_ids, *target.eos_token_ids)

    def next_probs(prefixes: list[list[int]]) -> NDArray[np.float64]:
        rows = []
        for prefix in prefixes:
            text = prefix[len(prompt) :]
            if text and text[-1] in ends:
                rows.append(np.eye(target.vocab_size)[text[-1]])
            else:
                rows.append(np.nan_to_num(ruled_probs(target, prompt, text, params)))
        return np.array(rows)

    return joint_probs(next_probs, prompt, tokens)
