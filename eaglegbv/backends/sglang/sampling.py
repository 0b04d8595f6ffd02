"""Sampling settings under SGLang's names."""

from typing import Any

from eaglegbv.sampling import SamplingParams

OPENAI_NAMES = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}
"""Names that differ in the OpenAI endpoints."""


def to_sglang(params: SamplingParams) -> dict[str, Any]:
    """Return the same settings under the names of SGLang's engine and ``/generate``."""
    settings: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": -1 if params.top_k is None else params.top_k,
        "min_p": params.min_p,
        "max_new_tokens": params.max_tokens,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
    }
    if params.seed is not None:
        # SGLang's seeds are signed; this keeps all 64 bits distinct.
        settings["sampling_seed"] = (params.seed + 2**63) % 2**64 - 2**63
    return settings


def to_openai(params: SamplingParams) -> dict[str, Any]:
    """Return the same settings under the names of SGLang's OpenAI endpoints."""
    return {OPENAI_NAMES.get(name, name): value for name, value in to_sglang(params).items()}
