"""A client of SGLang's OpenAI endpoint, and sampling settings under SGLang's names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from eaglegbv.backends.sglang.metrics import request_metrics
from eaglegbv.config import Plan
from eaglegbv.errors import InvalidArgument, StepFailed
from eaglegbv.metrics import RequestMetrics
from eaglegbv.sampling import SamplingParams

ANSWERS_WITHIN = 3600.0
OPENAI_NAMES = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}
"""Names that differ in the OpenAI endpoints."""


@dataclass(frozen=True, slots=True)
class EndpointAnswer:
    """An answer of a server; see :class:`eaglegbv.text.Completion`."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Answers chat messages through ``/v1/chat/completions``."""

    url: str  # address of the server
    shape: Plan  # plan with the shape of its trees; its verifier does not matter here

    def __call__(
        self, prompts: list[dict[str, str]], sampling_params: SamplingParams, *, plan: Plan
    ) -> EndpointAnswer:
        """Answer one conversation.

        Raises:
            InvalidArgument: The server refused the request; the message quotes its reason.
            StepFailed: The server broke off.
        """
        del plan  # it was fixed when the server started
        body = {"model": "default", "messages": prompts, **to_openai(sampling_params)}
        body |= {"return_meta_info": True, "return_token_ids": True}
        try:
            answer = httpx.post(
                f"{self.url}/v1/chat/completions", json=body, timeout=ANSWERS_WITHIN
            )
        except httpx.HTTPError as error:
            raise StepFailed(0, str(error)) from error
        if answer.is_error:
            raise InvalidArgument("prompt", f"{len(prompts)} messages", answer.text)
        [choice] = answer.json()["choices"]
        return EndpointAnswer(
            text=choice["message"]["content"] or "",
            token_ids=choice["response_token_ids"],
            finish_reason=choice["finish_reason"],
            metrics=request_metrics(choice["meta_info"], self.shape),
        )


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
