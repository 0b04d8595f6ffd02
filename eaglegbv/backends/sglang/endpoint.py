"""A client of SGLang's OpenAI endpoint that reads the acceptance figures of its answers."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from eaglegbv.backends.sglang.metrics import request_metrics
from eaglegbv.backends.sglang.sampling import to_openai
from eaglegbv.config import Plan
from eaglegbv.errors import InvalidArgument, StepFailed
from eaglegbv.metrics import RequestMetrics
from eaglegbv.sampling import SamplingParams

ANSWERS_WITHIN = 3600.0


@dataclass(frozen=True, slots=True)
class EndpointAnswer:
    """An answer of a server; see :class:`eaglegbv.text.Completion`."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Answers chat messages through ``/v1/chat/completions``.

    Attributes:
        url: Address of the server.
        shape: Plan with the shape of its trees; its verifier does not matter here.
    """

    url: str
    shape: Plan

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
            answer = self._post("/v1/chat/completions", body)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            raise InvalidArgument("prompt", f"{len(prompts)} messages", said) from error
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            raise StepFailed(0, str(error)) from error
        [choice] = answer["choices"]
        return EndpointAnswer(
            text=choice["message"]["content"] or "",
            token_ids=choice["response_token_ids"],
            finish_reason=choice["finish_reason"],
            metrics=request_metrics(choice["meta_info"], self.shape),
        )

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWERS_WITHIN) as answer:
            return cast("dict[str, Any]", json.load(answer))
